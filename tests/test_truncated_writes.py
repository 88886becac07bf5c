"""Writes into files that others truncate meanwhile: all bytes in place, or ESTALE."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.bindings.posix import Mapping
from headrace.engines import mapped_writer
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.write_checks import make_data, overlay
from tests.engines.test_write_suite import temporary_tmpfs
from tests.support import PAGE, folder_with_direct

MIB = 1 << 20
NBYTES = 17 * MIB + 5
OPTIONS = hr.Options(workers=3, block_nbytes=MIB, pinned_nbytes=8 * MIB)


class Truncating(FaultyFiles):
    """Somebody truncates the file just before the nth call that moves bytes into it, or after."""

    def __init__(self, path: Path, left: int, number: int, *, after: bool) -> None:
        super().__init__()
        self._path, self._left, self._after = path, left, after
        self._calls, self._number = itertools.count(1), number
        self.is_done = False

    def _around(self, call: Callable[[], Any]) -> Any:
        is_now = next(self._calls) == self._number
        if is_now and not self._after:
            self._truncate()
        result = call()
        if is_now and self._after:
            self._truncate()
        return result

    def _truncate(self) -> None:
        self.is_done = os.stat(self._path).st_size > self._left
        if self.is_done:
            os.truncate(self._path, self._left)

    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        count: int = self._around(lambda: super(Truncating, self).pwritev(fd, views, file_offset))
        return count

    def map_for_writing(self, fd: int, file_offset: int, nbytes: int) -> Mapping:
        mapping: Mapping = self._around(
            lambda: super(Truncating, self).map_for_writing(fd, file_offset, nbytes)
        )
        return mapping


@pytest.fixture(params=["tmpfs", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "tmpfs":
        with temporary_tmpfs() as made:
            yield made
    else:
        yield folder_with_direct(tmp_path)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_writer, "WINDOW_NBYTES", MIB)


def write(data: bytes, path: Path, offset: int, route: str, files: FaultyFiles) -> hr.Report:
    """Write from host memory for the routes that start there, else from a GPU."""
    cuda = FakeCuda()
    source: Any = np.frombuffer(data, np.uint8)
    if route != "host":
        source = FakeDeviceArray(cuda, len(data))
        cuda.device_write(source.pointer, data)
    with hr.Context(OPTIONS, cuda=cuda, files=files) as context:
        return hr.write_from(source, path, file_offset=offset, route=route, context=context)


def failure_of(call: Callable[[], object]) -> OSError | None:
    """How a call fails, if it does."""
    try:
        call()
    except OSError as error:
        return error
    return None


@pytest.mark.parametrize("route", ["host", "cached", "direct", "auto"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 9, 18])
@pytest.mark.parametrize("left", [0, 5 * MIB])
def test_bytes_that_are_lost_are_never_taken_for_written(
    folder: Path, route: str, after: bool, number: int, left: int
) -> None:
    """Later blocks make the file long again, with zeros where earlier ones were."""
    for old, offset in ((b"", 0), (b"\x55" * (20 * MIB), MIB + 7)):
        path, data = folder / "file", make_data(NBYTES)
        path.write_bytes(old)
        files = Truncating(path, left, number, after=after)
        error = failure_of(lambda: write(data, path, offset, route, files))  # noqa: B023
        if error is None:
            assert path.read_bytes()[offset : offset + NBYTES] == data
        else:
            assert (error.errno, error.filename) == (errno.ESTALE, str(path))
            assert files.is_done
        assert files.open_descriptors == ()


class OneByOne(Truncating):
    """So that a write is sure to come after the truncation: no other ends between the two."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(path, 0, number, after=True)
        self._turn = threading.Lock()

    def _around(self, call: Callable[[], Any]) -> Any:
        with self._turn:
            return super()._around(call)


def test_bytes_that_are_lost_are_told_where_holes_tell_nothing(tmp_path: Path) -> None:
    """The write that finds the file shorter than it was says so."""
    from headrace.storage import sink

    path, data = folder_with_direct(tmp_path) / "file", make_data(NBYTES)
    path.write_bytes(b"")
    with pytest.MonkeyPatch.context() as unknown:
        unknown.setattr(sink, "_KEEPS_ZEROS", ())
        for number in (1, 2, 9, 16):
            with pytest.raises(OSError, match="truncated to") as caught:
                write(data, path, 0, "host", OneByOne(path, number))
            assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("data", [bytes(NBYTES), bytes(MIB) + make_data(MIB)], ids=["0", "some 0"])
@pytest.mark.parametrize("route", ["host", "cached", "direct", "auto"])
def test_zeros_are_no_hole(folder: Path, route: str, data: bytes) -> None:
    path = folder / "file"
    for old, offset in ((b"", 5 * PAGE), (b"\x55" * (20 * MIB), 3), (b"\x55" * 10, 10)):
        path.write_bytes(old)
        write(data, path, offset, route, FaultyFiles())
        assert path.read_bytes() == overlay(old, data, offset)


@pytest.mark.parametrize("route", ["host", "auto"])
def test_truncation_at_any_moment_is_told_or_does_no_harm(folder: Path, route: str) -> None:
    path, data = folder / "file", make_data(NBYTES)
    for wait in range(24):
        path.write_bytes(b"")
        timer = threading.Timer(wait * 0.0007, os.truncate, (path, 0))
        timer.start()
        error = failure_of(lambda: write(data, path, 0, route, FaultyFiles()))
        timer.join()
        if error is None:
            assert path.read_bytes() in (data, b"")  # nothing, where it came after the write
        else:
            assert error.errno == errno.ESTALE

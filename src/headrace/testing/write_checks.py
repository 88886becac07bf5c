"""WriteChecks: single writes, checked from all sides; `WriteSuite` is made of them."""

from __future__ import annotations

import errno
import os
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.context import Context
from headrace.errors import HeadraceError
from headrace.memory.alignment import align_down, align_up
from headrace.reading import write_from
from headrace.report import Report
from headrace.testing.route_suite import BLOCK, RouteSuite, write_sample

NOBODY = 65_534
"""A user without rights."""

_OF_PAGES = ("direct", "gds")


class WriteChecks(RouteSuite):
    """Writes by one route, and what must hold after each."""

    __test__ = False

    @abstractmethod
    def make_buffer(self, data: bytes) -> Any:
        """Make a buffer that holds these bytes, or will once what is queued is done."""

    def check_write(
        self,
        context: Context,
        path: Path,
        data: bytes,
        file_offset: int = 0,
        *,
        route: str | None = None,
        slack: int = 0,
    ) -> Report:
        """Write, and check the whole file and the report; the buffer goes on for `slack` bytes."""
        expected = overlay(path.read_bytes() if path.exists() else b"", data, file_offset)
        buffer = self.make_buffer(data + b"\xee" * slack)
        place = {"file_offset": file_offset, "nbytes": len(data)}
        report = write_from(buffer, path, **place, route=route or self.route, context=context)
        assert first_difference(path.read_bytes(), expected) is None
        assert report.nbytes == len(data) == sum(part.nbytes for part in report.observed)
        assert report.pinned_nbytes <= context.options.pinned_nbytes
        assert (report.operation, report.durable, report.snapshot) == ("write", False, None)
        if route is None and data:
            (observed,) = report.observed
            assert str(observed.route) == self.route
            least = _ends_nbytes(file_offset, len(data)) if self.route in _OF_PAGES else 0
            most = len(data) if self.route in _OF_PAGES else 0
            assert least <= observed.unaligned_nbytes <= most
        return report

    def check_refused(
        self,
        error: type[Exception],
        path: Path,
        faults: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Exception:
        """Check that a write raises `error`, makes no file and changes none; give it back."""
        before = _look_around(path)
        buffer = self.make_buffer(b"\x01" * 200)
        arguments = {"route": self.route, **arguments}
        with self.open_context(**(faults or {})) as (context, files):
            with pytest.raises(error) as caught:
                write_from(buffer, path, context=context, **arguments)
            assert files.written_nbytes == 0
            assert not files.open_descriptors
        assert _look_around(path) == before
        return caught.value

    def check_failed(
        self, path: Path, code: int, faults: Mapping[str, Any], data: bytes, file_offset: int
    ) -> None:
        """Check that a write fails as told, what is left of the file, and that the next works."""
        old = path.read_bytes() if path.exists() else None
        buffer = self.make_buffer(data)
        place: dict[str, Any] = {"file_offset": file_offset, "route": self.route}
        with self.open_context(**faults) as (context, files):
            with pytest.raises(OSError, match=errno.errorcode[code]) as caught:
                write_from(buffer, path, **place, context=context)
            assert not isinstance(caught.value, HeadraceError)
            assert (caught.value.errno, caught.value.filename) == (code, str(path))
            assert not hasattr(caught.value, "__notes__")
            assert not files.open_descriptors
            _check_restored(path, old, file_offset, len(data))
            files.write_eio_at = files.enospc_after = files.fail = None
            self.check_write(context, path, data, file_offset)


def make_data(nbytes: int) -> bytes:
    """Bytes to write: not those of `write_sample`."""
    return random.Random(-1 - nbytes).randbytes(nbytes)


def make_file(folder: Path, nbytes: int | None) -> Path:
    """Write a file to be written to; None for the path of a missing one."""
    return folder / "missing" if nbytes is None else write_sample(folder, nbytes)


def overlay(old: bytes, data: bytes, file_offset: int) -> bytes:
    """What a file holds after a write; of 0 bytes, what it held before, as with pwrite(2)."""
    if not data:
        return old
    lead = old[:file_offset].ljust(file_offset, b"\0")
    return lead + data + old[file_offset + len(data) :]


def first_difference(got: bytes, wanted: bytes) -> tuple[int, int, int] | None:
    """Where two contents differ first, and their lengths; pytest would compare line by line."""
    if got == wanted:
        return None
    pairs = enumerate(zip(got, wanted, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), min(len(got), len(wanted)))
    return first, len(got), len(wanted)


def drop_from_page_cache(path: Path) -> None:
    """Have a file read from storage the next time, where it is kept in one."""
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def without_rights() -> Iterator[None]:
    """Be an ordinary user for the length of a block, also where the tests run as root."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


def _look_around(path: Path) -> dict[str, bytes]:
    """Every file beside a path, with its bytes."""
    beside = path.parent.iterdir() if path.parent.exists() else ()
    return {each.name: each.read_bytes() for each in beside if each.is_file()}


def _check_restored(path: Path, old: bytes | None, file_offset: int, nbytes: int) -> None:
    """Check that a file has its old length, and its old bytes outside of a range."""
    if old is None:
        assert not path.exists()
        return
    now, stop = path.read_bytes(), file_offset + nbytes
    assert len(now) == len(old)
    assert first_difference(now[:file_offset], old[:file_offset]) is None
    assert first_difference(now[stop:], old[stop:]) is None


def _ends_nbytes(file_offset: int, nbytes: int) -> int:
    """Bytes of a range that lie in no whole page of it."""
    stop = file_offset + nbytes
    return nbytes - max(0, align_down(stop, BLOCK) - align_up(file_offset, BLOCK))

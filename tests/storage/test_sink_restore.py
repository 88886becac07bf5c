"""What is left of a file after a write to it failed, also where others write to it meanwhile."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.testing.strategies import sizes
from tests.support import PAGE, folder_with_fallocate, open_sink, write_random

NEW = 20 * PAGE


def put(path: Path, data: bytes, file_offset: int) -> None:
    """Write as somebody else."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(fd, data, file_offset)
    os.close(fd)


@settings(deadline=None)
@given(
    old=st.none() | sizes(NEW),
    start=sizes(NEW),
    nbytes=sizes(NEW, 1),
    written=st.floats(0, 1),
    reserved=st.booleans(),
)
def test_length_and_bytes_outside_of_the_stretch_come_back(
    old: int | None, start: int, nbytes: int, written: float, reserved: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        content = None if old is None else write_random(path, old)
        with open_sink(path) as sink:
            if reserved:
                sink.allocate(max(start, sink.nbytes), max(start + nbytes, sink.nbytes))
            sink.write([memoryview(b"\xee" * int(written * nbytes))], start)
            sink.restore(start, start + nbytes)
        if content is None:
            assert not path.exists()
        else:
            now, stop = path.read_bytes(), start + nbytes
            assert (len(now), now[:start], now[stop:]) == (
                len(content),
                content[:start],
                content[stop:],
            )


@settings(deadline=None)
@given(
    old=st.none() | sizes(4 * PAGE),
    gap=sizes(6 * PAGE, 1),
    nbytes=sizes(4 * PAGE, 1),
    behind=st.booleans(),
    before=st.booleans(),
)
def test_what_others_wrote_beside_the_stretch_stays(
    old: int | None, gap: int, nbytes: int, behind: bool, before: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        content = b"" if old is None else write_random(path, old)
        start, stop = len(content) + gap, len(content) + gap + nbytes
        with open_sink(path) as sink:
            if before:
                put(path, b"b" * gap, len(content))
            sink.write([memoryview(b"\xee" * nbytes)], start)
            if behind:
                put(path, b"c" * 9, stop)
            sink.restore(start, stop)
        if not path.exists():
            assert (old, before, behind) == (None, False, False)
            return
        now = path.read_bytes()
        assert now[: len(content)] == content
        assert now[len(content) : start] == (b"b" if before else b"\0") * gap * (before or behind)
        assert now[stop:] == b"c" * 9 * behind
        assert len(now) == (stop + 9 if behind else start if before else len(content))


def test_page_that_others_hold_ready_in_the_gap_stays(tmp_path: Path) -> None:
    """A GPU may be about to write into it: to its eyes the bytes are there already."""
    path = tmp_path / "file"
    with open_sink(path) as sink:
        put(path, bytes(PAGE), PAGE)
        sink.write([memoryview(b"x")], 4 * PAGE)
        sink.restore(4 * PAGE, 5 * PAGE)
    assert path.stat().st_size == 4 * PAGE


def test_space_that_was_only_reserved_in_the_gap_is_nobodys(tmp_path: Path) -> None:
    path = folder_with_fallocate(tmp_path) / "file"
    path.touch()
    with open_sink(path) as sink:
        sink.allocate(PAGE, 4 * PAGE)
        sink.write([memoryview(b"x")], 4 * PAGE)
        sink.restore(4 * PAGE, 5 * PAGE)
    assert path.stat().st_size == 0


def test_file_that_others_removed_or_replaced_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open_sink(path) as sink:
        path.unlink()
        sink.restore(0, PAGE)
        path.write_bytes(b"theirs")
        sink.restore(0, PAGE)
    assert path.read_bytes() == b"theirs"


def test_file_that_others_made_shorter_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_random(path, 9 * PAGE)
    with open_sink(path) as sink:
        os.truncate(path, PAGE)
        sink.restore(0, 9 * PAGE)
    assert path.stat().st_size == PAGE


def test_extending_never_cuts_what_others_made_longer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open_sink(path) as sink:
        sink.extend(PAGE + 1)
        assert path.read_bytes() == bytes(PAGE + 1)
        put(path, b"theirs", 3 * PAGE)
        sink.extend(2 * PAGE)
    assert path.read_bytes() == bytes(3 * PAGE) + b"theirs"


def test_bytes_that_readers_of_the_path_cannot_see_are_an_error(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    with open_sink(path) as sink:
        sink.write([memoryview(bytes(100))], 0)
        sink.check_holds(100)
        os.truncate(path, 99)
        with pytest.raises(OSError, match="truncated to 99 bytes while it was written") as caught:
            sink.check_holds(100)
        assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))
        other.write_bytes(bytes(100))
        other.rename(path)
        with pytest.raises(OSError, match="replaced by another file while it was written"):
            sink.check_holds(99)
        path.unlink()
        with pytest.raises(OSError, match="removed while it was written"):
            sink.check_holds(99)

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bindings.posix import PosixFiles
from headrace.bindings.pymemory import map_pages
from headrace.errors import ShortRead, SourceChanged
from headrace.memory.alignment import align_up
from headrace.storage.source import Source
from headrace.testing import FaultyFiles
from tests.support import (
    PAGE,
    TIMEOUT_S,
    ends_in_time,
    folder_with_direct,
    open_descriptors,
    open_source,
    write_random,
)

NOBODY = 65_534


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("source") / "sample"
    return path, write_random(path, 10 * PAGE + 123)


def read(source: Source, lengths: Sequence[int], file_offset: int) -> list[bytes]:
    buffers = [bytearray(b"\xa5" * nbytes) for nbytes in lengths]
    source.read([memoryview(buffer) for buffer in buffers], file_offset)
    return [bytes(buffer) for buffer in buffers]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 2 * PAGE), max_size=6),
    file_offset=st.integers(0, 3 * PAGE),
    short=st.one_of(st.none(), st.integers(1, 3 * PAGE)),
    eintr=st.one_of(st.none(), st.integers(2, 4)),
)
def test_views_are_filled_in_order_however_short_the_reads(
    sample: tuple[Path, bytes],
    lengths: list[int],
    file_offset: int,
    short: int | None,
    eintr: int | None,
) -> None:
    path, content = sample
    stop = file_offset + sum(lengths)
    with open_source(path, FaultyFiles(short_reads=short, eintr_every=eintr)) as source:
        if stop > len(content):
            with pytest.raises(ShortRead):
                read(source, lengths, file_offset)
        else:
            assert b"".join(read(source, lengths, file_offset)) == content[file_offset:stop]


def test_more_views_than_one_call_takes_are_filled(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    with open_source(path) as source:
        assert b"".join(read(source, [9] * 3000, 5)) == content[5 : 5 + 27_000]


def test_past_the_end_is_a_short_read_that_says_where_the_file_ends(
    sample: tuple[Path, bytes],
) -> None:
    path, content = sample
    with open_source(path) as source, pytest.raises(ShortRead) as caught:
        read(source, [100], len(content) - 40)
    message = str(caught.value)
    assert str(path) in message
    assert f"ends at byte {len(content)}" in message
    assert f"up to {len(content) + 60}" in message


@pytest.mark.parametrize("short", [None, 1000])
def test_truncated_file_is_a_source_changed_error(tmp_path: Path, short: int | None) -> None:
    path = tmp_path / "file"
    write_random(path, 4 * PAGE)
    files = FaultyFiles(short_reads=short, truncate_after=0, to=PAGE)
    with open_source(path, files) as source, pytest.raises(SourceChanged) as caught:
        read(source, [4 * PAGE], 0)
    assert f"truncated from {4 * PAGE} to {PAGE} bytes" in str(caught.value)
    assert caught.value.filename == str(path)


def test_file_that_grew_is_read_to_where_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = write_random(path, PAGE)
    with open_source(path) as source:
        with path.open("ab") as file:
            file.write(b"more")
        assert read(source, [PAGE], 0) == [content]
        assert source.nbytes == PAGE
        with pytest.raises(SourceChanged, match=f"from {PAGE} to {PAGE + 4} bytes"):
            source.verify_unchanged()


def rewrite(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def replace(path: Path) -> None:
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def truncate_and_extend(path: Path) -> None:
    before = path.stat()
    os.truncate(path, 0)
    os.truncate(path, before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda path: os.truncate(path, 1), f"size went from {PAGE} to 1 bytes"),
        (rewrite, "was written to"),
        (truncate_and_extend, "was written to"),
        (replace, "was replaced by another file"),
        (lambda path: path.unlink(), "was removed"),
    ],
    ids=["truncated", "rewritten", "truncated and extended", "replaced", "removed"],
)
def test_change_after_the_open_is_told_by_the_check(
    tmp_path: Path, change: Any, complaint: str
) -> None:
    path = tmp_path / "file"
    write_random(path, PAGE)
    with open_source(path) as source:
        source.verify_unchanged()
        change(path)
        with pytest.raises(SourceChanged, match=complaint) as caught:
            source.verify_unchanged()
    assert caught.value.errno == errno.ESTALE
    assert caught.value.filename == str(path)


def test_folder_that_became_a_file_is_told_as_a_change(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "file"
    write_random(path, PAGE)
    with open_source(path) as source:
        folder.rename(tmp_path / "elsewhere")
        folder.write_bytes(b"")
        with pytest.raises(OSError, match=r"removed|Not a directory") as caught:
            source.verify_unchanged()
    assert isinstance(caught.value, SourceChanged)


def test_read_only_use_of_a_file_is_no_change(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    with open_source(path) as source:
        assert path.read_bytes() == content
        source.verify_unchanged()


def test_missing_file_stays_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Source(str(tmp_path / "missing"), PosixFiles())


def test_directory_stays_an_is_a_directory_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        Source(str(tmp_path), PosixFiles())
    assert caught.value.filename == str(tmp_path)


@pytest.mark.root
def test_file_of_somebody_else_stays_a_permission_error(sample: tuple[Path, bytes]) -> None:
    path, _ = sample
    os.chmod(path.parent, 0o755)
    os.chmod(path, 0o600)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(PermissionError):
            Source(str(path), PosixFiles())
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    refused: list[OSError] = []

    def attempt() -> None:
        try:
            Source(str(path), PosixFiles())
        except OSError as error:
            refused.append(error)

    if kind == "device":
        path = Path("/dev/zero")
        done = ends_in_time(attempt, TIMEOUT_S)
    elif kind == "pipe":
        os.mkfifo(path)
        done = ends_in_time(attempt, TIMEOUT_S)
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            done = ends_in_time(attempt, TIMEOUT_S)
    assert done
    assert "not a regular file" in str(refused[0])
    assert str(path) in str(refused[0])


def test_symbolic_link_is_followed(tmp_path: Path, sample: tuple[Path, bytes]) -> None:
    path, content = sample
    link = tmp_path / "link"
    link.symlink_to(path)
    with open_source(link) as source:
        assert read(source, [10], 0) == [content[:10]]
        source.verify_unchanged()


def test_read_error_stays_itself_and_names_the_file(sample: tuple[Path, bytes]) -> None:
    path, _ = sample
    with (
        open_source(path, FaultyFiles(eio_at=50)) as source,
        pytest.raises(OSError, match="EIO") as caught,
    ):
        read(source, [100], 0)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def test_descriptors_are_closed_once_and_closing_again_is_safe(tmp_path: Path) -> None:
    path = folder_with_direct(tmp_path) / "file"
    write_random(path, PAGE)
    files = FaultyFiles()
    before = open_descriptors()
    source = Source(str(path), files)
    source.open_direct()
    source.open_direct()
    assert (files.opens, len(files.open_descriptors)) == (2, 2)
    source.close()
    source.close()
    assert not files.open_descriptors
    assert open_descriptors() == before


def test_refused_o_direct_leaves_no_descriptor_and_buffered_reads_work(
    sample: tuple[Path, bytes],
) -> None:
    path, content = sample
    files = FaultyFiles(refuse_direct=True)
    with open_source(path, files) as source:
        with pytest.raises(OSError, match="Invalid argument") as caught:
            source.open_direct()
        assert caught.value.errno == errno.EINVAL
        assert len(files.open_descriptors) == 1
        assert read(source, [7], 3) == [content[3:10]]
    assert not files.open_descriptors


def test_replaced_file_is_not_opened_around_the_page_cache(tmp_path: Path) -> None:
    path = folder_with_direct(tmp_path) / "file"
    write_random(path, PAGE)
    files = FaultyFiles()
    with open_source(path, files) as source:
        replace(path)
        with pytest.raises(SourceChanged, match="replaced by another file"):
            source.open_direct()
        assert len(files.open_descriptors) == 1


def test_aligned_read_without_open_direct_says_what_to_call(sample: tuple[Path, bytes]) -> None:
    path, _ = sample
    with open_source(path) as source, pytest.raises(ValueError, match="call open_direct"):
        source.read_aligned(map_pages(PAGE), 0, PAGE, PAGE)


@settings(deadline=None)
@given(
    first=st.integers(0, 10),
    pages=st.integers(1, 8),
    missing=st.integers(0, PAGE - 1),
    short=st.one_of(st.none(), st.integers(1, 3 * PAGE)),
    eintr=st.one_of(st.none(), st.just(2)),
)
def test_aligned_read_brings_the_needed_bytes_however_short_the_counts(
    sample: tuple[Path, bytes],
    first: int,
    pages: int,
    missing: int,
    short: int | None,
    eintr: int | None,
) -> None:
    path, content = sample
    folder_with_direct(path.parent)
    start = first * PAGE
    needed = min(pages * PAGE - missing, len(content) - start)
    view = map_pages(pages * PAGE)
    with open_source(path, FaultyFiles(short_reads=short, eintr_every=eintr)) as source:
        source.open_direct()
        source.read_aligned(view, start, needed, PAGE)
    assert bytes(view[:needed]) == content[start : start + needed]


class Stingy(FaultyFiles):
    """Reads that end in the middle of a sector, as no kernel does before the end of a file."""

    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        count = super().preadv(fd, views, file_offset)
        return min(count, 100)


def test_aligned_read_without_aligned_progress_gives_right_bytes_or_an_error(
    sample: tuple[Path, bytes],
) -> None:
    path, content = sample
    folder_with_direct(path.parent)
    view, files = map_pages(2 * PAGE), Stingy()
    with open_source(path, files) as source:
        source.open_direct()
        try:
            source.read_aligned(view, PAGE, 2 * PAGE, PAGE)
        except OSError as error:
            refused = error.errno
        else:
            refused = None
    assert refused == errno.EINVAL or bytes(view) == content[PAGE : 3 * PAGE]
    assert files.buffered_nbytes == 0


def test_aligned_read_past_the_end_is_a_short_read(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    folder_with_direct(path.parent)
    stop = align_up(len(content), PAGE)
    with open_source(path) as source:
        source.open_direct()
        with pytest.raises(ShortRead, match=f"ends at byte {stop}|ends at byte {len(content)}"):
            source.read_aligned(map_pages(2 * PAGE), stop - PAGE, 2 * PAGE, PAGE)


def test_aligned_read_of_a_truncated_file_is_a_source_changed_error(tmp_path: Path) -> None:
    path = folder_with_direct(tmp_path) / "file"
    write_random(path, 4 * PAGE)
    with open_source(path, FaultyFiles(truncate_after=0, to=PAGE + 5)) as source:
        source.open_direct()
        with pytest.raises(SourceChanged, match=f"truncated from {4 * PAGE} to {PAGE + 5}"):
            source.read_aligned(map_pages(4 * PAGE), 0, 4 * PAGE, PAGE)


def test_bytes_beyond_the_needed_ones_stay_out_of_short_views(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    memory = map_pages(3 * PAGE)
    with open_source(path) as source:
        source.read([memory[: PAGE - 1]], 0)
    assert bytes(memory[: PAGE - 1]) == content[: PAGE - 1]
    assert set(memory[PAGE - 1 :]) == {0}


def test_forget_passes_the_range_on(sample: tuple[Path, bytes]) -> None:
    path, _ = sample
    files = FaultyFiles()
    with open_source(path, files) as source:
        source.forget(PAGE, 3 * PAGE)
    assert files.forgotten_nbytes == 2 * PAGE


class Broken(FaultyFiles):
    """The first look at an open file fails, as on a network file system that went away."""

    def status(self, fd: int) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_failed_open_leaves_no_descriptor(sample: tuple[Path, bytes]) -> None:
    files = Broken()
    with pytest.raises(OSError, match="Stale"):
        Source(str(sample[0]), files)
    assert files.open_descriptors == ()


def test_views_into_ctypes_memory_are_filled(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    memory = (ctypes.c_ubyte * 100)()
    with open_source(path) as source:
        source.read([memoryview(memory).cast("B")], 20)
    assert bytes(memory) == content[20:120]

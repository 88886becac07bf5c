from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bindings.posix import FileStatus, PosixFiles
from headrace.bindings.pymemory import map_pages
from headrace.storage.sink import Sink
from headrace.testing import FaultyFiles
from tests.support import (
    PAGE,
    TIMEOUT_S,
    ends_in_time,
    folder_with_direct,
    folder_with_fallocate,
    needs_mount,
    open_descriptors,
    open_sink,
    write_random,
)

OLD = bytes(range(256)) * (3 * PAGE // 256)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 2 * PAGE), max_size=6),
    file_offset=st.integers(0, 4 * PAGE),
    short=st.one_of(st.none(), st.integers(1, 3 * PAGE)),
    eintr=st.one_of(st.none(), st.integers(2, 4)),
)
def test_views_are_written_in_order_however_short_the_writes(
    lengths: list[int], file_offset: int, short: int | None, eintr: int | None
) -> None:
    views = [memoryview(os.urandom(nbytes)) for nbytes in lengths]
    written = b"".join(views)
    expected = bytearray(OLD)
    if written:
        expected.extend(bytes(max(0, file_offset - len(expected))))
        expected[file_offset : file_offset + len(written)] = written
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(OLD)
        with open_sink(path, FaultyFiles(short_writes=short, eintr_every=eintr)) as sink:
            sink.write(views, file_offset)
        assert path.read_bytes() == expected


def test_more_views_than_one_call_takes_are_written(tmp_path: Path) -> None:
    path, views = tmp_path / "file", [memoryview(bytes([n % 251] * 9)) for n in range(3000)]
    with open_sink(path) as sink:
        sink.write(views, 5)
    assert path.read_bytes() == bytes(5) + b"".join(views)


@settings(deadline=None)
@given(
    first=st.integers(0, 6),
    pages=st.integers(1, 8),
    short=st.one_of(st.none(), st.integers(1, 3 * PAGE)),
    eintr=st.one_of(st.none(), st.just(2)),
)
def test_aligned_write_moves_all_bytes_however_short_the_counts(
    tmp_path_factory: pytest.TempPathFactory,
    first: int,
    pages: int,
    short: int | None,
    eintr: int | None,
) -> None:
    path = folder_with_direct(tmp_path_factory.getbasetemp()) / "aligned"
    path.write_bytes(OLD)
    view, start = map_pages(pages * PAGE), first * PAGE
    view[:] = os.urandom(len(view))
    expected = bytearray(OLD) + bytes(max(0, start - len(OLD)))
    expected[start : start + len(view)] = view
    files = FaultyFiles(short_writes=short, eintr_every=eintr)
    with open_sink(path, files) as sink:
        sink.open_direct()
        sink.write_aligned(view, start, PAGE)
    assert path.read_bytes() == expected
    assert files.buffered_written_nbytes == 0


class Stingy(FaultyFiles):
    """Writes that end in the middle of a page."""

    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        done = FaultyFiles.pwritev(self, fd, views, file_offset)
        return done - 100 if done > PAGE else done


def test_aligned_write_goes_on_from_the_aligned_offset_below(tmp_path: Path) -> None:
    path, view = folder_with_direct(tmp_path) / "file", map_pages(4 * PAGE)
    view[:] = os.urandom(len(view))
    files = Stingy(short_writes=2 * PAGE)
    with open_sink(path, files) as sink:
        sink.open_direct()
        sink.write_aligned(view, PAGE, PAGE)
    assert path.read_bytes() == bytes(PAGE) + bytes(view)
    assert files.direct_written_nbytes > len(view)


def test_aligned_write_without_open_direct_says_what_to_call(tmp_path: Path) -> None:
    with open_sink(tmp_path / "file") as sink:
        assert sink.direct_fd is None
        with pytest.raises(ValueError, match="call open_direct"):
            sink.write_aligned(map_pages(PAGE), 0, PAGE)


class Stuck(FaultyFiles):
    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        return 0


@pytest.mark.parametrize("direct", [False, True])
def test_write_of_nothing_is_an_error_and_no_endless_loop(tmp_path: Path, direct: bool) -> None:
    path, view = folder_with_direct(tmp_path) / "file", map_pages(PAGE)
    with open_sink(path, Stuck()) as sink:
        sink.open_direct()
        with pytest.raises(OSError, match=f"at byte {PAGE} of {2 * PAGE} wrote nothing") as caught:
            sink.write_aligned(view, PAGE, PAGE) if direct else sink.write([view], PAGE)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def test_existing_file_is_opened_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = write_random(path, 100)
    with open_sink(path) as sink:
        status = sink.files.path_status(str(path))
        assert (sink.nbytes, sink.created, sink.path) == (100, False, str(path))
        assert (sink.identity, sink.fd >= 0) == (status, True)
    assert path.read_bytes() == content


def test_missing_file_is_made_less_the_umask_and_said_to_be_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        with open_sink(path) as sink:
            assert (sink.nbytes, sink.created) == (0, True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_links_are_followed_and_a_dangling_one_makes_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    for created in (True, False):
        with open_sink(link) as sink:
            sink.write([memoryview(b"x")], 0)
            assert sink.created is created
    assert path.read_bytes() == b"x"
    assert link.is_symlink()


class Raced(FaultyFiles):
    """Somebody else makes the file between our look and our attempt to make it."""

    def create(self, path: str, mode: int) -> int:
        Path(path).write_bytes(b"theirs")
        return FaultyFiles.create(self, path, mode)


def test_file_that_somebody_else_just_made_is_opened_and_not_said_to_be_ours(
    tmp_path: Path,
) -> None:
    with open_sink(tmp_path / "file", Raced()) as sink:
        assert (sink.nbytes, sink.created) == (6, False)


def test_missing_folder_stays_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Sink(str(tmp_path / "folder" / "file"), PosixFiles())
    assert caught.value.filename == str(tmp_path / "folder" / "file")


def test_directory_stays_an_is_a_directory_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        Sink(str(tmp_path), PosixFiles())
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/null") if kind == "device" else tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(path)
    files, refused = FaultyFiles(), []

    def attempt() -> None:
        try:
            Sink(str(path), files)
        except OSError as error:
            refused.append(error)

    assert ends_in_time(attempt, TIMEOUT_S)
    assert (refused[0].errno, refused[0].strerror) == (errno.EINVAL, "not a regular file")
    assert refused[0].filename == str(path)
    assert files.opens == 0


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"write_eio_at": 50}, errno.EIO),
        ({"enospc_after": 50}, errno.ENOSPC),
        ({"fail": {"pwritev": errno.EDQUOT}}, errno.EDQUOT),
    ],
)
def test_write_error_stays_itself_and_names_the_file(
    tmp_path: Path, fault: dict[str, object], code: int
) -> None:
    path = tmp_path / "file"
    files = FaultyFiles(**fault)  # type: ignore[arg-type]
    with open_sink(path, files) as sink, pytest.raises(OSError, match=str(path)) as caught:
        sink.write([memoryview(bytes(100))], 0)
    assert (caught.value.errno, caught.value.filename) == (code, str(path))


@pytest.mark.parametrize("call", ["sync", "resize"])
def test_failed_sync_or_resize_names_the_file(tmp_path: Path, call: str) -> None:
    path = tmp_path / "file"
    files = FaultyFiles(fail={call: errno.EIO})
    with open_sink(path, files) as sink, pytest.raises(OSError, match="EIO") as caught:
        sink.resize(5) if call == "resize" else sink.sync()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def test_file_is_resized_and_synced(tmp_path: Path) -> None:
    path, files = tmp_path / "file", FaultyFiles()
    write_random(path, 100)
    with open_sink(path, files) as sink:
        sink.resize(10)
        sink.resize(20)
        sink.sync()
        assert (sink.nbytes, path.stat().st_size) == (100, 20)
    assert files.synced == [str(path)]


def test_space_is_reserved_and_the_bytes_stay(tmp_path: Path) -> None:
    path = folder_with_fallocate(tmp_path) / "file"
    content = write_random(path, 100)
    with open_sink(path) as sink:
        assert sink.allocate(50, 1 << 20)
        assert sink.allocate(7, 7)
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert path.read_bytes() == content + bytes((1 << 20) - 100)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_that_cannot_reserve_says_false_and_nothing_is_written(
    tmp_path: Path, code: int
) -> None:
    path, files = tmp_path / "file", FaultyFiles(fail={"allocate": code})
    with open_sink(path, files) as sink:
        assert sink.allocate(0, 1 << 20) is False
    assert (path.stat().st_size, files.written_nbytes) == (0, 0)


@pytest.mark.parametrize("old", [0, 100, 6 * PAGE])
def test_no_room_to_reserve_is_enospc_and_restore_gives_the_size_back(
    tmp_path: Path, old: int
) -> None:
    path = folder_with_fallocate(tmp_path) / "file"
    content = write_random(path, old)
    files = FaultyFiles(enospc_after=2 * PAGE)
    with open_sink(path, files) as sink:
        with pytest.raises(OSError, match="ENOSPC") as caught:
            sink.allocate(0, 5 * PAGE)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        sink.restore(0, 5 * PAGE)
    assert path.read_bytes() == content


class Interrupted(FaultyFiles):
    """The first allocation is interrupted; a call through ctypes is not made again by Python."""

    def allocate(self, fd: int, file_offset: int, nbytes: int) -> None:
        first = not self.writing_calls
        FaultyFiles.allocate(self, fd, file_offset, nbytes if not first else 1)
        if first:
            raise InterruptedError(errno.EINTR, "fallocate")


def test_interrupted_allocation_is_made_again(tmp_path: Path) -> None:
    path = folder_with_fallocate(tmp_path) / "file"
    path.touch()
    files = Interrupted()
    with open_sink(path, files) as sink:
        files.writing_calls = 0
        assert sink.allocate(0, PAGE)
    assert path.stat().st_size == PAGE


@pytest.mark.root
def test_full_volume_is_enospc_and_has_its_space_back(tmp_path: Path) -> None:
    needs_mount("-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path))
    path = tmp_path / "file"
    try:
        with open_sink(path) as sink:
            with pytest.raises(OSError, match="ENOSPC") as caught:
                sink.allocate(0, 2 << 20)
            sink.restore(0, 2 << 20)
            assert (caught.value.errno, path.exists()) == (errno.ENOSPC, False)
            assert sink.allocate(0, 1 << 19)
            with pytest.raises(OSError, match="No space") as caught:
                sink.write([memoryview(bytes(2 << 20))], 0)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    finally:
        os.system(f"umount {tmp_path}")


def test_descriptors_are_closed_once_and_closing_again_is_safe(tmp_path: Path) -> None:
    path, files = folder_with_direct(tmp_path) / "file", FaultyFiles()
    before = open_descriptors()
    sink = Sink(str(path), files)
    sink.open_direct()
    sink.open_direct()
    assert (files.opens, len(files.open_descriptors)) == (2, 2)
    assert sink.direct_fd in files.open_descriptors
    sink.close()
    sink.close()
    assert not files.open_descriptors
    assert open_descriptors() == before


def test_forgotten_sink_closes_itself(tmp_path: Path) -> None:
    files = FaultyFiles()
    sink = Sink(str(tmp_path / "file"), files)
    del sink
    assert not files.open_descriptors


def test_descriptor_that_is_handed_over_is_used_and_closed(tmp_path: Path) -> None:
    path, files = tmp_path / "file", FaultyFiles()
    fd = files.create(str(path), 0o600)
    sink = Sink(str(path), files, fd=fd)
    sink.write([memoryview(b"x")], 0)
    assert (sink.fd, sink.created, files.opens) == (fd, False, 1)
    sink.close()
    assert not files.open_descriptors
    assert path.read_bytes() == b"x"


class Broken(FaultyFiles):
    """The first look at an open file fails, as on a network file system that went away."""

    def status(self, fd: int) -> FileStatus:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("handed_over", [False, True])
def test_failed_open_leaves_no_descriptor(tmp_path: Path, handed_over: bool) -> None:
    path, files = str(tmp_path / "file"), Broken()
    fd = files.create(path, 0o600) if handed_over else None
    with pytest.raises(OSError, match="Stale"):
        Sink(path, files, fd=fd)
    assert files.open_descriptors == ()


def test_refused_o_direct_leaves_no_descriptor_and_buffered_writes_work(tmp_path: Path) -> None:
    path, files = tmp_path / "file", FaultyFiles(refuse_direct=True)
    with open_sink(path, files) as sink:
        with pytest.raises(OSError, match="Invalid argument"):
            sink.open_direct()
        assert len(files.open_descriptors) == 1
        sink.write([memoryview(b"x")], 0)
    assert path.read_bytes() == b"x"


def test_replaced_file_is_not_opened_around_the_page_cache(tmp_path: Path) -> None:
    path, files = folder_with_direct(tmp_path) / "file", FaultyFiles()
    with open_sink(path, files) as sink:
        other = tmp_path / "other"
        other.touch()
        other.rename(path)
        with pytest.raises(
            OSError, match="replaced by another file while it was written"
        ) as caught:
            sink.open_direct()
        assert len(files.open_descriptors) == 1
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))

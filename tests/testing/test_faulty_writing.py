from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.bindings.pymemory import map_pages
from headrace.testing import FaultyFiles, Killed
from tests.support import PAGE, folder_with_direct, folder_with_fallocate

DATA = bytes(range(250)) * 40


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "file")


def write_once(files: FaultyFiles, path: str, content: bytes = DATA, file_offset: int = 0) -> int:
    fd = files.open_write(path, create=True)
    try:
        return files.pwritev(fd, [memoryview(content)], file_offset)
    finally:
        files.close(fd)


def write_direct(files: FaultyFiles, path: str, nbytes: int) -> int:
    folder_with_direct(Path(path).parent)
    fd = files.open_write(path, direct=True, create=True)
    try:
        return files.pwritev(fd, [map_pages(nbytes)], 0)
    finally:
        files.close(fd)


def test_without_faults_what_is_written_is_there_and_counted(path: str) -> None:
    files = FaultyFiles()
    assert write_once(files, path) == len(DATA)
    assert Path(path).read_bytes() == DATA
    assert (files.buffered_written_nbytes, files.direct_written_nbytes) == (len(DATA), 0)
    assert (files.written_nbytes, files.writes, files.opens) == (len(DATA), 1, 1)
    assert files.open_descriptors == ()


def test_short_writes_take_the_first_views_only(path: str) -> None:
    files = FaultyFiles(short_writes=7)
    fd = files.open_write(path, create=True)
    assert files.pwritev(fd, [memoryview(DATA)[:5], memoryview(DATA)[5:]], 0) == 7
    files.close(fd)
    assert Path(path).read_bytes() == DATA[:7]
    assert files.written_nbytes == 7


@pytest.mark.parametrize(("limit", "most"), [(1, 4096), (4096, 4096), (9000, 9000)])
def test_short_direct_writes_keep_to_the_alignment(path: str, limit: int, most: int) -> None:
    files = FaultyFiles(short_writes=limit)
    done = write_direct(files, path, 4 * PAGE)
    assert done % 512 == 0
    assert 0 < done <= most
    assert (files.direct_written_nbytes, files.buffered_written_nbytes) == (done, 0)


def test_full_disk_ends_a_write_early_and_refuses_the_next(path: str) -> None:
    files = FaultyFiles(enospc_after=100)
    assert write_once(files, path, DATA[:60]) == 60
    assert write_once(files, path, DATA[60:160], 60) == 40
    with pytest.raises(OSError, match="ENOSPC") as caught:
        write_once(files, path, DATA[100:101], 100)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, None)
    assert Path(path).read_bytes() == DATA[:100]
    assert files.written_nbytes == 100


def test_full_disk_keeps_direct_writes_to_the_alignment(path: str) -> None:
    files = FaultyFiles(enospc_after=PAGE + 5)
    assert write_direct(files, path, 4 * PAGE) == PAGE
    with pytest.raises(OSError, match="ENOSPC"):
        write_direct(files, path, PAGE)


def test_space_of_a_write_that_failed_is_free_again(path: str, tmp_path: Path) -> None:
    files = FaultyFiles(FaultyFiles(write_eio_at=0), enospc_after=10)
    with pytest.raises(OSError, match="EIO"):
        write_once(files, path, DATA[:10])
    assert write_once(files, path, DATA[:10], 1) == 10


def test_allocation_beyond_a_full_disk_is_refused_after_it_took_the_rest(tmp_path: Path) -> None:
    path = str(folder_with_fallocate(tmp_path) / "file")
    files = FaultyFiles(enospc_after=2 * PAGE)
    fd = files.open_write(path, create=True)
    files.allocate(fd, 0, PAGE)
    with pytest.raises(OSError, match="ENOSPC"):
        files.allocate(fd, PAGE, 3 * PAGE)
    files.close(fd)
    assert files.allocated_nbytes == PAGE
    assert os.stat(path).st_size == 3 * PAGE


@pytest.mark.parametrize(
    ("file_offset", "fails"), [(0, False), (1, True), (100, True), (101, False)]
)
def test_only_writes_that_cover_the_bad_offset_fail(
    path: str, file_offset: int, fails: bool
) -> None:
    files = FaultyFiles(write_eio_at=100)
    if not fails:
        assert write_once(files, path, DATA[:100], file_offset) == 100
        return
    with pytest.raises(OSError, match="EIO"):
        write_once(files, path, DATA[:100], file_offset)
    assert files.written_nbytes == 0


def test_each_second_write_is_interrupted(path: str) -> None:
    files = FaultyFiles(eintr_every=2)
    assert write_once(files, path, b"x") == 1
    with pytest.raises(InterruptedError):
        write_once(files, path, b"x")
    assert write_once(files, path, b"x") == 1


def test_file_system_without_fallocate_says_so(path: str) -> None:
    files = FaultyFiles(no_allocate=True)
    fd = files.open_write(path, create=True)
    with pytest.raises(OSError, match="not supported") as caught:
        files.allocate(fd, 0, PAGE)
    files.close(fd)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert os.stat(path).st_size == 0


def test_what_was_synced_is_told_in_order(path: str, tmp_path: Path) -> None:
    files = FaultyFiles()
    fd = files.open_write(path, create=True)
    files.sync(fd)
    files.sync_directory(str(tmp_path))
    files.close(fd)
    assert files.synced == [path, "directory"]


CALLS: dict[str, Callable[[FaultyFiles, int, str], Any]] = {
    "open_write": lambda files, fd, path: files.open_write(path),
    "create": lambda files, fd, path: files.create(path + "2", 0o600),
    "pwritev": lambda files, fd, path: files.pwritev(fd, [memoryview(b"x")], 0),
    "allocate": lambda files, fd, path: files.allocate(fd, 0, 1),
    "resize": lambda files, fd, path: files.resize(fd, 1),
    "sync": lambda files, fd, path: files.sync(fd),
    "sync_directory": lambda files, fd, path: files.sync_directory(os.path.dirname(path)),
    "rename": lambda files, fd, path: files.rename(path, path + "3"),
    "remove": lambda files, fd, path: files.remove(path),
    "lock": lambda files, fd, path: files.lock(fd),
    "set_mode": lambda files, fd, path: files.set_mode(fd, 0o600),
    "list_directory": lambda files, fd, path: files.list_directory(os.path.dirname(path)),
}
READS: dict[str, Callable[[FaultyFiles, int, str], Any]] = {
    "open": lambda files, fd, path: files.open(path),
    "status": lambda files, fd, path: files.status(fd),
    "path_status": lambda files, fd, path: files.path_status(path),
    "preadv": lambda files, fd, path: files.preadv(fd, [memoryview(bytearray(1))], 0),
    "forget": lambda files, fd, path: files.forget(fd, 0, 1),
    "expect_random": lambda files, fd, path: files.expect_random(fd),
    "map_shared": lambda files, fd, path: files.map_shared(fd, 0, 1),
    "is_cached": lambda files, fd, path: files.is_cached(fd, 0),
    "cached_pages": lambda files, fd, path: files.cached_pages(fd, 0, 1),
    "mapped_pages": lambda files, fd, path: files.mapped_pages(fd, 0, 1),
    "direct_alignment": lambda files, fd, path: files.direct_alignment(fd),
    "close": lambda files, fd, path: files.close(fd),
}


@pytest.fixture
def around(path: str, tmp_path: Path) -> Callable[[], tuple[Any, ...]]:
    """What the folder and the file hold."""

    def look() -> tuple[Any, ...]:
        status = os.stat(path)
        return sorted(os.listdir(tmp_path)), status.st_size, status.st_mode

    Path(path).touch()
    return look


@pytest.mark.parametrize("call", list(CALLS))
def test_call_that_is_named_fails_without_effect(
    path: str, around: Callable[[], tuple[Any, ...]], call: str
) -> None:
    files, before = FaultyFiles(fail={call: errno.EDQUOT}), around()
    fd = files.open(path)
    with pytest.raises(OSError, match="quota") as caught:
        CALLS[call](files, fd, path)
    files.close(fd)
    assert caught.value.errno == errno.EDQUOT
    assert around() == before


def test_unknown_name_of_a_call_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fail names \['fsync'\]; the calls .* sync,"):
        FaultyFiles(fail={"fsync": errno.EIO})


@pytest.mark.parametrize("call", list(CALLS))
def test_every_call_that_writes_is_counted_and_can_be_the_one_that_dies(
    path: str, around: Callable[[], tuple[Any, ...]], call: str
) -> None:
    files, before = FaultyFiles(die_at=2), around()
    fd = files.open(path)
    files.list_directory(os.path.dirname(path))
    with pytest.raises(Killed, match="writing call 2"):
        CALLS[call](files, fd, path)
    assert around() == before
    for later in (*CALLS.values(), *READS.values()):
        with pytest.raises(Killed):
            later(files, fd, path)
    assert around() == before
    assert files.open_descriptors == ()


def test_locks_of_the_dead_are_free_before_anything_is_closed(path: str) -> None:
    files, living = FaultyFiles(die_at=3), FaultyFiles()
    fd, other = files.open_write(path, create=True), living.open_write(path)
    assert files.lock(fd)
    assert not living.lock(other)
    with pytest.raises(Killed):
        files.sync(fd)
    assert living.lock(other)
    living.close(other)
    with pytest.raises(Killed):
        files.close(fd)

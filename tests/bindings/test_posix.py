from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from headrace.bindings.posix import PosixFiles
from headrace.bindings.pymemory import map_pages
from tests.support import (
    PAGE,
    disk_folder,
    drop,
    folder_with_direct,
    folder_with_fallocate,
    warm,
    write_random,
)


@pytest.fixture
def files() -> PosixFiles:
    return PosixFiles()


def test_opened_file_is_read_only_and_not_inherited(tmp_path: Path, files: PosixFiles) -> None:
    path = tmp_path / "file"
    content = write_random(path, 100)
    fd = files.open(str(path))
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_DIRECT) == os.O_RDONLY
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        views = [memoryview(bytearray(30)), memoryview(bytearray(100))]
        assert files.preadv(fd, views, 20) == 80
        assert bytes(views[0]) + bytes(views[1][:50]) == content[20:]
        assert files.preadv(fd, views, 100) == 0
    finally:
        files.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_direct_open_sets_o_direct(tmp_path: Path, files: PosixFiles) -> None:
    path = folder_with_direct(tmp_path) / "file"
    content = write_random(path, 2 * PAGE)
    fd = files.open(str(path), direct=True)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        view = map_pages(PAGE)
        assert files.preadv(fd, [view], PAGE) == PAGE
        assert bytes(view) == content[PAGE:]
    finally:
        files.close(fd)


def test_status_by_path_and_by_descriptor_agree_with_the_kernel(
    tmp_path: Path, files: PosixFiles
) -> None:
    path = tmp_path / "file"
    write_random(path, 77)
    fd = files.open(str(path))
    try:
        status = files.status(fd)
    finally:
        files.close(fd)
    stat = path.stat()
    assert status == files.path_status(str(path))
    assert (status.device, status.inode, status.nbytes) == (stat.st_dev, stat.st_ino, 77)
    assert (status.mtime_ns, status.mode, status.uid) == (
        stat.st_mtime_ns,
        stat.st_mode,
        os.geteuid(),
    )


@pytest.mark.parametrize("start", [0, 3 * PAGE])
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 5 * PAGE])
def test_both_ways_count_the_pages_that_are_resident(
    tmp_path: Path, files: PosixFiles, start: int, nbytes: int
) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 8 * PAGE)
    drop(path)
    fd = files.open(str(path))
    try:
        assert files.cached_pages(fd, start, nbytes) == 0
        assert files.mapped_pages(fd, start, nbytes) == 0
        warm(path, 0, 8 * PAGE)
        pages = -(-nbytes // PAGE)
        assert files.cached_pages(fd, start, nbytes) == pages
        assert files.mapped_pages(fd, start, nbytes) == pages
    finally:
        files.close(fd)


def test_counting_pages_brings_none_in(tmp_path: Path, files: PosixFiles) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 8 * PAGE)
    drop(path)
    fd = files.open(str(path))
    try:
        counts = [files.mapped_pages(fd, 0, 8 * PAGE) for _ in range(3)]
        counts += [files.cached_pages(fd, 0, 8 * PAGE) for _ in range(3)]
    finally:
        files.close(fd)
    assert counts == [0] * 6


def test_forgotten_pages_leave_the_page_cache(tmp_path: Path, files: PosixFiles) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 8 * PAGE)
    drop(path)
    warm(path, 0, 8 * PAGE)
    fd = files.open(str(path))
    try:
        files.forget(fd, 0, 8 * PAGE)
        assert files.cached_pages(fd, 0, 8 * PAGE) == 0
    finally:
        files.close(fd)


def test_failed_call_is_an_os_error_with_its_name_and_number(files: PosixFiles) -> None:
    for call, name in ((files.cached_pages, "cachestat"), (files.direct_alignment, "statx")):
        arguments = (-1, 0, PAGE) if name == "cachestat" else (-1,)
        with pytest.raises(OSError, match=f"{name}: EBADF") as caught:
            call(*arguments)
        assert caught.value.errno == errno.EBADF


def test_mapping_leaves_no_descriptor_and_closes_nothing(tmp_path: Path, files: PosixFiles) -> None:
    path = tmp_path / "file"
    write_random(path, PAGE)
    fd = files.open(str(path))
    try:
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            assert files.mapped_pages(fd, 0, PAGE) in (0, 1)
        assert os.listdir("/proc/self/fd") == before
        assert files.status(fd).nbytes == PAGE
    finally:
        files.close(fd)


def test_stated_alignment_is_a_power_of_two_that_the_kernel_accepts(
    tmp_path: Path, files: PosixFiles
) -> None:
    path = folder_with_direct(tmp_path) / "file"
    write_random(path, 2 * PAGE)
    fd = files.open(str(path))
    try:
        stated = files.direct_alignment(fd)
    finally:
        files.close(fd)
    if stated is None:
        pytest.skip("this kernel or file system does not state the alignment")
    for value in (stated.memory, stated.offset):
        assert value > 0
        assert value & (value - 1) == 0
    direct = files.open(str(path), direct=True)
    try:
        view = map_pages(PAGE)[stated.memory :][: stated.offset]
        assert files.preadv(direct, [view], stated.offset) == stated.offset
    finally:
        files.close(direct)


def test_pipe_states_no_alignment(files: PosixFiles) -> None:
    read_end, write_end = os.pipe()
    try:
        assert files.direct_alignment(read_end) is None
    finally:
        os.close(read_end)
        os.close(write_end)


def test_file_opened_for_writing_keeps_its_bytes_and_is_not_inherited(
    tmp_path: Path, files: PosixFiles
) -> None:
    path = tmp_path / "file"
    content = write_random(path, 100)
    fd = files.open_write(str(path))
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_DIRECT) == os.O_RDWR
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert files.pwritev(fd, [memoryview(b"ab"), memoryview(b"cde")], 98) == 5
    finally:
        files.close(fd)
    assert path.read_bytes() == content[:98] + b"abcde"


def test_missing_file_is_made_only_when_asked_and_less_the_umask(
    tmp_path: Path, files: PosixFiles
) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        files.open_write(str(path))
    before = os.umask(0o026)
    try:
        files.close(files.open_write(str(path), create=True))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_direct_open_for_writing_sets_o_direct(tmp_path: Path, files: PosixFiles) -> None:
    path = folder_with_direct(tmp_path) / "file"
    fd = files.open_write(str(path), direct=True, create=True)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        view = map_pages(PAGE)
        view[:3] = b"abc"
        assert files.pwritev(fd, [view], PAGE) == PAGE
    finally:
        files.close(fd)
    assert path.read_bytes() == bytes(PAGE) + b"abc" + bytes(PAGE - 3)


def test_created_file_is_new_and_no_link_is_followed(tmp_path: Path, files: PosixFiles) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(tmp_path / "missing")
    fd = files.create(str(path), 0o600)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        files.close(fd)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for taken in (path, link):
        with pytest.raises(FileExistsError):
            files.create(str(taken), 0o600)
    assert not (tmp_path / "missing").exists()


def test_allocated_range_has_space_and_reads_as_zeros(tmp_path: Path, files: PosixFiles) -> None:
    path = folder_with_fallocate(tmp_path) / "file"
    write_random(path, 10)
    fd = files.open_write(str(path))
    try:
        files.allocate(fd, 0, 1 << 20)
        assert os.fstat(fd).st_blocks * 512 >= 1 << 20
        files.resize(fd, PAGE)
        assert files.status(fd).nbytes == PAGE
    finally:
        files.close(fd)
    assert path.read_bytes()[10:] == bytes(PAGE - 10)


def test_failed_allocation_is_the_kernels_error(files: PosixFiles) -> None:
    with pytest.raises(OSError, match="fallocate: EBADF") as caught:
        files.allocate(-1, 0, PAGE)
    assert caught.value.errno == errno.EBADF


def test_lock_excludes_every_other_opening_until_it_is_closed(
    tmp_path: Path, files: PosixFiles
) -> None:
    path = str(tmp_path / "file")
    first, second = (files.open_write(path, create=True) for _ in range(2))
    try:
        assert files.lock(first)
        assert files.lock(first)
        assert not files.lock(second)
    finally:
        files.close(first)
    try:
        assert files.lock(second)
    finally:
        files.close(second)
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.lock(second)


def test_names_are_listed_renamed_synced_and_removed(tmp_path: Path, files: PosixFiles) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    assert sorted(files.list_directory(str(tmp_path))) == ["new", "old"]
    files.rename(str(old), str(new))
    before = os.listdir("/proc/self/fd")
    files.sync_directory(str(tmp_path))
    assert os.listdir("/proc/self/fd") == before
    assert files.list_directory(str(tmp_path)) == ["new"]
    assert new.read_bytes() == b"old"
    files.remove(str(new))
    assert files.list_directory(str(tmp_path)) == []
    new.touch()
    with pytest.raises(NotADirectoryError):
        files.sync_directory(str(new))


def test_mode_is_set_on_the_open_file(tmp_path: Path, files: PosixFiles) -> None:
    path = tmp_path / "file"
    fd = files.create(str(path), 0o600)
    try:
        files.set_mode(fd, 0o444)
        files.sync(fd)
    finally:
        files.close(fd)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_data_is_past_the_hole_and_a_hole_past_the_data_and_there_is_none_past_the_last(
    tmp_path: Path,
) -> None:
    files, path = PosixFiles(), tmp_path / "file"
    with path.open("wb") as file:
        file.seek(1 << 20)
        file.write(b"x")
    fd = files.open(str(path))
    try:
        found = files.next_data(fd, 0)
        assert found in (1 << 20, 0)  # 0: a file system that keeps no holes
        assert files.next_data(fd, 1 << 20) == 1 << 20
        assert files.next_data(fd, (1 << 20) + 1) is None
        assert files.next_hole(fd, 0) in (0, (1 << 20) + 1)
        assert files.next_hole(fd, 1 << 20) == (1 << 20) + 1
        assert files.next_hole(fd, (1 << 20) + 1) is None
        assert files.stored_nbytes(fd) % 512 == 0
        for call in (files.next_data, files.next_hole):
            with pytest.raises(OSError, match="Bad file descriptor"):
                call(-1, 0)
    finally:
        files.close(fd)

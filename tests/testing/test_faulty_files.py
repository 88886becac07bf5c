from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace.testing
from headrace.bindings.posix import DirectAlignment, Files
from headrace.testing import FaultyFiles
from headrace.testing.faulty_files import pages_where

NBYTES = 10_000
DATA = bytes(range(250)) * 40


class NoAlignment(FaultyFiles):
    """Files whose file system demands 4096 of O_DIRECT."""

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        return DirectAlignment(4096, 4096)


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "data"
    file.write_bytes(DATA)
    return str(file)


def read_once(files: FaultyFiles, path: str, nbytes: int = NBYTES, file_offset: int = 0) -> bytes:
    buffer = bytearray(nbytes)
    fd = files.open(path)
    try:
        done = files.preadv(fd, [memoryview(buffer)], file_offset)
    finally:
        files.close(fd)
    return bytes(buffer[:done])


def read_direct(files: FaultyFiles, path: str, nbytes: int) -> int:
    fd = files.open(path, direct=True)
    try:
        with mmap.mmap(-1, nbytes) as block, memoryview(block) as view:
            return files.preadv(fd, [view], 0)
    finally:
        files.close(fd)


def test_faulty_files_is_a_files_and_reads_what_is_there(path: str) -> None:
    files: Files = FaultyFiles()
    assert isinstance(files, FaultyFiles)
    assert read_once(files, path) == DATA
    assert (files.buffered_nbytes, files.direct_nbytes) == (NBYTES, 0)
    assert (files.reads, files.opens, files.open_descriptors) == (1, 1, ())


def test_faults_lie_over_other_files(path: str) -> None:
    inner = FaultyFiles(short_reads=100)
    assert len(read_once(FaultyFiles(inner, eintr_every=2), path)) == 100
    assert inner.reads == 1


def test_descriptors_that_stay_open_are_told(path: str) -> None:
    files = FaultyFiles()
    fd = files.open(path)
    assert files.open_descriptors == (fd,)
    files.close(fd)
    assert not files.open_descriptors


def test_closing_twice_is_an_error_and_closes_nobody_elses_file(path: str) -> None:
    files = FaultyFiles()
    fd = files.open(path)
    files.close(fd)
    with open(path, "rb") as other:
        with pytest.raises(OSError, match="EBADF"):
            files.close(fd)
        assert other.read() == DATA


def test_reading_a_closed_descriptor_is_an_error(path: str) -> None:
    files = FaultyFiles()
    fd = files.open(path)
    files.close(fd)
    with pytest.raises(OSError, match="EBADF"):
        files.preadv(fd, [memoryview(bytearray(1))], 0)


def test_short_reads_fill_the_first_views_only(path: str) -> None:
    files = FaultyFiles(short_reads=7)
    first, second, third = bytearray(5), bytearray(5), bytearray(5)
    fd = files.open(path)
    assert files.preadv(fd, [memoryview(b) for b in (first, second, third)], 1) == 7
    files.close(fd)
    assert first + second[:2] == DATA[1:8]
    assert bytes(second[2:] + third) == bytes(8)


@pytest.mark.parametrize(("limit", "got"), [(1, 512), (512, 512), (1500, 1024), (4096, 4096)])
def test_short_direct_reads_keep_to_the_alignment(path: str, limit: int, got: int) -> None:
    files = FaultyFiles(short_reads=limit)
    try:
        done = read_direct(files, path, 8192)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert (done, files.direct_nbytes, files.buffered_nbytes) == (got, got, 0)


def test_short_direct_reads_keep_to_an_alignment_above_512(path: str) -> None:
    files = FaultyFiles(NoAlignment(), short_reads=5000)
    try:
        assert read_direct(files, path, 8192) == 4096
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")


@pytest.mark.parametrize(
    ("file_offset", "fails"), [(0, False), (1, True), (100, True), (101, False)]
)
def test_only_reads_that_cover_the_bad_offset_fail(
    path: str, file_offset: int, fails: bool
) -> None:
    files = FaultyFiles(eio_at=100)
    if not fails:
        assert len(read_once(files, path, 100, file_offset)) == 100
        return
    with pytest.raises(OSError, match="EIO") as caught:
        read_once(files, path, 100, file_offset)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, None)


def test_each_third_read_is_interrupted(path: str) -> None:
    files = FaultyFiles(eintr_every=3)
    outcomes = []
    for _ in range(6):
        try:
            outcomes.append(len(read_once(files, path, 1)))
        except InterruptedError:
            outcomes.append(-1)
    assert outcomes == [1, 1, -1, 1, 1, -1]


def test_interrupting_every_read_is_refused() -> None:
    with pytest.raises(ValueError, match="eintr_every is 1"):
        FaultyFiles(eintr_every=1)


def test_file_is_truncated_once_so_many_bytes_were_read(path: str) -> None:
    files, before = FaultyFiles(truncate_after=200, to=150), os.stat(path)
    assert len(read_once(files, path, 199)) == 199
    assert os.stat(path).st_size == NBYTES
    assert len(read_once(files, path, 1)) == 1
    after = os.stat(path)
    assert (after.st_size, after.st_mtime_ns) == (150, before.st_mtime_ns)
    assert read_once(files, path) == DATA[:150]


def test_change_after_no_bytes_comes_before_the_first_read(path: str) -> None:
    assert read_once(FaultyFiles(truncate_after=0), path) == b""


def test_replaced_file_has_the_same_size_other_bytes_and_another_inode(path: str) -> None:
    files = FaultyFiles(replace_after=100)
    fd = files.open(path)
    before = files.status(fd)
    assert read_once(files, path) == DATA
    after = files.path_status(path)
    assert after.nbytes == before.nbytes
    assert after.inode != before.inode
    assert Path(path).read_bytes() == bytes(255 - byte for byte in DATA)
    now = files.status(fd)
    assert now._replace(ctime_ns=before.ctime_ns) == before
    files.close(fd)


def test_rewritten_file_is_the_same_file_with_other_bytes_and_a_later_mtime(path: str) -> None:
    files = FaultyFiles(rewrite_after=100)
    before = files.path_status(path)
    assert read_once(files, path) == DATA
    after = files.path_status(path)
    assert (after.inode, after.nbytes) == (before.inode, before.nbytes)
    assert after.mtime_ns > before.mtime_ns
    assert read_once(files, path) == bytes(255 - byte for byte in DATA)


def test_read_that_somebody_else_makes_has_the_same_faults_and_counts(path: str) -> None:
    files = FaultyFiles(short_reads=200, eio_at=700, eintr_every=3, truncate_after=150, to=150)
    fd = files.open(path)
    assert files.begin_read(fd, 0, 1000) == 200
    files.end_read(fd, 149)
    assert os.stat(path).st_size == NBYTES
    with pytest.raises(OSError, match=r"cuFileRead of \[600, 800\): EIO"):
        files.begin_read(fd, 600, 1000, call="cuFileRead")
    with pytest.raises(InterruptedError, match="cuFileRead number 3: EINTR"):
        files.begin_read(fd, 0, 1000, call="cuFileRead")
    assert files.begin_read(fd, 500, 200) == 200
    files.end_read(fd, 1)
    assert os.stat(path).st_size == 150
    assert (files.reads, files.buffered_nbytes, files.direct_nbytes) == (4, 150, 0)
    files.close(fd)
    with pytest.raises(OSError, match="EBADF"):
        files.begin_read(fd, 0, 1)


def test_refused_direct_open_is_einval_and_buffered_open_works(path: str) -> None:
    files = FaultyFiles(refuse_direct=True)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        files.open(path, direct=True)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, path)
    assert files.opens == 0
    assert read_once(files, path) == DATA


@pytest.mark.parametrize(
    ("files", "ask", "code"),
    [
        (FaultyFiles(no_cachestat=True), FaultyFiles.cached_pages, errno.ENOSYS),
        (FaultyFiles(deny_cachestat=True), FaultyFiles.cached_pages, errno.EPERM),
        (FaultyFiles(no_mincore=True), FaultyFiles.mapped_pages, errno.ENOSYS),
    ],
)
def test_residency_that_cannot_be_told_is_the_kernels_error(
    path: str, files: FaultyFiles, ask: Callable[[FaultyFiles, int, int, int], int], code: int
) -> None:
    fd = files.open(path)
    with pytest.raises(OSError, match=errno.errorcode[code]) as caught:
        ask(files, fd, 0, NBYTES)
    files.close(fd)
    assert caught.value.errno == code


def test_residency_is_what_the_test_says(path: str) -> None:
    files = FaultyFiles(resident=pages_where(lambda page: page != 1))
    fd = files.open(path)
    for count in (files.cached_pages, files.mapped_pages):
        assert count(fd, 0, 3 * mmap.PAGESIZE) == 2
        assert count(fd, mmap.PAGESIZE, 1) == 0
        assert count(fd, mmap.PAGESIZE, mmap.PAGESIZE + 1) == 1
    files.close(fd)


def test_alignment_may_be_unknown_and_forgotten_bytes_are_counted(path: str) -> None:
    files = FaultyFiles(no_dioalign=True)
    fd = files.open(path)
    assert files.direct_alignment(fd) is None
    files.forget(fd, 0, NBYTES)
    files.close(fd)
    assert files.forgotten_nbytes == NBYTES


def test_importing_the_fakes_brings_in_neither_pytest_nor_hypothesis() -> None:
    code = (
        "import sys, headrace.testing as t; t.FakeCuda, t.FaultyFiles;"
        "sys.exit(bool({'pytest', 'hypothesis'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_of_the_testing_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchSuite"):
        getattr(headrace.testing, "NoSuchSuite")  # noqa: B009

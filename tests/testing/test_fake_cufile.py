from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from headrace.bindings.cufile import CuFile
from headrace.bindings.cufile_errors import CuFileError
from headrace.bindings.cufile_values import BatchRequest
from headrace.bindings.posix import PosixFiles
from headrace.errors import DeviceError
from headrace.testing import FakeCuda, FakeCuFile, FakeDeviceArray
from headrace.testing.write_checks import overlay
from tests.support import folder_with_direct

PAGE = 4096


class Rig:
    """An open driver, a registered file and memory."""

    def __init__(self, path: Path) -> None:
        self.content = os.urandom(4 * PAGE + 5)
        path.write_bytes(self.content)
        self.cuda = FakeCuda()
        self.cufile = FakeCuFile(self.cuda)
        self.cufile.open_driver("")
        self.fd = os.open(path, os.O_RDWR)
        self.handle = self.cufile.register_handle(self.fd)
        self.array = FakeDeviceArray(self.cuda, 5 * PAGE)
        self.pointer = self.array.pointer


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "file")
    yield rig
    os.close(rig.fd)


def test_it_is_a_cufile(rig: Rig) -> None:
    cufile: CuFile = rig.cufile
    assert cufile.version() == 1200


@pytest.mark.parametrize(
    ("file_offset", "nbytes", "count"),
    [(0, PAGE, PAGE), (3, 100, 100), (4 * PAGE, PAGE, 5), (4 * PAGE + 5, 1, 0), (9 * PAGE, 9, 0)],
)
def test_counts_are_short_at_the_end_and_0_beyond_it(
    rig: Rig, file_offset: int, nbytes: int, count: int
) -> None:
    assert rig.cufile.read(rig.handle, rig.pointer, nbytes, file_offset, 7) == count
    expected = rig.content[file_offset : file_offset + count]
    assert rig.array.tobytes()[7 : 7 + count] == expected


def test_writes_reach_the_file(rig: Rig) -> None:
    rig.array.fill(1)
    assert rig.cufile.write(rig.handle, rig.pointer, 10, 3) == 10
    assert os.pread(rig.fd, 14, 0) == rig.content[:3] + b"\x01" * 10 + rig.content[13:14]


class Neighbour(PosixFiles):
    """Somebody else writes the first byte of the file right after each look into it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        done = super().preadv(fd, views, file_offset)
        with self.path.open("r+b", buffering=0) as file:
            file.write(b"N")
        return done


@pytest.mark.parametrize(
    ("file_offset", "nbytes"),
    [(PAGE, PAGE), (1, PAGE), (PAGE - 1, 2), (4 * PAGE + 1, 10), (5 * PAGE, PAGE)],
)
def test_unaligned_write_around_the_page_cache_rewrites_whole_pages_over_what_others_wrote(
    tmp_path: Path, file_offset: int, nbytes: int
) -> None:
    path = folder_with_direct(tmp_path) / "file"
    rig = Rig(path)
    rig.cufile = FakeCuFile(rig.cuda, Neighbour(path))
    rig.cufile.open_driver("")
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    rig.array.fill(1)
    count = rig.cufile.write(rig.cufile.register_handle(direct), rig.pointer, nbytes, file_offset)
    os.close(direct)
    os.close(rig.fd)
    expected = overlay(rig.content, b"\x01" * nbytes, file_offset)
    looked = (file_offset | nbytes) % PAGE
    if looked and file_offset >= PAGE:  # else nobody wrote, or it was overwritten with what was
        expected = overlay(expected, b"N", 0)
    assert (count, path.read_bytes() == expected) == (nbytes, True)


def test_operations_are_counted_by_mode_and_alignment(rig: Rig) -> None:
    rig.cufile.read(rig.handle, rig.pointer, PAGE, PAGE)
    rig.cufile.read(rig.handle, rig.pointer, PAGE, 1)
    rig.cufile.write(rig.handle, rig.pointer, PAGE, 0)
    counters = rig.cufile.read_counters()
    assert counters is not None
    assert (counters.p2p_reads, counters.posix_reads, counters.unaligned_reads) == (2, 0, 1)
    assert (counters.p2p_writes, counters.unaligned_writes) == (1, 0)
    assert (counters.read_nbytes, counters.written_nbytes) == (2 * PAGE, PAGE)


def test_read_in_stream_order_waits_for_the_stream(rig: Rig) -> None:
    stream = rig.cuda.create_stream()
    count = rig.cufile.read_async(rig.handle, rig.pointer, PAGE, 0, stream)
    before = rig.array.tobytes()[:PAGE]
    with pytest.raises(DeviceError, match="not done"):
        count.result()
    rig.cuda.synchronize_stream(stream)
    assert count.result() == PAGE
    assert rig.array.tobytes()[:PAGE] == rig.content[:PAGE] != before


def test_write_in_stream_order_sees_what_the_stream_did_before(rig: Rig) -> None:
    stream = rig.cuda.create_stream()
    rig.cufile.register_stream(stream)
    rig.cuda.enqueue_on(stream, lambda: rig.array.fill(3))
    count = rig.cufile.write_async(rig.handle, rig.pointer, PAGE, 0, stream)
    rig.cuda.synchronize_stream(stream)
    assert (count.result(), os.pread(rig.fd, PAGE, 0)) == (PAGE, b"\x03" * PAGE)
    rig.cufile.deregister_stream(stream)
    assert not rig.cufile.streams


def test_batch_moves_all_and_tells_each(rig: Rig) -> None:
    batch = rig.cufile.create_batch(2)
    requests = [
        BatchRequest(rig.handle, rig.pointer, PAGE, 0, 0, cookie=1),
        BatchRequest(rig.handle, rig.pointer, PAGE, PAGE, PAGE, cookie=2),
    ]
    rig.cufile.submit_batch(batch, requests)
    events = rig.cufile.batch_events(batch, 2, 1.0)
    assert sorted((event.cookie, event.result()) for event in events) == [(1, PAGE), (2, PAGE)]
    assert rig.array.tobytes()[: 2 * PAGE] == rig.content[: 2 * PAGE]
    with pytest.raises(CuFileError, match="5037"):
        rig.cufile.submit_batch(batch, requests * 2)
    rig.cufile.destroy_batch(batch)
    assert not rig.cufile.batches


@pytest.mark.parametrize(
    ("misuse", "code"),
    [
        (lambda r: r.cufile.read(1, r.pointer, 1, 0), 5027),
        (lambda r: r.cufile.deregister_handle(1), 5027),
        (lambda r: r.cufile.register_handle(987), 5027),
        (lambda r: r.cufile.read(r.handle, 1 << 20, 1, 0), 5013),
        (lambda r: r.cufile.write(r.handle, 1 << 20, 1, 0), 5013),
        (lambda r: r.cufile.register_buffer(1 << 20, 1), 5013),
        (lambda r: [r.cufile.register_buffer(r.pointer, PAGE) for _ in range(2)], 5023),
        (lambda r: r.cufile.deregister_buffer(r.pointer), 5024),
        (lambda r: [r.cufile.close_driver() for _ in range(2)], 5001),
    ],
)
def test_misuse_is_an_error_that_is_remembered(
    rig: Rig, misuse: Callable[[Rig], object], code: int
) -> None:
    with pytest.raises(CuFileError, match=str(code)) as caught:
        misuse(rig)
    assert caught.value.code == code
    assert str(code) in rig.cufile.errors[-1]


def test_read_past_the_memory_is_an_error(rig: Rig) -> None:
    with pytest.raises(DeviceError, match="not inside one allocation"):
        rig.cufile.read(rig.handle, rig.pointer, PAGE, 0, 5 * PAGE - 1)


def test_handle_of_a_closed_descriptor_is_an_error(rig: Rig) -> None:
    fd = os.dup(rig.fd)
    handle = rig.cufile.register_handle(fd)
    os.close(fd)
    with pytest.raises(CuFileError, match="closed before its handle"):
        rig.cufile.deregister_handle(handle)


def test_driver_that_closes_over_what_is_registered_is_remembered(rig: Rig) -> None:
    rig.cufile.close_driver()
    assert "closed over" in rig.cufile.errors[-1]


def test_forked_process_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(CuFileError, match="forked"):
        rig.cufile.read(rig.handle, rig.pointer, 1, 0)


def test_code_that_was_asked_for_is_no_misuse(rig: Rig) -> None:
    rig.cufile.codes["cuFileRead"] = 5008
    with pytest.raises(CuFileError, match="IO_NOT_SUPPORTED"):
        rig.cufile.read(rig.handle, rig.pointer, 1, 0)
    assert rig.cufile.errors == []


def test_short_reads_and_missing_statistics_can_be_asked_for(rig: Rig) -> None:
    rig.cufile.short_reads, rig.cufile.statistics = 10, False
    assert rig.cufile.read(rig.handle, rig.pointer, PAGE, 0) == 10
    assert rig.cufile.write(rig.handle, rig.pointer, PAGE, 0) == 10
    assert rig.cufile.read_counters() is None

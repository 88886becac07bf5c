"""FakeCuda's copies to the host and on the device, and what it tells without waiting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.bindings.cuda import LEGACY_STREAM, PER_THREAD_STREAM, Copy
from headrace.bindings.pymemory import address_of, map_pages
from headrace.errors import DeviceError
from headrace.memory.buffer import buffer_from
from headrace.testing import FakeCuda, FakeDeviceArray

NBYTES = 64


class Rig:
    """Two device arrays, a pinned block and a stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.array, self.other = FakeDeviceArray(cuda, NBYTES), FakeDeviceArray(cuda, NBYTES)
        self.array.fill(1)
        self.block = map_pages(4096)
        self.pinned, _ = address_of(self.block)
        cuda.register_host(self.pinned, NBYTES)
        self.stream = cuda.create_stream()
        self.out: Copy = (self.pinned, self.array.pointer, NBYTES)
        self.across: Copy = (self.other.pointer, self.array.pointer, NBYTES)

    def host_value(self) -> int:
        (value,) = set(self.block[:NBYTES])
        return value


def value_of(array: FakeDeviceArray) -> int:
    (value,) = set(array.tobytes())
    return value


@pytest.fixture
def rig() -> Rig:
    return Rig(FakeCuda())


def test_copy_to_the_host_does_nothing_until_something_waits(rig: Rig) -> None:
    rig.cuda.copy_to_host([rig.out], rig.stream)
    assert (rig.host_value(), rig.cuda.pending_copies, rig.cuda.copies) == (0, 1, 0)
    rig.cuda.synchronize_stream(rig.stream)
    assert (rig.host_value(), rig.cuda.pending_copies, rig.cuda.copies) == (1, 0, 1)
    assert (rig.cuda.copied_nbytes, rig.cuda.pageable_copies) == (NBYTES, 0)


def test_device_memory_changed_too_early_gives_wrong_bytes_on_the_host(rig: Rig) -> None:
    rig.cuda.copy_to_host([rig.out], rig.stream)
    rig.array.fill(2)
    rig.cuda.synchronize_stream(rig.stream)
    assert rig.host_value() == 2


def test_copy_on_the_device_does_nothing_until_something_waits(rig: Rig) -> None:
    rig.cuda.copy_on_device([rig.across], rig.stream)
    assert (value_of(rig.other), rig.cuda.pending_copies) == (0xA5, 1)
    rig.array.fill(2)
    rig.cuda.synchronize_stream(rig.stream)
    assert (value_of(rig.other), rig.cuda.copies, rig.cuda.copied_nbytes) == (2, 1, NBYTES)


def test_bytes_go_to_the_device_across_it_and_back_in_stream_order(rig: Rig) -> None:
    rig.block[:NBYTES] = b"\x07" * NBYTES
    rig.cuda.copy_to_device([(rig.array.pointer, rig.pinned, NBYTES)], rig.stream)
    rig.cuda.copy_on_device([rig.across], rig.stream)
    rig.cuda.enqueue_on(rig.stream, lambda: rig.array.fill(9))
    rig.cuda.copy_to_host([(rig.pinned, rig.other.pointer, NBYTES)], rig.stream)
    rig.cuda.synchronize_stream(rig.stream)
    assert (rig.host_value(), value_of(rig.array)) == (7, 9)


def test_event_runs_copies_of_every_direction(rig: Rig) -> None:
    event = rig.cuda.create_event()
    rig.cuda.copy_on_device([rig.across], rig.stream)
    rig.cuda.copy_to_host([rig.out], rig.stream)
    rig.cuda.record_event(event, rig.stream)
    rig.cuda.synchronize_event(event)
    assert (value_of(rig.other), rig.host_value()) == (1, 1)


def test_copies_of_one_call_run_in_no_order_to_rely_on(rig: Rig) -> None:
    rig.other.fill(2)
    again: Copy = (rig.pinned, rig.other.pointer, NBYTES)
    rig.cuda.copy_to_host([rig.out, again], rig.stream)
    rig.cuda.synchronize_stream(rig.stream)
    assert rig.host_value() == 1


def test_pageable_destination_is_filled_late_too_and_counted(rig: Rig) -> None:
    pageable = bytearray(NBYTES)
    pointer = buffer_from(pageable, rig.cuda.pointer_device).pointer
    rig.cuda.copy_to_host([(pointer, rig.array.pointer, NBYTES)], rig.stream)
    assert (bytes(pageable), rig.cuda.pageable_copies) == (bytes(NBYTES), 1)
    rig.cuda.synchronize_stream(rig.stream)
    assert pageable == b"\x01" * NBYTES


def test_memory_unpinned_under_a_queued_copy_to_it_is_an_error(rig: Rig) -> None:
    rig.cuda.copy_to_host([rig.out], rig.stream)
    rig.cuda.unregister_host(rig.pinned)
    with pytest.raises(DeviceError, match=r"cudaErrorIllegalAddress \(700\).*pinned.*was freed"):
        rig.cuda.synchronize_stream(rig.stream)
    assert rig.host_value() == 0


@pytest.mark.parametrize("end", ["array", "other"])
def test_device_memory_freed_under_a_queued_copy_on_the_device_is_an_error(
    rig: Rig, end: str
) -> None:
    rig.cuda.copy_on_device([rig.across], rig.stream)
    rig.cuda.device_free(getattr(rig, end).pointer)
    with pytest.raises(DeviceError, match=r"device 0 memory .* was freed"):
        rig.cuda.synchronize_stream(rig.stream)


def test_memory_registered_for_reading_is_no_destination(rig: Rig) -> None:
    rig.cuda.unregister_host(rig.pinned)
    rig.cuda.register_host(rig.pinned, NBYTES, read_only=True)
    with pytest.raises(DeviceError, match=r"cudaErrorInvalidValue.*is registered read-only"):
        rig.cuda.copy_to_host([rig.out], rig.stream)
    assert (rig.cuda.pending_copies, len(rig.cuda.errors)) == (0, 1)


@pytest.mark.parametrize(("into", "start", "nbytes"), [(0, 0, 65), (1, 0, 64), (0, 1, 64)])
def test_copy_out_of_range_is_an_error_in_every_direction(
    rig: Rig, into: int, start: int, nbytes: int
) -> None:
    for copy, (destination, source, _) in (
        (rig.cuda.copy_to_host, rig.out),
        (rig.cuda.copy_on_device, rig.across),
    ):
        with pytest.raises(DeviceError, match="not inside one allocation"):
            copy([(destination + into, source + start, nbytes)], rig.stream)
        with pytest.raises(DeviceError, match="at least 1 is wanted"):
            copy([(destination, source, 0)], rig.stream)


def test_copy_between_wrong_kinds_of_memory_is_an_error(rig: Rig) -> None:
    device, host = rig.array.pointer, rig.pinned
    with pytest.raises(DeviceError, match="host memory"):
        rig.cuda.copy_to_host([(device, device, NBYTES)], rig.stream)
    with pytest.raises(DeviceError, match="device memory"):
        rig.cuda.copy_to_host([(host, host, NBYTES)], rig.stream)
    for pair in ((host, device), (device, host)):
        with pytest.raises(DeviceError, match="device memory"):
            rig.cuda.copy_on_device([(*pair, NBYTES)], rig.stream)


def test_both_ends_must_be_on_the_device_of_the_stream() -> None:
    rig = Rig(FakeCuda(devices=2))
    far = FakeDeviceArray(rig.cuda, NBYTES, device=1).pointer
    near = rig.array.pointer
    with pytest.raises(DeviceError, match=r"is of device 1, stream .* of device 0"):
        rig.cuda.copy_to_host([(rig.pinned, far, NBYTES)], rig.stream)
    for pair in ((far, near), (near, far)):
        with pytest.raises(DeviceError, match=r"is of device 1, stream .* of device 0"):
            rig.cuda.copy_on_device([(*pair, NBYTES)], rig.stream)


def test_chosen_copy_is_counted_over_all_directions() -> None:
    rig = Rig(FakeCuda(fail_copy_at=3))
    rig.cuda.copy_to_device([(rig.other.pointer, rig.pinned, NBYTES)], rig.stream)
    rig.cuda.copy_on_device([rig.across], rig.stream)
    with pytest.raises(DeviceError, match="copy 3 was told to fail"):
        rig.cuda.copy_to_host([rig.out], rig.stream)
    rig.cuda.copy_to_host([rig.out], rig.stream)
    rig.cuda.synchronize_stream(rig.stream)
    assert (rig.cuda.copies, rig.cuda.errors) == (3, [])


def test_event_is_done_only_after_something_waited(rig: Rig) -> None:
    event = rig.cuda.create_event()
    assert rig.cuda.event_is_done(event)
    rig.cuda.copy_to_host([rig.out], rig.stream)
    rig.cuda.record_event(event, rig.stream)
    assert [rig.cuda.event_is_done(event) for _ in range(3)] == [False] * 3
    rig.cuda.synchronize_stream(rig.stream)
    assert rig.cuda.event_is_done(event)
    rig.cuda.record_event(event, rig.stream)
    assert not rig.cuda.event_is_done(event)
    rig.cuda.destroy_event(event)
    with pytest.raises(DeviceError, match="destroyed or never was"):
        rig.cuda.event_is_done(event)


def test_stream_is_of_the_device_that_was_current_when_it_was_made() -> None:
    cuda = FakeCuda(devices=2)
    near = cuda.create_stream()
    cuda.set_device(1)
    assert (cuda.stream_device(near), cuda.stream_device(cuda.create_stream())) == (0, 1)
    assert [cuda.stream_device(stream) for stream in (0, 1, 2)] == [1, 1, 1]
    cuda.destroy_stream(near)
    with pytest.raises(DeviceError, match="destroyed or never was"):
        cuda.stream_device(near)


def test_per_thread_stream_is_another_one_in_each_thread(rig: Rig) -> None:
    rig.cuda.copy_to_host([rig.out], PER_THREAD_STREAM)
    with ThreadPoolExecutor(1) as other:
        other.submit(rig.cuda.synchronize_stream, PER_THREAD_STREAM).result()
    rig.cuda.synchronize_stream(LEGACY_STREAM)
    assert rig.cuda.pending_copies == 1
    rig.cuda.synchronize_stream(PER_THREAD_STREAM)
    assert rig.host_value() == 1


def test_free_memory_is_plenty_unless_it_is_said() -> None:
    assert FakeCuda().free_memory(0) > 1 << 34
    assert FakeCuda(free_nbytes=0).free_memory(0) == 0
    with pytest.raises(DeviceError, match=r"cudaErrorInvalidDevice \(101\): 1 of 1"):
        FakeCuda(free_nbytes=100).free_memory(1)

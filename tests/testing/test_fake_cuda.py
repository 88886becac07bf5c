from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.bindings.cuda import LEGACY_STREAM, Cuda
from headrace.bindings.pymemory import address_of, map_pages
from headrace.errors import DeviceError
from headrace.memory.buffer import buffer_from
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.types import Device

NBYTES = 64


class Rig:
    """A device array, a pinned block and a stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.array = FakeDeviceArray(cuda, NBYTES)
        self.block = map_pages(4096)
        self.pinned, _ = address_of(self.block)
        cuda.register_host(self.pinned, NBYTES)
        self.stream = cuda.create_stream()

    def write(self, value: int) -> None:
        self.block[:NBYTES] = bytes([value]) * NBYTES

    def copy(self, stream: int | None = None) -> None:
        on = self.stream if stream is None else stream
        self.cuda.copy_to_device([(self.array.pointer, self.pinned, NBYTES)], on)

    def copy_and_record(self) -> int:
        event = self.cuda.create_event()
        self.copy()
        self.cuda.record_event(event, self.stream)
        return event

    def value(self) -> int:
        (value,) = set(self.array.tobytes())
        return value


@pytest.fixture
def rig() -> Rig:
    cuda: Cuda = FakeCuda()
    assert isinstance(cuda, FakeCuda)
    return Rig(cuda)


def test_copy_does_nothing_until_its_stream_is_synchronized(rig: Rig) -> None:
    rig.write(1)
    rig.copy()
    assert (rig.value(), rig.cuda.pending_copies) == (0xA5, 1)
    rig.cuda.synchronize_stream(rig.stream)
    assert (rig.value(), rig.cuda.pending_copies) == (1, 0)


def test_bounce_buffer_reused_too_early_gives_wrong_bytes(rig: Rig) -> None:
    rig.write(1)
    rig.copy()
    rig.write(2)
    rig.cuda.synchronize_stream(rig.stream)
    assert rig.value() == 2


def test_event_runs_its_stream_up_to_the_record_and_no_further(rig: Rig) -> None:
    rig.write(1)
    event = rig.copy_and_record()
    rig.copy()
    rig.cuda.synchronize_event(event)
    assert (rig.value(), rig.cuda.copies, rig.cuda.pending_copies) == (1, 1, 1)


def test_event_that_was_never_recorded_is_complete(rig: Rig) -> None:
    event = rig.cuda.create_event()
    rig.copy()
    rig.cuda.synchronize_event(event)
    rig.cuda.wait_event(rig.stream, event)
    assert rig.cuda.pending_copies == 1


def test_event_counts_by_its_latest_record(rig: Rig) -> None:
    event = rig.cuda.create_event()
    rig.cuda.record_event(event, rig.stream)
    rig.copy()
    rig.cuda.record_event(event, rig.stream)
    rig.cuda.synchronize_event(event)
    assert rig.cuda.pending_copies == 0


def test_stream_that_waits_for_an_event_runs_the_other_stream_first(rig: Rig) -> None:
    rig.write(1)
    event, other = rig.copy_and_record(), rig.cuda.create_stream()
    rig.cuda.wait_event(other, event)
    rig.cuda.enqueue_on(other, lambda: rig.array.fill(9))
    rig.cuda.synchronize_stream(other)
    assert (rig.value(), rig.cuda.copies) == (9, 1)


def test_wait_keeps_the_record_of_its_time(rig: Rig) -> None:
    event, other = rig.cuda.create_event(), rig.cuda.create_stream()
    rig.cuda.record_event(event, rig.stream)
    rig.cuda.wait_event(other, event)
    rig.copy()
    rig.cuda.record_event(event, rig.stream)
    rig.cuda.synchronize_stream(other)
    assert rig.cuda.pending_copies == 1


def test_two_streams_may_wait_for_each_other_in_turn(rig: Rig) -> None:
    events = [rig.cuda.create_event() for _ in range(4)]
    streams = [rig.stream, rig.cuda.create_stream()]
    ran: list[int] = []
    for step, event in enumerate(events):
        rig.cuda.enqueue_on(streams[step % 2], lambda step=step: ran.append(step))  # type: ignore[misc]
        rig.cuda.record_event(event, streams[step % 2])
        rig.cuda.wait_event(streams[(step + 1) % 2], event)
    rig.cuda.synchronize_stream(streams[0])
    assert ran == [0, 1, 2, 3]


def test_destroyed_event_still_holds_back_the_stream_that_waits_for_it(rig: Rig) -> None:
    event, other = rig.copy_and_record(), rig.cuda.create_stream()
    rig.cuda.wait_event(other, event)
    rig.cuda.destroy_event(event)
    rig.cuda.synchronize_stream(other)
    assert (rig.cuda.copies, rig.cuda.live_events) == (1, 0)


def test_destroying_a_stream_does_not_wait_for_its_copies(rig: Rig) -> None:
    rig.copy()
    rig.cuda.destroy_stream(rig.stream)
    assert (rig.value(), rig.cuda.pending_copies, rig.cuda.live_streams) == (0xA5, 1, 0)


def test_streams_0_and_1_are_the_legacy_stream(rig: Rig) -> None:
    rig.write(1)
    rig.copy(0)
    rig.cuda.synchronize_stream(LEGACY_STREAM)
    assert rig.value() == 1


def test_user_work_runs_in_the_order_of_its_stream(rig: Rig) -> None:
    rig.write(1)
    rig.cuda.enqueue_on(rig.stream, lambda: rig.array.fill(9))
    rig.copy()
    rig.cuda.enqueue_on(rig.stream, lambda: None)
    rig.cuda.synchronize_stream(rig.stream)
    assert rig.value() == 1


def test_memory_unpinned_under_a_queued_copy_is_an_error(rig: Rig) -> None:
    rig.copy()
    rig.cuda.unregister_host(rig.pinned)
    with pytest.raises(DeviceError, match=r"cudaErrorIllegalAddress \(700\).*pinned.*was freed"):
        rig.cuda.synchronize_stream(rig.stream)


def test_pinning_the_same_memory_again_does_not_hide_that_it_was_unpinned(rig: Rig) -> None:
    rig.copy()
    rig.cuda.unregister_host(rig.pinned)
    rig.cuda.register_host(rig.pinned, NBYTES)
    with pytest.raises(DeviceError, match="was freed"):
        rig.cuda.synchronize_stream(rig.stream)


def test_device_memory_freed_under_a_queued_copy_is_an_error(rig: Rig) -> None:
    event = rig.copy_and_record()
    rig.cuda.device_free(rig.array.pointer)
    with pytest.raises(DeviceError, match=r"device 0 memory .* was freed"):
        rig.cuda.synchronize_event(event)


def test_failed_copy_does_not_stop_the_rest_of_its_stream(rig: Rig) -> None:
    doomed = Rig(rig.cuda)
    rig.cuda.copy_to_device([(rig.array.pointer, doomed.pinned, NBYTES)], rig.stream)
    rig.write(1)
    rig.copy()
    rig.cuda.unregister_host(doomed.pinned)
    with pytest.raises(DeviceError):
        rig.cuda.synchronize_stream(rig.stream)
    rig.cuda.synchronize_stream(rig.stream)
    assert rig.value() == 1


@pytest.mark.parametrize(("into", "start", "nbytes"), [(0, 0, 65), (1, 0, 64), (0, 1, 64)])
def test_copy_out_of_range_is_an_error(rig: Rig, into: int, start: int, nbytes: int) -> None:
    with pytest.raises(DeviceError, match=r"cudaErrorInvalidValue .*not inside one allocation"):
        rig.cuda.copy_to_device(
            [(rig.array.pointer + into, rig.pinned + start, nbytes)], rig.stream
        )


def test_copy_from_pageable_memory_runs_late_too_and_is_counted(rig: Rig) -> None:
    pageable = bytearray(b"\x01" * NBYTES)
    pointer = buffer_from(pageable, rig.cuda.pointer_device).pointer
    rig.cuda.copy_to_device([(rig.array.pointer, pointer, NBYTES)], rig.stream)
    pageable[:] = b"\x02" * NBYTES
    assert (rig.value(), rig.cuda.pageable_copies) == (0xA5, 1)
    rig.cuda.synchronize_stream(rig.stream)
    assert rig.value() == 2


def test_copies_of_one_call_run_in_no_order_to_rely_on(rig: Rig) -> None:
    other = Rig(rig.cuda)
    rig.write(1)
    other.write(2)
    copies = [(rig.array.pointer, each.pinned, NBYTES) for each in (rig, other)]
    rig.cuda.copy_to_device(copies, rig.stream)
    rig.cuda.synchronize_stream(rig.stream)
    assert (rig.value(), rig.cuda.copies) == (1, 2)


def test_call_without_copies_does_nothing_and_an_empty_copy_is_an_error(rig: Rig) -> None:
    rig.cuda.copy_to_device([], rig.stream)
    with pytest.raises(DeviceError, match="0 bytes; at least 1 is wanted"):
        rig.cuda.copy_to_device([(rig.array.pointer, rig.pinned, 0)], rig.stream)
    assert rig.cuda.pending_copies == 0


def test_copy_between_wrong_kinds_of_memory_is_an_error(rig: Rig) -> None:
    with pytest.raises(DeviceError, match="device memory"):
        rig.cuda.copy_to_device([(rig.pinned, rig.pinned, NBYTES)], rig.stream)
    with pytest.raises(DeviceError, match="host memory"):
        rig.cuda.copy_to_device([(rig.array.pointer, rig.array.pointer, NBYTES)], rig.stream)


def test_freeing_what_is_not_live_memory_of_that_kind_is_an_error(rig: Rig) -> None:
    pinned, device = rig.pinned, rig.array.pointer
    for pointer in (device, pinned + 1):
        with pytest.raises(DeviceError, match="cudaHostUnregister failed: cudaErrorInvalidValue"):
            rig.cuda.unregister_host(pointer)
    rig.cuda.unregister_host(pinned)
    rig.cuda.device_free(device)
    for again, pointer in ((rig.cuda.unregister_host, pinned), (rig.cuda.device_free, device)):
        with pytest.raises(DeviceError, match="cudaErrorInvalidValue"):
            again(pointer)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, NBYTES), (NBYTES - 1, 1), (-1, 2)])
def test_pinning_memory_twice_is_an_error(rig: Rig, offset: int, nbytes: int) -> None:
    with pytest.raises(DeviceError, match=r"cudaErrorHostMemoryAlreadyRegistered \(712\)"):
        rig.cuda.register_host(rig.pinned + offset, nbytes)


def test_destroyed_stream_is_an_error_wherever_it_is_used(rig: Rig) -> None:
    cuda, stream, event = rig.cuda, rig.stream, rig.cuda.create_event()
    cuda.destroy_stream(stream)
    uses: tuple[Callable[[], None], ...] = (
        rig.copy,
        lambda: cuda.synchronize_stream(stream),
        lambda: cuda.record_event(event, stream),
        lambda: cuda.wait_event(stream, event),
        lambda: cuda.enqueue_on(stream, lambda: None),
        lambda: cuda.destroy_stream(stream),
    )
    for use in uses:
        with pytest.raises(DeviceError, match=f"stream {stream} is destroyed or never was"):
            use()


def test_destroyed_event_is_an_error_wherever_it_is_used(rig: Rig) -> None:
    cuda, stream, event = rig.cuda, rig.stream, rig.cuda.create_event()
    cuda.destroy_event(event)
    uses: tuple[Callable[[], None], ...] = (
        lambda: cuda.synchronize_event(event),
        lambda: cuda.record_event(event, stream),
        lambda: cuda.wait_event(stream, event),
        lambda: cuda.destroy_event(event),
    )
    for use in uses:
        with pytest.raises(DeviceError, match=f"event {event} is destroyed or never was"):
            use()


def test_misuse_is_remembered_even_where_it_was_swallowed(rig: Rig) -> None:
    with pytest.raises(DeviceError):
        rig.cuda.unregister_host(1)
    assert len(rig.cuda.errors) == 1
    assert "cudaHostUnregister" in rig.cuda.errors[0]


def test_stream_of_another_device_is_an_error() -> None:
    cuda = FakeCuda(devices=2)
    rig, event = Rig(cuda), cuda.create_event()
    other = FakeDeviceArray(cuda, NBYTES, device=1).pointer
    with pytest.raises(DeviceError, match=f"is of device 1, stream {rig.stream} of device 0"):
        cuda.copy_to_device([(other, rig.pinned, NBYTES)], rig.stream)
    cuda.set_device(1)
    cuda.copy_to_device([(other, rig.pinned, NBYTES)], LEGACY_STREAM)
    with pytest.raises(DeviceError, match=f"event {event} is of device 0, stream 1 of device 1"):
        cuda.record_event(event, LEGACY_STREAM)


def test_stream_may_wait_for_an_event_of_another_device() -> None:
    rig = Rig(FakeCuda(devices=2))
    event = rig.copy_and_record()
    rig.cuda.set_device(1)
    other = rig.cuda.create_stream()
    rig.cuda.wait_event(other, event)
    rig.cuda.synchronize_stream(other)
    assert rig.cuda.copies == 1


def test_current_device_belongs_to_the_thread() -> None:
    cuda = FakeCuda(devices=2)
    cuda.set_device(1)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(cuda.current_device).result() == 0
    assert cuda.current_device() == 1


def test_device_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"cudaErrorInvalidDevice \(101\): 1 of 1"):
        FakeCuda().set_device(1)
    with pytest.raises(DeviceError, match="cudaErrorNoDevice"):
        FakeCuda(devices=0).register_host(4096, 1)


def test_pointer_device_tells_the_device_and_none_for_host_memory() -> None:
    rig = Rig(FakeCuda(devices=2))
    array = FakeDeviceArray(rig.cuda, NBYTES, device=1)
    assert rig.cuda.pointer_device(array.pointer + NBYTES - 1) == 1
    assert rig.cuda.pointer_device(rig.pinned) is None
    assert rig.cuda.pointer_device(12345) is None


def test_pinned_memory_is_counted(rig: Rig) -> None:
    for pointer in (Rig(rig.cuda).pinned, rig.pinned):
        rig.cuda.unregister_host(pointer)
    assert (rig.cuda.pinned_nbytes, rig.cuda.peak_pinned_nbytes) == (0, 2 * NBYTES)


def test_pinned_limit_fails_as_cuda_does() -> None:
    cuda = FakeCuda(pinned_limit_nbytes=100)
    cuda.register_host(0x1000, 100)
    wanted = r"^cudaHostRegister failed: cudaErrorMemoryAllocation \(2\): .* 101, above .* 100$"
    with pytest.raises(DeviceError, match=wanted):
        cuda.register_host(0x2000, 1)
    assert (cuda.pinned_nbytes, cuda.errors) == (100, [])


@pytest.mark.parametrize("nbytes", [0, -1])
def test_pinning_or_allocating_nothing_is_an_error(nbytes: int) -> None:
    with pytest.raises(DeviceError, match="at least 1 is wanted"):
        FakeCuda().register_host(0x1000, nbytes)
    with pytest.raises(DeviceError, match="at least 1 is wanted"):
        FakeCuda().device_alloc(nbytes)


def test_chosen_copy_fails_and_the_others_do_not() -> None:
    rig = Rig(FakeCuda(fail_copy_at=2))
    rig.copy()
    with pytest.raises(DeviceError, match=r"cudaMemcpyAsync failed: .*copy 2"):
        rig.copy()
    rig.copy()
    rig.cuda.synchronize_stream(rig.stream)
    assert (rig.cuda.copies, rig.cuda.copied_nbytes, rig.cuda.errors) == (2, 2 * NBYTES, [])


def test_threads_may_use_one_fake_at_once() -> None:
    cuda = FakeCuda()
    rigs = [Rig(cuda) for _ in range(4)]

    def work(rig: Rig) -> None:
        event = cuda.create_event()
        for value in range(50):
            rig.write(value)
            rig.copy()
            cuda.record_event(event, rig.stream)
            cuda.synchronize_event(event)
            assert rig.value() == value

    with ThreadPoolExecutor(len(rigs)) as threads:
        list(threads.map(work, rigs))
    assert (cuda.copies, cuda.pending_copies) == (200, 0)


def test_device_array_is_a_destination_that_buffer_from_takes(rig: Rig) -> None:
    array = FakeDeviceArray(rig.cuda, NBYTES, stream=rig.stream)
    buffer = buffer_from(array, rig.cuda.pointer_device)
    assert (buffer.pointer, buffer.nbytes) == (array.pointer, NBYTES)
    assert (buffer.device, buffer.stream) == (Device("cuda", 0), rig.stream)


def test_device_array_starts_poisoned_and_its_view_shares_its_memory(rig: Rig) -> None:
    view = rig.array.view(3, 2)
    assert view.tobytes() == b"\xa5\xa5"
    view.fill(1)
    assert rig.array.tobytes() == b"\xa5" * 3 + b"\x01\x01" + b"\xa5" * (NBYTES - 5)
    with pytest.raises(ValueError, match="of 64"):
        rig.array.view(1, NBYTES)
    with pytest.raises(DeviceError, match="device memory"):
        rig.cuda.device_bytes(rig.array.pointer, NBYTES + 1)
    assert rig.array.view(NBYTES, 0).tobytes() == b""

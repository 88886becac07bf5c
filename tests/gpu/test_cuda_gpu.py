"""The CUDA calls on a real GPU: copies in every direction, streams, events, free memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from headrace.bindings.cuda import DEFAULT_STREAMS, LEGACY_STREAM, CudaRuntime
from headrace.bindings.pymemory import address_of, map_pages

pytestmark = pytest.mark.gpu
_MIB = 1 << 20
_DELAY_CYCLES = 500_000_000  # about a quarter of a second


class Rig:
    """Pinned memory, an array of random bytes on device 0, and streams."""

    def __init__(self, nbytes: int) -> None:
        self.cuda = CudaRuntime()
        self.cuda.set_device(0)
        self.block = map_pages(nbytes)
        self.pinned, _ = address_of(self.block)
        self.cuda.register_host(self.pinned, nbytes)
        self.content = os.urandom(nbytes)
        self.array = torch.frombuffer(bytearray(self.content), dtype=torch.uint8).to("cuda:0")
        self.user = torch.cuda.Stream(device=0)
        # The first launch of a kernel loads it, which may wait for the device.
        self.delay(self.user, 1)
        torch.empty_like(self.array).fill_(7)
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.cuda.unregister_host(self.pinned)

    def delay(self, stream: torch.cuda.Stream, cycles: int = _DELAY_CYCLES) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(4 * _MIB)
    yield made
    made.close()


@pytest.fixture(params=["own", "user", "legacy", "null", "per thread"])
def stream(rig: Rig, request: pytest.FixtureRequest) -> Iterator[int]:
    own = rig.cuda.create_stream()
    handles = {"own": own, "user": rig.user.cuda_stream, "legacy": LEGACY_STREAM, "null": 0}
    yield handles.get(request.param, 2)
    rig.cuda.destroy_stream(own)


def test_bytes_of_the_device_arrive_on_the_host(rig: Rig, stream: int) -> None:
    rig.cuda.copy_to_host([(rig.pinned, rig.array.data_ptr(), 4 * _MIB)], stream)
    rig.cuda.synchronize_stream(stream)
    assert bytes(rig.block) == rig.content


@pytest.mark.parametrize("piece", [512, 4096, 65536 + 1])
def test_many_small_pieces_arrive_on_the_host_each_in_its_place(
    rig: Rig, stream: int, piece: int
) -> None:
    starts = range(0, 4 * _MIB - piece + 1, piece)
    places = list(zip(starts, reversed(starts), strict=True))
    copies = [(rig.pinned + to, rig.array.data_ptr() + start, piece) for to, start in places]
    rig.cuda.copy_to_host(copies, stream)
    rig.cuda.synchronize_stream(stream)
    for to, start in places:
        assert rig.block[to : to + piece] == rig.content[start : start + piece]


@pytest.mark.parametrize("count", [1, 64])
def test_bytes_move_within_the_device(rig: Rig, stream: int, count: int) -> None:
    step = 4 * _MIB // count
    target = torch.zeros_like(rig.array)
    torch.cuda.synchronize()
    starts = range(0, 4 * _MIB, step)
    base = target.data_ptr()
    copies = [(base + start, rig.array.data_ptr() + start, step) for start in starts]
    rig.cuda.copy_on_device(copies, stream)
    rig.cuda.synchronize_stream(stream)
    assert torch.equal(target, rig.array)


@pytest.mark.parametrize("count", [1, 64])
def test_copy_to_the_host_waits_for_the_work_before_it_on_the_stream(rig: Rig, count: int) -> None:
    step = 4 * _MIB // count
    rig.delay(rig.user)
    with torch.cuda.stream(rig.user):
        rig.array.fill_(7)
    starts = range(0, 4 * _MIB, step)
    copies = [(rig.pinned + start, rig.array.data_ptr() + start, step) for start in starts]
    rig.cuda.copy_to_host(copies, rig.user.cuda_stream)
    rig.cuda.synchronize_stream(rig.user.cuda_stream)
    assert set(rig.block) == {7}


@pytest.mark.parametrize("count", [1, 64])
def test_copies_from_pinned_memory_return_before_they_are_done(rig: Rig, count: int) -> None:
    step = 4 * _MIB // count
    event = rig.cuda.create_event()
    rig.delay(rig.user)
    starts = range(0, 4 * _MIB, step)
    copies = [(rig.pinned + start, rig.array.data_ptr() + start, step) for start in starts]
    rig.cuda.copy_to_host(copies, rig.user.cuda_stream)
    rig.cuda.record_event(event, rig.user.cuda_stream)
    assert not rig.cuda.event_is_done(event)
    rig.cuda.synchronize_event(event)
    assert rig.cuda.event_is_done(event)
    assert bytes(rig.block) == rig.content
    rig.cuda.destroy_event(event)


def test_event_is_done_once_the_work_before_it_is(rig: Rig) -> None:
    event = rig.cuda.create_event()
    assert rig.cuda.event_is_done(event)
    rig.delay(rig.user)
    rig.cuda.record_event(event, rig.user.cuda_stream)
    assert not rig.cuda.event_is_done(event)
    rig.user.synchronize()
    assert rig.cuda.event_is_done(event)
    rig.cuda.destroy_event(event)


def test_stream_of_torch_is_of_its_device(rig: Rig) -> None:
    assert rig.cuda.stream_device(rig.user.cuda_stream) == 0
    assert rig.cuda.stream_device(torch.cuda.current_stream(0).cuda_stream) == 0
    assert [rig.cuda.stream_device(stream) for stream in DEFAULT_STREAMS] == [0, 0, 0]


def test_stream_of_cupy_is_of_its_device(rig: Rig) -> None:
    cupy = pytest.importorskip("cupy")
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        assert rig.cuda.stream_device(stream.ptr) == 0


@pytest.mark.gpu2
def test_stream_keeps_its_device_whatever_the_thread_is_on(rig: Rig) -> None:
    far = torch.cuda.Stream(device=1)
    assert rig.cuda.stream_device(far.cuda_stream) == 1
    rig.cuda.set_device(1)
    try:
        assert rig.cuda.stream_device(rig.user.cuda_stream) == 0
        assert rig.cuda.stream_device(LEGACY_STREAM) == 1
        assert rig.cuda.current_device() == 1
    finally:
        rig.cuda.set_device(0)


def test_free_memory_is_what_torch_says_too(rig: Rig) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    assert abs(rig.cuda.free_memory(0) - free) < 64 * _MIB  # others may use the GPU as well
    held = torch.empty(total // 64, dtype=torch.uint8, device="cuda:0")
    assert free - rig.cuda.free_memory(0) > total // 64 - 64 * _MIB
    del held

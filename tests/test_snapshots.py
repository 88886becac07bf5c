"""Snapshots: what is copied, where to, in which order, and what is kept."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.bindings.cuda import LEGACY_STREAM, Copy
from headrace.bindings.pymemory import view_memory
from headrace.memory.buffer import Buffer
from headrace.report import Snapshot
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.types import HOST, Device
from tests.support import PAGE, no_workers_left

BLOCK = 4 * PAGE
SMALL = hr.Options(workers=3, block_nbytes=BLOCK, pinned_nbytes=4 * BLOCK)


@dataclass
class Room:
    """`headrace.snapshots.Spare` over a `FakeCuda`."""

    cuda: FakeCuda
    idle: int = 0
    has_some: bool = True
    lead: int = 0
    asked: list[tuple[int, Device]] = field(default_factory=list)

    def idle_nbytes(self, device: Device) -> int:
        return self.idle

    def allocate(self, nbytes: int, device: Device) -> Buffer | None:
        self.asked.append((nbytes, device))
        if not self.has_some:
            return None
        array = FakeDeviceArray(self.cuda, nbytes + self.lead, device.index)
        return Buffer(array.pointer + self.lead, nbytes, device, array)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def on_host(content: bytes) -> Buffer:
    array = np.frombuffer(bytearray(content), np.uint8)
    return Buffer(int(array.ctypes.data) if content else 0, len(content), HOST, array)


def on_gpu(
    cuda: FakeCuda, content: bytes, device: int = 0, stream: int | None = LEGACY_STREAM
) -> Buffer:
    array = FakeDeviceArray(cuda, len(content), device)
    if content:
        cuda.device_write(array.pointer, content)
    return Buffer(array.pointer, len(content), Device("cuda", device), array, stream)


def fill(cuda: FakeCuda, buffer: Buffer, value: int) -> None:
    if not buffer.nbytes:
        return
    if buffer.device.is_host:
        view_memory(buffer.pointer, buffer.nbytes)[:] = bytes([value]) * buffer.nbytes
    else:
        cuda.device_write(buffer.pointer, bytes([value]) * buffer.nbytes)


def content_of(cuda: FakeCuda, buffer: Buffer) -> bytes:
    if not buffer.nbytes:
        return b""
    if buffer.device.is_host:
        return bytes(view_memory(buffer.pointer, buffer.nbytes))
    return cuda.device_bytes(buffer.pointer, buffer.nbytes)


def room_for(*sizes: int) -> int:
    """Bytes that a snapshot of buffers of these sizes asks for."""
    return sum(-(-size // PAGE) * PAGE for size in sizes) + PAGE


# What is copied.


@settings(max_examples=60, deadline=None)
@given(
    placed=st.lists(
        st.tuples(
            st.sampled_from([None, 0, 1]),
            st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, BLOCK, 2 * BLOCK + 3])
            | st.integers(0, 3 * BLOCK),
        ),
        max_size=12,
    ),
    free=st.sampled_from([None, 0, 60_000]),
    pinned_limit=st.sampled_from([None, 0, BLOCK]),
    lead=st.sampled_from([0, 512]),
    wait=st.booleans(),
)
def test_copies_hold_the_bytes_each_in_pages_of_its_own(
    placed: list[tuple[int | None, int]],
    free: int | None,
    pinned_limit: int | None,
    lead: int,
    wait: bool,
) -> None:
    cuda = FakeCuda(2, free_nbytes=free, pinned_limit_nbytes=pinned_limit)
    contents = [noise(nbytes, seed) for seed, (_, nbytes) in enumerate(placed)]
    buffers = [
        on_host(content) if device is None else on_gpu(cuda, content, device)
        for content, (device, _) in zip(contents, placed, strict=True)
    ]
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, snapshot = context.snapshot(buffers, Room(cuda, lead=lead), wait=wait)
        if wait:
            assert cuda.pending_copies == 0
        for device in range(2):
            cuda.set_device(device)
            cuda.synchronize_stream(LEGACY_STREAM)
        cuda.set_device(0)
        for buffer in buffers:
            fill(cuda, buffer, 0)
        assert [content_of(cuda, copy) for copy in copies] == contents
    pages: dict[tuple[Device, int], int] = {}
    for number, copy in enumerate(copies):
        if copy.nbytes:
            assert copy.pointer % PAGE == 0
            for page in range(copy.pointer // PAGE, -(-(copy.pointer + copy.nbytes) // PAGE)):
                assert pages.setdefault((copy.device, page), number) == number
    assert snapshot.nbytes == sum(map(len, contents))
    assert cuda.peak_pinned_nbytes <= SMALL.pinned_nbytes
    assert (cuda.errors, cuda.live_events, cuda.live_streams) == ([], 0, 0)
    assert no_workers_left()


def test_many_small_buffers_share_the_blocks_of_the_ring() -> None:
    contents = [noise(100, seed) for seed in range(64)]
    batches: list[int] = []

    class Counted(FakeCuda):
        def copy_to_host(self, copies: Sequence[Copy], stream: int) -> None:
            batches.append(len(copies))
            super().copy_to_host(copies, stream)

    cuda = Counted(free_nbytes=0)
    buffers = [on_gpu(cuda, content) for content in contents]
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, _ = context.snapshot(buffers, Room(cuda), wait=True)
    assert [content_of(cuda, copy) for copy in copies] == contents
    assert batches == [BLOCK // PAGE] * (64 * PAGE // BLOCK)


def test_nothing_at_all_is_a_snapshot_too() -> None:
    with hr.Context() as context:
        copies, snapshot = context.snapshot([], Room(FakeCuda()), wait=True)
    assert (copies, snapshot.device, snapshot.nbytes) == ([], "cpu", 0)


def test_empty_buffers_need_no_memory_and_name_no_place() -> None:
    cuda = FakeCuda(2)
    room = Room(cuda)
    buffers = [on_gpu(cuda, b"", 1), on_gpu(cuda, b"some"), on_host(b"")]
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, snapshot = context.snapshot(buffers, room, wait=True)
    assert [copy.device for copy in copies] == [buffer.device for buffer in buffers]
    assert (snapshot.device, room.asked) == ("cuda:0", [(room_for(4), Device("cuda", 0))])


# Where to.


@pytest.mark.parametrize(
    ("free", "idle", "place"),
    [
        (100_000, 0, "cuda:0"),
        (99_999, 0, "cpu"),
        (0, 100_000, "cuda:0"),
        (50_000, 50_000, "cuda:0"),
        (50_000, 49_999, "cpu"),
        (0, 0, "cpu"),
    ],
)
def test_device_keeps_a_quarter_of_what_is_free_or_idle_in_the_allocator(
    free: int, idle: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = noise(17 * PAGE)  # a page is taken besides, so that the copies begin at one
    monkeypatch.setattr("headrace.snapshots._MOST_OF_FREE", 18 * PAGE / 100_000)
    cuda = FakeCuda(free_nbytes=free)
    room = Room(cuda, idle)
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, snapshot = context.snapshot([on_gpu(cuda, content)], room, wait=True)
    assert (snapshot.device, str(copies[0].device)) == (place, place)
    assert content_of(cuda, copies[0]) == content
    assert len(room.asked) == (place == "cuda:0")


def test_program_keeps_some_of_the_free_memory() -> None:
    cuda = FakeCuda(free_nbytes=room_for(10 * PAGE))
    with hr.Context(SMALL, cuda=cuda) as context:
        _, whole = context.snapshot([on_gpu(cuda, noise(10 * PAGE))], Room(cuda), wait=True)
        _, half = context.snapshot([on_gpu(cuda, noise(5 * PAGE))], Room(cuda), wait=True)
    assert (whole.device, half.device) == ("cpu", "cuda:0")


def test_allocator_without_memory_sends_the_snapshot_to_the_host() -> None:
    cuda, content = FakeCuda(), noise(3 * BLOCK + 5)
    room = Room(cuda, has_some=False)
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, snapshot = context.snapshot([on_gpu(cuda, content)], room, wait=True)
    assert (snapshot.device, copies[0].device, len(room.asked)) == ("cpu", HOST, 1)
    assert content_of(cuda, copies[0]) == content


def test_each_place_is_named_once() -> None:
    cuda = FakeCuda(2)
    buffers = [
        *(on_gpu(cuda, b"a"), on_host(b"b"), on_gpu(cuda, b"c", 1)),
        *(on_gpu(cuda, b"d"), on_host(b"e"), on_gpu(cuda, b"f", 1)),
    ]
    room = Room(cuda)
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, snapshot = context.snapshot(buffers, room, wait=True)
        assert cuda.current_device() == 0
    assert snapshot.device == "cuda:0, cpu, cuda:1"
    assert [content_of(cuda, copy) for copy in copies] == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert room.asked == [(room_for(1, 1), Device("cuda", 0)), (room_for(1, 1), Device("cuda", 1))]


def test_snapshot_in_host_memory_goes_through_the_page_locked_ring() -> None:
    cuda, contents = FakeCuda(2, free_nbytes=0), [noise(20 * BLOCK + 7, seed) for seed in range(2)]
    buffers = [on_gpu(cuda, content, number) for number, content in enumerate(contents)]
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, snapshot = context.snapshot(buffers, Room(cuda), wait=False)
    assert [content_of(cuda, copy) for copy in copies] == contents
    assert snapshot == Snapshot("cpu", sum(map(len, contents)), snapshot.seconds)
    assert 0 < cuda.peak_pinned_nbytes <= SMALL.pinned_nbytes
    assert cuda.pageable_copies == 0


# Order.


@pytest.mark.parametrize("free", [None, 0], ids=["device", "host"])
@pytest.mark.parametrize("wait", [False, True])
def test_copy_is_of_the_moment_of_the_call_in_the_order_of_the_stream(
    free: int | None, wait: bool
) -> None:
    cuda = FakeCuda(free_nbytes=free)
    stream = cuda.create_stream()
    buffer = on_gpu(cuda, bytes(2 * BLOCK), stream=stream)
    cuda.enqueue_on(stream, lambda: fill(cuda, buffer, 7))
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, _ = context.snapshot([buffer], Room(cuda), wait=wait)
        assert cuda.pending_copies == (free is None and not wait)
        cuda.enqueue_on(stream, lambda: fill(cuda, buffer, 9))
        cuda.synchronize_stream(stream)
        assert content_of(cuda, copies[0]) == bytes([7]) * 2 * BLOCK
        assert copies[0].stream == (stream if free is None else None)
    assert content_of(cuda, buffer) == bytes([9]) * 2 * BLOCK
    assert (cuda.errors, cuda.live_events) == ([], 0)


@pytest.mark.parametrize("stream", [None, 0, 1, 2])
@pytest.mark.parametrize("free", [None, 0], ids=["device", "host"])
def test_default_streams_order_a_snapshot_too(stream: int | None, free: int | None) -> None:
    cuda = FakeCuda(2, free_nbytes=free)
    buffer = on_gpu(cuda, bytes(BLOCK + 1), 1, stream)
    if stream is not None:
        cuda.set_device(1)
        cuda.enqueue_on(stream, lambda: fill(cuda, buffer, 7))
        cuda.set_device(0)
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, _ = context.snapshot([buffer], Room(cuda), wait=True)
    expected = 0 if stream is None else 7
    assert content_of(cuda, copies[0]) == bytes([expected]) * (BLOCK + 1)
    assert cuda.errors == []


def test_copies_into_ordinary_memory_are_queued_only_after_earlier_work_is_done() -> None:
    """Such a copy may wait in the driver with the interpreter lock, which that work may need."""
    done: list[bool] = []

    class Watched(FakeCuda):
        def copy_to_host(self, copies: Sequence[Copy], stream: int) -> None:
            done.append(bool(ran))
            super().copy_to_host(copies, stream)

    ran: list[int] = []
    cuda = Watched(free_nbytes=0, pinned_limit_nbytes=0)
    stream = cuda.create_stream()
    buffer = on_gpu(cuda, noise(3 * BLOCK), stream=stream)
    cuda.enqueue_on(stream, lambda: ran.append(1))
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, _ = context.snapshot([buffer], Room(cuda), wait=False)
    assert done == [True] * 3
    assert content_of(cuda, copies[0]) == noise(3 * BLOCK)


# What is kept, and failures.


@pytest.mark.parametrize("free", [None, 0], ids=["device", "host"])
def test_snapshot_keeps_nothing_of_the_callers_alive(free: int | None) -> None:
    cuda = FakeCuda(2, free_nbytes=free)
    buffers = [
        *(on_gpu(cuda, noise(BLOCK)), on_gpu(cuda, b""), on_gpu(cuda, b"", 1)),
        *(on_host(b"some"), on_host(b"")),
    ]
    gone = [weakref.ref(buffer.owner) for buffer in buffers]
    with hr.Context(SMALL, cuda=cuda) as context:
        copies, _ = context.snapshot(buffers, Room(cuda), wait=False)
        del buffers
        assert [ref() for ref in gone] == [None] * 5
        cuda.synchronize_stream(LEGACY_STREAM)
    assert content_of(cuda, copies[0]) == noise(BLOCK)


@pytest.mark.parametrize("free", [None, 0], ids=["device", "host"])
@pytest.mark.parametrize("copy", [1, 2, 4])
def test_failing_copy_is_a_device_error_and_the_context_goes_on(
    free: int | None, copy: int
) -> None:
    cuda = FakeCuda(free_nbytes=free, fail_copy_at=copy)
    contents = [noise(3 * BLOCK, seed) for seed in range(4)]
    buffers = [on_gpu(cuda, content) for content in contents]
    with hr.Context(SMALL, cuda=cuda) as context:
        with pytest.raises(hr.DeviceError, match=f"copy {copy} was told to fail"):
            context.snapshot(buffers, Room(cuda), wait=True)
        assert no_workers_left()
        copies, _ = context.snapshot(buffers, Room(cuda), wait=True)
        assert [content_of(cuda, each) for each in copies] == contents
    assert (cuda.errors, cuda.live_events, cuda.live_streams) == ([], 0, 0)
    assert cuda.pinned_nbytes == 0


def test_host_without_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise MemoryError("no room")

    cuda = FakeCuda(free_nbytes=0)
    with hr.Context(SMALL, cuda=cuda) as context, monkeypatch.context() as full:
        full.setattr(np, "empty", refuse)
        with pytest.raises(MemoryError, match="no room"):
            context.snapshot([on_gpu(cuda, b"some")], Room(cuda), wait=True)


def test_closed_context_takes_no_snapshot() -> None:
    context = hr.Context()
    context.close()
    with pytest.raises(ValueError, match="the context is closed"):
        context.snapshot([on_host(b"some")], Room(FakeCuda()), wait=True)

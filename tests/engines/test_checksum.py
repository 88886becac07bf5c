"""Checksums of buffers through `Context.digest`: host memory and fake devices."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64, xxh3_64_hexdigest

import headrace as hr
from headrace.bindings.cuda import Copy
from headrace.memory.buffer import Buffer, buffer_from
from headrace.progress import Progress
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.testing.strategies import sizes, tunings
from headrace.types import Device
from tests.support import PAGE, TIMEOUT_S, ends_in_time, no_workers_left, on_host

BLOCK = 16 * PAGE
SMALL_BLOCKS = hr.Options(workers=4, block_nbytes=BLOCK, pinned_nbytes=8 * BLOCK)
ONE_WORKER = hr.Options(workers=1, block_nbytes=BLOCK, pinned_nbytes=8 * BLOCK)


def noise(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that no two blocks share."""
    return (seed.to_bytes(4, "little") + nbytes.to_bytes(4, "little")).join(
        index.to_bytes(4, "little") for index in range(nbytes // 12 + 2)
    )[:nbytes]


def host_buffer(content: bytes) -> Buffer:
    return buffer_from(content, on_host, writable=False)


def device_buffer(cuda: FakeCuda, content: bytes, index: int = 0, lead: int = 3) -> Buffer:
    """Bytes on a fake device, at an odd address."""
    whole = FakeDeviceArray(cuda, lead + len(content), index)
    if content:
        cuda.device_write(whole.pointer + lead, content)
    return Buffer(whole.pointer + lead, len(content), Device("cuda", index), whole)


@given(contents=st.lists(sizes(300_000).map(noise), max_size=6), options=tunings())
def test_digests_of_host_memory_are_those_of_the_library(
    contents: list[bytes], options: hr.Options
) -> None:
    with hr.Context(options) as context:
        found = context.digest([host_buffer(content) for content in contents])
    assert found == tuple(map(xxh3_64_hexdigest, contents))


@given(
    placed=st.lists(
        st.tuples(sizes(300_000).map(noise), st.sampled_from([None, 0, 1])), max_size=8
    ),
    options=tunings(),
    pinned_limit=st.sampled_from([None, 0, 1 << 16]),
)
def test_digests_of_several_devices_are_those_of_the_library(
    placed: list[tuple[bytes, int | None]], options: hr.Options, pinned_limit: int | None
) -> None:
    cuda = FakeCuda(2, pinned_limit_nbytes=pinned_limit)
    buffers = [
        host_buffer(content) if index is None else device_buffer(cuda, content, index)
        for content, index in placed
    ]
    with hr.Context(options, cuda=cuda) as context:
        found = context.digest(buffers)
        assert cuda.peak_pinned_nbytes <= options.pinned_nbytes
    assert found == tuple(xxh3_64_hexdigest(content) for content, _ in placed)
    assert cuda.errors == []
    assert no_workers_left()


def test_no_buffers_have_no_digests_and_need_no_gpu() -> None:
    with hr.Context() as context:
        assert context.digest([]) == ()
        assert context.digest([host_buffer(b"")]) == ("2d06800538d394c2",)


def test_digest_comes_after_what_is_queued_on_the_stream_of_a_buffer() -> None:
    cuda = FakeCuda(2)
    arrays = [FakeDeviceArray(cuda, 5 * BLOCK + 7, index) for index in (0, 1)]
    buffers = []
    for index, array in enumerate(arrays):
        cuda.set_device(index)
        stream = cuda.create_stream()
        cuda.enqueue_on(stream, lambda array=array, value=index + 1: array.fill(value))  # type: ignore[misc]
        buffers.append(
            Buffer(array.pointer, array.nbytes, Device("cuda", index), array, stream=stream)
        )
    cuda.set_device(0)
    with hr.Context(SMALL_BLOCKS, cuda=cuda) as context:
        found = context.digest(buffers)
    assert found == tuple(xxh3_64_hexdigest(bytes([value]) * (5 * BLOCK + 7)) for value in (1, 2))
    assert cuda.errors == []


def test_digest_of_a_gpu_buffer_takes_nothing_but_two_blocks() -> None:
    cuda = FakeCuda()
    content = noise(9 * BLOCK + 5)
    with hr.Context(SMALL_BLOCKS, cuda=cuda) as context:
        assert context.digest([device_buffer(cuda, content)]) == (xxh3_64_hexdigest(content),)
        assert cuda.peak_pinned_nbytes == 2 * BLOCK
        assert cuda.pageable_copies == 0


def test_small_buffers_share_a_block() -> None:
    cuda = FakeCuda()
    contents = [noise(100 + index, index) for index in range(50)]
    with hr.Context(SMALL_BLOCKS, cuda=cuda) as context:
        found = context.digest([device_buffer(cuda, content) for content in contents])
        assert cuda.peak_pinned_nbytes == BLOCK
    assert found == tuple(map(xxh3_64_hexdigest, contents))


class Watched:
    """The hash, which tells before each piece that it takes."""

    told: Callable[[memoryview], None]

    def __init__(self) -> None:
        self._hash = xxh3_64()

    def update(self, view: memoryview) -> None:
        type(self).told(view)
        self._hash.update(view)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def watch(monkeypatch: pytest.MonkeyPatch, told: Callable[[memoryview], None]) -> None:
    monkeypatch.setattr("xxhash.xxh3_64", type("_", (Watched,), {"told": staticmethod(told)}))


def test_next_copy_is_under_way_while_a_block_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    pending: list[int] = []
    watch(monkeypatch, lambda _: pending.append(cuda.pending_copies))
    with hr.Context(ONE_WORKER, cuda=cuda) as context:
        context.digest([device_buffer(cuda, noise(5 * BLOCK))])
    assert pending == [1, 1, 1, 1, 0]


def test_several_workers_hash_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(2)
    together = threading.Barrier(3)

    def meet(_: memoryview) -> None:
        together.wait(TIMEOUT_S)

    watch(monkeypatch, meet)
    buffers = [
        host_buffer(noise(BLOCK)),
        device_buffer(cuda, noise(BLOCK), 0),
        device_buffer(cuda, noise(BLOCK), 1),
    ]
    with hr.Context(SMALL_BLOCKS, cuda=cuda) as context:
        assert len(set(context.digest(buffers))) == 1


def test_host_memory_is_hashed_where_it_lies_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    watch(monkeypatch, lambda view: pieces.append(view.nbytes))
    with hr.Context(hr.Options(workers=1, block_nbytes=64 << 20)) as context:
        context.digest([host_buffer(bytes((9 << 20) + 1))])
    assert pieces == [4 << 20, 4 << 20, (1 << 20) + 1]


def test_biggest_buffers_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    watch(monkeypatch, lambda view: pieces.append(view.nbytes))
    with hr.Context(ONE_WORKER) as context:
        context.digest([host_buffer(bytes(nbytes)) for nbytes in (5, BLOCK, 7, BLOCK + 9, 6)])
    assert pieces == [BLOCK, 9, BLOCK, 7, 6, 5]


class Diary(FakeCuda):
    """Writes down what waits and what is copied, in order."""

    def __init__(self) -> None:
        super().__init__(pinned_limit_nbytes=0)
        self.entries: list[str] = []

    def synchronize_event(self, event: int) -> None:
        self.entries.append("wait")
        super().synchronize_event(event)

    def copy_to_host(self, copies: Sequence[Copy], stream: int) -> None:
        self.entries.append("copy")
        super().copy_to_host(copies, stream)


def test_copies_into_ordinary_memory_are_queued_only_after_earlier_work_is_done() -> None:
    """Such a copy may wait in the driver with the interpreter lock, which that work may need."""
    cuda = Diary()
    array = FakeDeviceArray(cuda, 100)
    stream = cuda.create_stream()
    with hr.Context(SMALL_BLOCKS, cuda=cuda) as context:
        context.digest([Buffer(array.pointer, 100, Device("cuda", 0), array, stream)])
    assert cuda.entries == ["wait", "copy"]


@pytest.mark.parametrize("copy", [1, 2, 3, 7])
@pytest.mark.parametrize("options", [ONE_WORKER, SMALL_BLOCKS], ids=["one worker", "four"])
def test_failing_copy_is_a_device_error_and_the_context_goes_on(
    copy: int, options: hr.Options
) -> None:
    cuda = FakeCuda(fail_copy_at=copy)
    contents = [noise(4 * BLOCK + 1, seed) for seed in range(2)]
    buffers = [device_buffer(cuda, content) for content in contents]
    with hr.Context(options, cuda=cuda) as context:
        with pytest.raises(hr.DeviceError, match=f"copy {copy} was told to fail"):
            context.digest(buffers)
        assert no_workers_left()
        assert cuda.pending_copies == 0
        assert context.digest(buffers) == tuple(map(xxh3_64_hexdigest, contents))
    assert cuda.errors == []
    assert (cuda.pinned_nbytes, cuda.live_streams, cuda.live_events) == (0, 0, 0)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "GPU"])
def test_interrupt_ends_the_hashing_of_a_big_buffer_midway(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    cuda = FakeCuda()
    pieces: list[int] = []

    def dawdle(view: memoryview) -> None:
        pieces.append(view.nbytes)
        time.sleep(0.01)

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    watch(monkeypatch, dawdle)
    content = noise(300 * BLOCK)
    with hr.Context(SMALL_BLOCKS, cuda=cuda) as context:
        buffer = device_buffer(cuda, content) if on_gpu else host_buffer(content)
        with pytest.raises(KeyboardInterrupt):
            context.digest([buffer], progress=interrupt)
        assert 0 < len(pieces) < 150
        assert no_workers_left()
        assert ends_in_time(lambda: context.digest([host_buffer(b"")]))


def test_progress_counts_the_bytes_of_all_buffers() -> None:
    cuda = FakeCuda()
    told: list[Progress] = []
    buffers = [device_buffer(cuda, noise(3 * BLOCK)), host_buffer(noise(BLOCK))]
    with hr.Context(SMALL_BLOCKS, cuda=cuda) as context:
        context.digest(buffers, progress=told.append)
    assert (told[-1].nbytes, told[-1].total_nbytes) == (4 * BLOCK, 4 * BLOCK)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with (
        hr.Context() as context,
        pytest.raises(ImportError, match=r"extra \[checksum\]") as caught,
    ):
        context.digest([host_buffer(b"a")])
    assert caught.value.name == "xxhash"


def test_closed_context_gives_no_digests() -> None:
    context = hr.Context()
    context.close()
    with pytest.raises(ValueError, match="context is closed"):
        context.digest([host_buffer(b"a")])


def test_threads_may_share_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the ring has fewer blocks than there are workers."""
    cuda = FakeCuda()
    contents = [noise(5 * BLOCK + seed, seed) for seed in range(4)]
    buffers = [device_buffer(cuda, content) for content in contents]
    expected = tuple(map(xxh3_64_hexdigest, contents))
    found: list[Any] = []

    def ask(context: hr.Context, wanted: Sequence[Buffer]) -> None:
        found.append(context.digest(wanted))

    with hr.Context(
        hr.Options(workers=4, block_nbytes=BLOCK, pinned_nbytes=3 * BLOCK), cuda=cuda
    ) as context:
        threads = [threading.Thread(target=ask, args=(context, buffers)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert found == [expected] * 4
    assert cuda.errors == []

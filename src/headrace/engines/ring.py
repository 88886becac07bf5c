"""The ring: page-locked blocks between files and a GPU, filled and emptied in turn.

Each worker has a block for each stream of its lane: while one is copied to the GPU, the next is
read, or written. Blocks and streams go back to where they came from when the worker ends.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

from headrace.bindings.cuda import Cuda
from headrace.engines.base import Cargo, Job, Jobs, Tally, run_workers
from headrace.engines.lanes import Fence, Lane, Lanes
from headrace.memory.alignment import align_down
from headrace.memory.buffer import Buffer
from headrace.memory.pinned import Block, PinnedPool

Fill = Callable[[Job, Block], int]
"""Reads the window of a job into a block; returns the file offset of the block's first byte."""

Spill = Callable[[Job, memoryview], int]
"""Writes the window of a job, given its bytes; how many of them were not aligned for the route."""

IsAligned = Callable[[Job], bool]
"""Whether a job's window is aligned for the route as it is."""


class Part(NamedTuple):
    """Consecutive bytes of one buffer."""

    buffer: int
    """Index of the buffer."""
    start: int
    """First byte in it."""
    nbytes: int
    """Length; at least 1."""


Use = Callable[[Part, memoryview], None]
"""Does something with bytes of a buffer, which are in host memory until it returns."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A block, and the stream that carries its copies.

    One stream for each block, so that waiting for the stream is waiting for the block: an event
    would cost each block one more call, and one more hand-over of the interpreter lock.
    """

    block: Block
    """Page-locked memory."""
    stream: int
    """CUDA stream."""


class Ring:
    """Moves cargoes through page-locked blocks.

    Parameters
    ----------
    cuda
        The calls to make.
    lanes
        Where the streams come from.
    pool
        Where the blocks come from.
    """

    def __init__(self, cuda: Cuda, lanes: Lanes, pool: PinnedPool) -> None:
        self._cuda = cuda
        self._lanes = lanes
        self.pool = pool
        self._prepared: set[int] = set()

    def prepare(self, device: int) -> str | None:
        """Get a first block; why there is no page-locked memory, or None when all is well.

        Raises
        ------
        DeviceError
            There is no such device.
        """
        if device not in self._prepared:
            with self._lanes.on_device(device):
                self.pool.prepare()
            self._prepared.add(device)
        return self.pool.failure

    def move(self, cargo: Cargo, fill: Fill, is_aligned: IsAligned = lambda _: True) -> list[Tally]:
        """Move a cargo through the ring.

        Parameters
        ----------
        cargo
            All of its buffers are on one CUDA device.
        fill
            How a window gets into a block.
        is_aligned
            Whether a window could be read as it is; without it, all can.
        """
        device = cargo.device.index

        def work(jobs: Jobs, tally: Tally) -> None:
            with (
                contextlib.ExitStack() as give_back,
                self._lanes.borrow(device, cargo.fence) as lane,
            ):
                self._wait_if_unlocked(cargo.fence)
                is_worth_more = partial(_is_job_for_each, jobs, cargo.workers)
                for slot in self._free_slots(lane, is_worth_more, give_back):
                    job = jobs.take()
                    if job is None:
                        return
                    moved = self._move_one(job, slot, fill, cargo.buffers, tally)
                    tally.moved_nbytes += moved
                    if not is_aligned(job):
                        tally.unaligned_nbytes += moved

        return run_workers(work, cargo)

    def drain(self, cargo: Cargo, spill: Spill) -> list[Tally]:
        """Move a cargo from the GPU through the ring into files.

        A window lies in its block as far from the start as in the file from a multiple of the
        block size, so that what is aligned in the file is aligned in memory.

        Parameters
        ----------
        cargo
            All of its buffers are on one CUDA device.
        spill
            How a window gets from a block into the file.
        """
        device = cargo.device.index

        def work(jobs: Jobs, tally: Tally) -> None:
            filled: dict[int, Job] = {}  # by stream
            with (
                contextlib.ExitStack() as give_back,
                self._lanes.borrow(device, cargo.fence) as lane,
            ):
                self._wait_if_unlocked(cargo.fence)
                is_worth_more = partial(_is_job_for_each, jobs, cargo.workers)
                for slot in self._free_slots(lane, is_worth_more, give_back):
                    earlier = filled.pop(slot.stream, None)
                    if earlier is not None:
                        lead = earlier.start % cargo.block_nbytes
                        view = slot.block.view[lead : lead + earlier.stop - earlier.start]
                        _spill_one(spill, earlier, view, tally)
                    job = jobs.take()
                    if job is not None:
                        base = slot.block.pointer - align_down(job.start, cargo.block_nbytes)
                        copies = job.copies_out(cargo.buffers, base)
                        self._cuda.copy_to_host(copies, slot.stream)
                        filled[slot.stream] = job
                    elif not filled:
                        return

        return run_workers(work, cargo)

    def bring(self, device: int, cargo: Cargo, batches: Iterator[Sequence[Part]], use: Use) -> None:
        """Bring parts of buffers from the GPU into host memory, for one worker to use in order.

        While one batch is used, the copies of the next are under way.

        Parameters
        ----------
        device
            Where the parts are.
        cargo
            Its buffers and fence are used.
        batches
            Parts that share a block: no more bytes than one has.
        use
            What to do with each part.
        """
        filled: dict[int, Sequence[Part]] = {}  # by stream
        with contextlib.ExitStack() as give_back, self._lanes.borrow(device, cargo.fence) as lane:
            self._wait_if_unlocked(cargo.fence)
            upcoming = deque(itertools.islice(batches, 1))
            for slot in self._free_slots(lane, lambda: bool(upcoming), give_back):
                for part, offset in _side_by_side(filled.pop(slot.stream, ())):
                    use(part, slot.block.view[offset : offset + part.nbytes])
                if upcoming:
                    filled[slot.stream] = batch = upcoming.popleft()
                    copies = [
                        (
                            slot.block.pointer + offset,
                            cargo.buffers[part.buffer].pointer + part.start,
                            part.nbytes,
                        )
                        for part, offset in _side_by_side(batch)
                    ]
                    self._cuda.copy_to_host(copies, slot.stream)
                    upcoming.extend(itertools.islice(batches, 1))
                elif not filled:
                    return

    @contextlib.contextmanager
    def fetch(self, device: int, pointer: int, nbytes: int) -> Iterator[memoryview]:
        """Bytes of the GPU in host memory, for the length of a block; at most a block of them."""
        with contextlib.ExitStack() as stack:
            lane = stack.enter_context(self._lanes.borrow(device, Fence()))
            block = self.pool.take()
            stack.callback(self.pool.give_back, block)
            self._cuda.copy_to_host([(block.pointer, pointer, nbytes)], lane.streams[0])
            self._cuda.synchronize_stream(lane.streams[0])
            yield block.view[:nbytes]

    @property
    def bounce(self) -> str:
        """What bytes bounce through here, as reports call it."""
        locked = "page-locked" if self.pool.failure is None else "ordinary"
        return f"a ring of {locked} blocks"

    def close(self) -> None:
        """Unlock the blocks; no transfer may be under way. Safe to call again."""
        self.pool.close()

    def _wait_if_unlocked(self, fence: Fence) -> None:
        """Let work before the fence end first, where blocks are ordinary memory.

        A copy from or to it may wait inside the driver, with the interpreter lock held, for work
        that needs that lock.
        """
        if self.pool.failure is not None:
            for event in fence.events:
                self._cuda.synchronize_event(event)

    def _free_slots(
        self, lane: Lane, is_worth_more: Callable[[], bool], give_back: contextlib.ExitStack
    ) -> Iterator[Slot]:
        """Slots that nothing uses, without end: new ones at first, then the oldest again.

        A further slot is made only where it is worth it, so that a transfer of few jobs never takes
        more blocks than it has jobs.
        """
        slots: list[Slot] = []
        for stream in lane.streams:
            if not slots:
                block: Block | None = self.pool.take()
            else:
                block = self.pool.try_take() if is_worth_more() else None
            if block is None:
                break
            give_back.callback(self.pool.give_back, block)
            slots.append(Slot(block, stream))
            yield slots[-1]
        for slot in itertools.cycle(slots):
            self._cuda.synchronize_stream(slot.stream)
            yield slot

    def _move_one(
        self, job: Job, slot: Slot, fill: Fill, buffers: Sequence[Buffer], tally: Tally
    ) -> int:
        """Move a job through a slot; how many wanted bytes it had."""
        block = slot.block
        began = perf_counter()
        base = block.pointer - fill(job, block)
        tally.file_seconds += perf_counter() - began
        copies = job.copies(buffers, base)
        self._cuda.copy_to_device(copies, slot.stream)
        moved = 0
        for _, _, nbytes in copies:
            moved += nbytes
        return moved


def _is_job_for_each(jobs: Jobs, workers: int) -> bool:
    return len(jobs) >= workers


def _side_by_side(parts: Iterable[Part]) -> Iterator[tuple[Part, int]]:
    """Parts, each with its first byte in the block that they share."""
    offset = 0
    for part in parts:
        yield part, offset
        offset += part.nbytes


def _spill_one(spill: Spill, job: Job, view: memoryview, tally: Tally) -> None:
    began = perf_counter()
    tally.unaligned_nbytes += spill(job, view)
    tally.file_seconds += perf_counter() - began
    tally.moved_nbytes += job.stop - job.start

"""The ring: page-locked blocks that are filled from a file and drained into a GPU, in turn.

Each worker has at most `DEPTH` blocks, each with a stream of its own: while one is copied to the
GPU, the next is read. Blocks and streams go back to their pools when the worker ends.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.bindings.cuda import Cuda
from headrace.engines.base import Cargo, Job, Jobs, Tally, run_workers
from headrace.memory.buffer import Buffer
from headrace.memory.pinned import Block, PinnedPool

DEPTH = 2
"""Blocks of one worker; a third gained nothing."""

Fill = Callable[[Job, Block], int]
"""Reads the window of a job into a block; returns the file offset of the block's first byte."""


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


@dataclass(slots=True)
class Lane:
    """What one worker moves bytes with."""

    streams: tuple[int, ...]
    """One for each slot."""
    event: int
    """For ordering the streams after other work."""
    slots: list[Slot] = field(default_factory=list)
    """In use; empty while the lane is spare."""


class Ring:
    """Page-locked blocks and lanes of one context, for all of its devices.

    Parameters
    ----------
    cuda
        The calls to make.
    pool
        Where the blocks come from.
    """

    def __init__(self, cuda: Cuda, pool: PinnedPool) -> None:
        self._cuda = cuda
        self.pool = pool
        self._prepared: set[int] = set()
        self._lanes: dict[int, list[Lane]] = {}
        self._lock = threading.Lock()
        # Also for a context that nobody closed: memory that is unmapped while it is still locked
        # would make the next lock of the same address fail.
        self._release = weakref.finalize(self, _release, cuda, pool, self._lanes)
        self._release.atexit = False  # the process takes all of it along, the driver included

    def prepare(self, device: int) -> str | None:
        """Get a first block; why there is no page-locked memory, or None when all is well.

        Raises
        ------
        DeviceError
            There is no such device.
        """
        if device not in self._prepared:
            with self._on_device(device):
                self.pool.prepare()
            self._prepared.add(device)
        return self.pool.failure

    def move(self, cargo: Cargo, fill: Fill) -> list[Tally]:
        """Move a cargo through the ring.

        Parameters
        ----------
        cargo
            All of its buffers are on one CUDA device.
        fill
            How a window gets into a block.
        """
        device = cargo.buffers[0].device.index
        streams = sorted({b.stream for b in cargo.buffers if b.stream is not None})

        def work(jobs: Jobs, tally: Tally) -> None:
            with self._on_device(device), self._lane(device) as lane:
                self._follow(lane, streams)
                for slot in self._free_slots(lane, jobs, cargo.workers):
                    self._move_one(slot, jobs, fill, cargo.buffers, tally)
                    if not jobs:
                        return

        return run_workers(work, cargo)

    def close(self) -> None:
        """Destroy the streams and unlock the blocks; no transfer may be under way."""
        self._release()

    @contextlib.contextmanager
    def _on_device(self, device: int) -> Iterator[None]:
        """Make a device the thread's current one, and its own again on the way out."""
        before = self._cuda.current_device()
        self._cuda.set_device(device)
        try:
            yield
        finally:
            if before != device:
                self._cuda.set_device(before)

    def _free_slots(self, lane: Lane, jobs: Jobs, workers: int) -> Iterator[Slot]:
        """Slots that nothing uses, without end: new ones at first, then the oldest again.

        A further slot is made only while there is a job for each worker, so that a transfer of
        few jobs never takes more blocks than it has jobs.
        """
        for stream in lane.streams:
            if not lane.slots:
                block: Block | None = self.pool.take()
            else:
                block = self.pool.try_take() if len(jobs) >= workers else None
            if block is None:
                break
            lane.slots.append(Slot(block, stream))
            yield lane.slots[-1]
        for slot in itertools.cycle(lane.slots):
            self._cuda.synchronize_stream(slot.stream)
            yield slot

    def _move_one(
        self, slot: Slot, jobs: Jobs, fill: Fill, buffers: Sequence[Buffer], tally: Tally
    ) -> None:
        """Move the next job, if there is one, through a slot."""
        job = jobs.take()
        if job is None:
            return
        began = time.perf_counter()
        base = slot.block.pointer - fill(job, slot.block)
        tally.read_seconds += time.perf_counter() - began
        copies = [
            (
                buffers[piece.buffer].pointer + piece.buffer_offset,
                base + piece.file_offset,
                piece.nbytes,
            )
            for piece in job.pieces()
        ]
        self._cuda.copy_to_device(copies, slot.stream)
        tally.moved_nbytes += sum(nbytes for _, _, nbytes in copies)

    def _follow(self, lane: Lane, streams: list[int]) -> None:
        """Order the lane after work already queued on the streams that may use the buffers."""
        for stream in streams:
            self._cuda.record_event(lane.event, stream)
            for follower in lane.streams:
                self._cuda.wait_event(follower, lane.event)
            if self.pool.failure is not None:
                # A copy from ordinary memory may wait inside the driver, with the interpreter
                # lock held, for work that needs that lock: let that work end first.
                self._cuda.synchronize_event(lane.event)

    @contextlib.contextmanager
    def _lane(self, device: int) -> Iterator[Lane]:
        """A lane for one worker; on the way out, no copy is under way and its blocks are back."""
        with self._lock:
            spare = self._lanes.setdefault(device, [])
            lane = spare.pop() if spare else None
        if lane is None:
            lane = self._create_lane()
        try:
            yield lane
        finally:
            with contextlib.ExitStack() as stack:  # each slot, even when the driver fails for one
                for slot in lane.slots:
                    stack.callback(self.pool.give_back, slot.block)
                    stack.callback(self._cuda.synchronize_stream, slot.stream)
            lane.slots.clear()
            with self._lock:
                spare.append(lane)

    def _create_lane(self) -> Lane:
        with contextlib.ExitStack() as undo:
            streams = []
            for _ in range(DEPTH):
                streams.append(self._cuda.create_stream())
                undo.callback(self._cuda.destroy_stream, streams[-1])
            lane = Lane(tuple(streams), self._cuda.create_event())
            undo.pop_all()
        return lane


def _release(cuda: Cuda, pool: PinnedPool, lanes: dict[int, list[Lane]]) -> None:
    for lane in itertools.chain.from_iterable(lanes.values()):
        cuda.destroy_event(lane.event)
        for stream in lane.streams:
            cuda.destroy_stream(stream)
    lanes.clear()
    pool.close()

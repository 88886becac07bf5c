"""The ring: page-locked blocks that are filled from a file and drained into a GPU, in turn.

Each worker has a stream of its own and at most `DEPTH` blocks: while one is copied to the GPU,
the next is read. Blocks and streams go back to their pools when the worker ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from headrace.bindings.cuda import Cuda
from headrace.engines.base import Cargo, Job, Jobs, Tally, run_workers
from headrace.memory.buffer import Buffer
from headrace.memory.pinned import Block, PinnedPool
from headrace.planning.plan import cut

DEPTH = 2
"""Blocks of one worker; a third gained nothing (benchmarks/results)."""

Fill = Callable[[Job, Block], int]
"""Reads the window of a job into a block; returns the file offset of the block's first byte."""


@dataclass(slots=True)
class Lane:
    """One worker's stream, with an event for each of its blocks."""

    stream: int
    """CUDA stream."""
    events: list[int]
    """Events, used in turn."""
    blocks: deque[tuple[Block, int]] = field(default_factory=deque)
    """Blocks in flight, oldest first, with the event that marks the end of their copies."""


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
        self._lanes: dict[int, list[Lane]] = {}
        self._lock = threading.Lock()

    def prepare(self, device: int) -> str | None:
        """Get a first block; why there is no page-locked memory, or None when all is well.

        Raises
        ------
        DeviceError
            There is no such device.
        """

        def get() -> str | None:
            self._cuda.set_device(device)
            return self.pool.prepare()

        # In a thread of its own, so that the caller's current device stays as it is.
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(get).result()

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
            self._cuda.set_device(device)
            with self._lane(device, tally) as lane:
                self._follow(lane, streams)
                while jobs:
                    self._move_one(lane, jobs, fill, cargo.buffers, tally)

        return run_workers(work, cargo)

    def close(self) -> None:
        """Destroy the streams and unlock the blocks; no transfer may be under way."""
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for spare in lanes.values():
            for lane in spare:
                for event in lane.events:
                    self._cuda.destroy_event(event)
                self._cuda.destroy_stream(lane.stream)
        self.pool.close()

    def _move_one(
        self, lane: Lane, jobs: Jobs, fill: Fill, buffers: Sequence[Buffer], tally: Tally
    ) -> None:
        began = time.perf_counter()
        block, event = self._claim(lane)
        lane.blocks.append((block, event))
        tally.wait_seconds += time.perf_counter() - began
        job = jobs.take()
        if job is None:
            return
        began = time.perf_counter()
        first = fill(job, block)
        tally.read_seconds += time.perf_counter() - began
        base = block.pointer - first
        copies = [
            (
                buffers[piece.buffer].pointer + piece.buffer_offset,
                base + piece.file_offset,
                piece.nbytes,
            )
            for piece in cut(job.transfer.pieces, job.window)
        ]
        self._cuda.copy_to_device(copies, lane.stream)
        tally.moved_nbytes += sum(nbytes for _, _, nbytes in copies)
        self._cuda.record_event(event, lane.stream)

    def _claim(self, lane: Lane) -> tuple[Block, int]:
        """A block that nothing uses: a new one, or the lane's oldest once its copies are done."""
        if len(lane.blocks) < DEPTH:
            block = self.pool.try_take() if lane.blocks else self.pool.take()
            if block is not None:
                used = {event for _, event in lane.blocks}
                return block, next(event for event in lane.events if event not in used)
        self._cuda.synchronize_event(lane.blocks[0][1])
        return lane.blocks.popleft()

    def _follow(self, lane: Lane, streams: list[int]) -> None:
        """Order the lane after work already queued on the streams that may use the buffers."""
        for stream in streams:
            self._cuda.record_event(lane.events[0], stream)
            self._cuda.wait_event(lane.stream, lane.events[0])

    @contextlib.contextmanager
    def _lane(self, device: int, tally: Tally) -> Iterator[Lane]:
        """A lane for one worker; on the way out, no copy is under way and its blocks are back."""
        with self._lock:
            spare = self._lanes.setdefault(device, [])
            lane = spare.pop() if spare else None
        if lane is None:
            lane = self._create_lane()
        try:
            yield lane
        finally:
            began = time.perf_counter()
            try:
                self._cuda.synchronize_stream(lane.stream)
            finally:
                while lane.blocks:
                    self.pool.give_back(lane.blocks.popleft()[0])
                with self._lock:
                    spare.append(lane)
            tally.wait_seconds += time.perf_counter() - began

    def _create_lane(self) -> Lane:
        lane = Lane(self._cuda.create_stream(), [])
        for _ in range(DEPTH):
            lane.events.append(self._cuda.create_event())
        return lane

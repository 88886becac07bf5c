"""Direct engine: O_DIRECT around the page cache, into host memory or through the ring to a GPU.

O_DIRECT takes aligned offsets, lengths and addresses only. A window that is not aligned is
widened to the next aligned offsets on both sides; what is not wanted of it stays in the block.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from headrace.bindings.posix import DirectAlignment
from headrace.bindings.pymemory import map_pages, view_memory
from headrace.engines.base import Cargo, Job, Jobs, Stats, Tally, run_workers, total
from headrace.engines.ring import Ring
from headrace.memory.alignment import align_down, align_up
from headrace.memory.pinned import Block
from headrace.options import PAGE_NBYTES
from headrace.planning.plan import Piece
from headrace.storage.source import Source
from headrace.types import Route


class DirectEngine:
    """`Engine` around the page cache.

    Parameters
    ----------
    alignments
        What O_DIRECT demands, by `Transfer.source`.
    ring
        Needed for destinations on a GPU only.
    """

    route = Route.DIRECT

    def __init__(self, alignments: Sequence[DirectAlignment], ring: Ring | None) -> None:
        self._alignments = alignments
        self._ring = ring

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`."""
        if self._ring is None:
            tallies = run_workers(partial(self._work, cargo), cargo)
            bounced = any(tally.unaligned_nbytes for tally in tallies)
            bounce = "a block of host memory for each worker" if bounced else ""
            return total(self.route, tallies, "O_DIRECT preadv into host memory", bounce)
        tallies = self._ring.move(cargo, partial(self._fill, cargo.sources), self._is_aligned)
        return total(
            self.route,
            tallies,
            "O_DIRECT preadv into the ring, copied to the GPU",
            self._ring.bounce,
        )

    def _is_aligned(self, job: Job) -> bool:
        return not (job.start | job.stop) % self._alignments[job.transfer.source].offset

    def _fill(self, sources: Sequence[Source], job: Job, block: Block) -> int:
        """Read a window into a block, as `headrace.engines.ring.Fill` asks."""
        source = sources[job.transfer.source]
        alignment = self._alignments[job.transfer.source].offset
        return _read_widened(source, job, alignment, block.view)

    def _work(self, cargo: Cargo, jobs: Jobs, tally: Tally) -> None:
        bounce: memoryview | None = None
        while (job := jobs.take()) is not None:
            source = cargo.sources[job.transfer.source]
            alignment = self._alignments[job.transfer.source]
            pieces = job.pieces()
            if not pieces:  # a window inside a gap
                continue
            began = time.perf_counter()
            if not _read_straight(cargo, source, job, pieces, alignment):
                room = job.stop - job.start + 2 * alignment.offset
                if bounce is None or len(bounce) < room:
                    bounce = map_pages(align_up(room, PAGE_NBYTES))
                first = _read_widened(source, job, alignment.offset, bounce)
                _scatter(cargo, pieces, bounce, first)
                tally.unaligned_nbytes += sum(piece.nbytes for piece in pieces)
            tally.file_seconds += time.perf_counter() - began
            tally.moved_nbytes += sum(piece.nbytes for piece in pieces)


def _read_straight(
    cargo: Cargo,
    source: Source,
    job: Job,
    pieces: Sequence[Piece],
    alignment: DirectAlignment,
) -> bool:
    """Read a window without a bounce, if it is one piece whose ends and address are aligned."""
    piece = pieces[0]
    pointer = cargo.buffers[piece.buffer].pointer + piece.buffer_offset
    whole = len(pieces) == 1 and piece.nbytes == job.stop - job.start
    aligned = not (job.start | job.stop) % alignment.offset
    if not whole or not aligned or pointer % alignment.memory:
        return False
    view = view_memory(pointer, piece.nbytes)
    source.read_aligned(view, job.start, piece.nbytes, alignment.offset)
    return True


def _read_widened(source: Source, job: Job, alignment: int, view: memoryview) -> int:
    """Read the aligned window around a job's; file offset of the first byte in `view`."""
    start, stop = align_down(job.start, alignment), align_up(job.stop, alignment)
    source.read_aligned(view[: stop - start], start, job.stop - start, alignment)
    return start


def _scatter(cargo: Cargo, pieces: Sequence[Piece], block: memoryview, first: int) -> None:
    """Copy pieces out of a block whose first byte is at offset `first` of the file."""
    for piece in pieces:
        pointer = cargo.buffers[piece.buffer].pointer + piece.buffer_offset
        start = piece.file_offset - first
        view_memory(pointer, piece.nbytes)[:] = block[start : start + piece.nbytes]

"""Direct writer: O_DIRECT around the page cache, out of host memory or through the ring.

O_DIRECT takes aligned offsets, lengths and addresses only. Of a window that is not aligned, the
ends go through the page cache: a direct write of whole blocks would rewrite bytes outside of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from headrace.bindings.posix import DirectAlignment
from headrace.bindings.pymemory import address_of, map_pages
from headrace.engines.base import Cargo, Job, Jobs, Stats, Tally, run_workers, total
from headrace.engines.host import piece_view
from headrace.engines.ring import Ring
from headrace.memory.alignment import align_down, align_up
from headrace.options import PAGE_NBYTES
from headrace.storage.sink import Sink
from headrace.types import Route


class DirectWriter:
    """`Engine` into files, around the page cache.

    Parameters
    ----------
    alignments
        What O_DIRECT demands, by `Transfer.source`.
    ring
        Needed for memory of a GPU only.
    """

    route = Route.DIRECT

    def __init__(self, alignments: Sequence[DirectAlignment], ring: Ring | None) -> None:
        self._alignments = alignments
        self._ring = ring

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`."""
        if self._ring is None:
            tallies = run_workers(lambda jobs, tally: self._work(cargo, jobs, tally), cargo)
            bounced = any(tally.unaligned_nbytes for tally in tallies)
            bounce = "the page cache, or a block of host memory for each worker" if bounced else ""
            return total(self.route, tallies, "O_DIRECT pwritev out of host memory", bounce)

        return total(
            self.route,
            self._ring.drain(cargo, partial(self._write, cargo)),
            "copied from the GPU into the ring, O_DIRECT pwritev out of it",
            self._ring.bounce,
        )

    def _work(self, cargo: Cargo, jobs: Jobs, tally: Tally) -> None:
        bounce: memoryview | None = None
        while (job := jobs.take()) is not None:
            began, nbytes = time.perf_counter(), job.stop - job.start
            views = [piece_view(piece, cargo.buffers) for piece in job.pieces()]
            if len(views) == 1 and self._fits(job, views[0]):
                tally.unaligned_nbytes += self._write(cargo, job, views[0])
            else:
                bounce = bounce or map_pages(cargo.block_nbytes)
                lead = job.start % cargo.block_nbytes
                _gather(views, bounce[lead : lead + nbytes])
                self._write(cargo, job, bounce[lead : lead + nbytes])
                tally.unaligned_nbytes += nbytes
            tally.file_seconds += time.perf_counter() - began
            tally.moved_nbytes += nbytes

    def _fits(self, job: Job, view: memoryview) -> bool:
        """Whether what is aligned in the file is aligned in memory, too."""
        alignment = self._alignments[job.transfer.source].memory
        return not (address_of(view)[0] - job.start) % max(alignment, 1)

    def _write(self, cargo: Cargo, job: Job, view: memoryview) -> int:
        """Write a window: what is aligned around the page cache, its ends through it."""
        unit = max(self._alignments[job.transfer.source].offset, PAGE_NBYTES)
        return write_around(cargo.sinks[job.transfer.source], view, job.start, unit)


def write_around(sink: Sink, view: memoryview, file_offset: int, unit: int) -> int:
    """Write bytes with O_DIRECT, but for unaligned ends; how many bytes those had.

    The ends are cut at pages, so that no page is written both ways.

    Parameters
    ----------
    sink
        Open with O_DIRECT.
    view
        The bytes; its address is aligned where the file offset is.
    file_offset
        Where they go; any value.
    unit
        Alignment to keep, in bytes; a multiple of the page size.
    """
    stop = file_offset + len(view)
    lower, upper = align_up(file_offset, unit), align_down(stop, unit)
    if lower >= upper:
        sink.write([view], file_offset)
        return len(view)
    head, tail = lower - file_offset, stop - upper
    if head:
        sink.write([view[:head]], file_offset)
    sink.write_aligned(view[head : len(view) - tail], lower, unit)
    if tail:
        sink.write([view[len(view) - tail :]], upper)
    return head + tail


def _gather(views: Sequence[memoryview], block: memoryview) -> None:
    done = 0
    for view in views:
        block[done : done + len(view)] = view
        done += len(view)

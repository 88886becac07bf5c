"""Host engines: buffered reads straight into host memory, and writes straight out of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

from headrace.bindings.pymemory import view_memory
from headrace.engines.base import Cargo, Jobs, Stats, Tally, run_workers, total
from headrace.memory.buffer import Buffer
from headrace.planning.plan import Piece
from headrace.storage.source import Source
from headrace.types import Route


class HostEngine:
    """`Engine` for destinations in host memory, through the page cache."""

    route = Route.HOST

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`."""
        tallies = run_workers(partial(_work, cargo), cargo)
        return total(self.route, tallies, "buffered preadv into the destination")


class HostWriter:
    """`Engine` from host memory into files, through the page cache."""

    route = Route.HOST

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`."""
        tallies = run_workers(partial(_write, cargo), cargo)
        return total(self.route, tallies, "buffered pwritev out of the memory itself")


def _write(cargo: Cargo, jobs: Jobs, tally: Tally) -> None:
    while (job := jobs.take()) is not None:
        began = time.perf_counter()
        views = [piece_view(piece, cargo.buffers) for piece in job.pieces()]
        cargo.sinks[job.transfer.source].write(views, job.start)
        tally.file_seconds += time.perf_counter() - began
        tally.moved_nbytes += job.stop - job.start


def piece_view(piece: Piece, buffers: Sequence[Buffer]) -> memoryview:
    """The host memory of a piece."""
    return view_memory(buffers[piece.buffer].pointer + piece.buffer_offset, piece.nbytes)


def _work(cargo: Cargo, jobs: Jobs, tally: Tally) -> None:
    while (job := jobs.take()) is not None:
        source = cargo.sources[job.transfer.source]
        pieces = job.pieces()
        clean = job.transfer.keep_clean and source.holds_nothing(job.start, job.stop)
        began = time.perf_counter()
        read_pieces(source, pieces, cargo.buffers)
        tally.file_seconds += time.perf_counter() - began
        tally.moved_nbytes += sum(piece.nbytes for piece in pieces)
        if clean:
            source.forget(job.start, job.stop)


def read_pieces(source: Source, pieces: Iterable[Piece], buffers: Sequence[Buffer]) -> None:
    """Read pieces into host buffers; those that touch in the file share one read call."""
    views: list[memoryview] = []
    start = stop = 0
    for piece in pieces:
        if piece.file_offset != stop and views:
            source.read(views, start)
            views = []
        if not views:
            start = piece.file_offset
        views.append(piece_view(piece, buffers))
        stop = piece.file_stop
    if views:
        source.read(views, start)

"""Cached engines: page cache -> page-locked ring -> GPU, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from headrace.engines.base import Cargo, Job, Stats, total
from headrace.engines.ring import Ring
from headrace.memory.pinned import Block
from headrace.storage.source import Source
from headrace.types import Route


class CachedEngine:
    """`Engine` for destinations on a GPU, through the page cache."""

    route = Route.CACHED

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`."""
        tallies = self._ring.move(cargo, partial(_fill, cargo.sources))
        return total(
            self.route,
            tallies,
            "buffered preadv into the ring, copied to the GPU",
            self._ring.bounce,
        )


class CachedWriter:
    """`Engine` from a GPU into files, through the page cache."""

    route = Route.CACHED

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`."""

        def spill(job: Job, view: memoryview) -> int:
            cargo.sinks[job.transfer.source].write([view], job.start)
            return 0

        return total(
            self.route,
            self._ring.drain(cargo, spill),
            "copied from the GPU into the ring, buffered pwritev out of it",
            self._ring.bounce,
        )


def _fill(sources: Sequence[Source], job: Job, block: Block) -> int:
    transfer, start, stop = job
    source = sources[transfer.source]
    clean = transfer.keep_clean and source.holds_nothing(start, stop)
    source.read([block.view[: stop - start]], start)
    if clean:
        source.forget(start, stop)
    return start

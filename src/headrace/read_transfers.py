"""Reading: from what is wanted to bytes in place, and a report; or only to an explanation."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.engines.base import Cargo, Engine, Stats
from headrace.engines.lanes import Fence
from headrace.equipment import Equipment
from headrace.errors import SourceChanged
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.memory.buffer import Buffer
from headrace.options import Options
from headrace.planning.plan import Plan, Rejection
from headrace.planning.planner import make_plan
from headrace.probing.machine import storage_read_nbytes
from headrace.progress import OnProgress
from headrace.report import (
    Explanation,
    Report,
    Stopwatch,
    format_nbytes,
    make_explanation,
    make_report,
)
from headrace.storage.source import Source
from headrace.survey import GpuProbes, Survey, Want, open_sources, select, survey
from headrace.transfers import Order, Transfers
from headrace.types import Device, Route

if TYPE_CHECKING:
    from headrace.formats.checksums import StoredChecksum

Allocate = Callable[[tuple[TensorSpec, ...]], Sequence[Buffer]]
"""Makes a destination for each tensor, in order."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """What was compared with checksums."""

    nbytes: int | None = None
    """Bytes whose checksum was right; None if nobody asked."""
    cpu_seconds: float = 0.0
    """User and system seconds of the threads that hashed them."""

    def added_to(self, report: Report) -> Report:
        """The report of the whole read."""
        if self.nbytes is None:
            return report
        cpu_seconds = report.cpu_seconds + self.cpu_seconds
        return replace(report, cpu_seconds=cpu_seconds, verified_nbytes=self.nbytes)


_MOST_TENSORS = 20_000  # of a plan that is kept: it takes 10 MB then


class _KnownPlans:
    """Plans of reads that found all bytes registered: while they stay so, none would differ.

    Threads may share it. The least recently used leave first.
    """

    _MOST = 16

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, tuple[Survey, Plan]] = OrderedDict()
        self._lock = threading.Lock()

    def find(
        self, key: Hashable, sources: Sequence[Source], probes: GpuProbes
    ) -> tuple[Survey, Plan] | None:
        """The plan of an earlier read of the same bytes, if they are registered still."""
        with self._lock:
            known = self._plans.get(key)
            if known is None:
                return None
            self._plans.move_to_end(key)
        parts = zip(sources, known[0].files, strict=True)
        holds = all(probes.is_registered(source.identity, file.stretches) for source, file in parts)
        return known if holds else None

    def keep(self, key: Hashable, found: Survey, plan: Plan) -> None:
        """Remember a plan if all of it is registered."""
        if found.is_registered:
            with self._lock:
                self._plans[key] = found, plan
                while len(self._plans) > self._MOST:
                    self._plans.popitem(last=False)


class ReadTransfers(Transfers):
    """Plans reads and lets the engines do them."""

    def __init__(self, equipment: Equipment, options: Options) -> None:
        super().__init__(equipment, options)
        self._known = _KnownPlans()

    def run(
        self,
        want: Want,
        device: Device,
        allocate: Allocate,
        forced: Route | None,
        progress: OnProgress | None,
        fence: Fence | None = None,
        stream: int | None = None,
    ) -> tuple[Report, tuple[Rejection, ...]]:
        """Read what is wanted; the report, and the downgrades to warn of.

        See `headrace.context.Context.transfer` for parameters and errors.
        """
        watch = Stopwatch()
        with contextlib.ExitStack() as stack:
            with watch.stage("open"):
                files = self._equipment.bindings.files
                sources = stack.enter_context(open_sources(want.paths, files))
                catalogs = want.describe(sources)
                wanted = select(catalogs, want.names)
                stored = _find_stored(catalogs, wanted) if want.verify else None
            with watch.stage("plan"):
                found, plan = self._plan(sources, wanted, device, forced)
                plan = self._prepare(plan, [device])
            with watch.stage("allocate"):
                buffers = allocate(found.specs)
            if stream is not None and found.is_registered and plan.takes_only(Route.MAPPED):
                fence = Fence()  # what goes onto the caller's stream follows what is on it
            with self._clearing_up(sources, buffers, stream):
                with watch.stage("transfer"), self._after(fence, buffers) as after:
                    cargo = self._load_cargo(
                        buffers, found.nbytes, found.machine, after, sources=sources, stream=stream
                    )
                    _mark_clean(plan, sources)
                    order = Order(cargo, found.volumes, forced, self._equipment.engine)
                    stats, plan = self._dispatch(plan, order, progress)
                with watch.stage("verify"):
                    compared = self._verify(sources, stored, buffers)
            held = (self._equipment.pinned_nbytes, self._equipment.mapped_nbytes)
        report = make_report(want.label, device, plan, stats, watch, held)
        return compared.added_to(report), plan.downgrades

    def _verify(
        self,
        sources: Sequence[Source],
        stored: Sequence[StoredChecksum] | None,
        buffers: Sequence[Buffer],
    ) -> _Compared:
        """Make sure of the files and, where that is wanted, compare what arrived with checksums."""
        for source in sources:
            source.verify_unchanged()
        if stored is None:
            return _Compared()
        from headrace.formats.checksums import compare_checksums

        arrived = [buffers[each.index] for each in stored]
        digests = self.digest(arrived)
        compare_checksums(stored, digests.by_buffer)
        return _Compared(sum(buffer.nbytes for buffer in arrived), digests.cpu_seconds)

    def explain(self, want: Want, device: Device, forced: Route | None) -> Explanation:
        """Say what `run` would do; reads headers and facts, no payload."""
        with open_sources(want.paths, self._equipment.bindings.files) as sources:
            wanted = select(want.describe(sources), want.names)
            found, plan = self._plan(sources, wanted, device, forced)
        paths = [want.paths[index] for index in found.spec_sources]
        return make_explanation(want.label, device, found.specs, paths, plan, found.facts())

    def _plan(
        self,
        sources: tuple[Source, ...],
        wanted: Sequence[tuple[TensorSpec, ...]],
        device: Device,
        forced: Route | None,
    ) -> tuple[Survey, Plan]:
        probes = self._probes(device, forced)
        few = sum(map(len, wanted)) <= _MOST_TENSORS
        may_stay = bool(self._equipment.mapped_nbytes) and few  # else there is nothing to look for
        key = (tuple(source.identity for source in sources), wanted, device, forced)
        known = self._known.find(key, sources, probes) if may_stay else None
        if known is None:
            system, granule = self._equipment.bindings.system, self._options.block_nbytes
            found = survey(sources, wanted, system, probes, granule)
            known = found, make_plan(found.files, device, self._options, forced)
            if may_stay:
                self._known.keep(key, *known)
        return known

    @contextlib.contextmanager
    def _clearing_up(
        self, sources: Sequence[Source], buffers: Sequence[Buffer], stream: int | None
    ) -> Iterator[None]:
        """Where a block fails: leave no copy on the caller's stream, and keep no changed file."""
        try:
            yield
        except BaseException as error:
            if stream is not None:
                with self._equipment.fence(buffers) as left:
                    self._equipment.wait_for(left)
            if isinstance(error, SourceChanged):
                for source in sources:
                    self._equipment.forget_file(source.identity)
            raise

    def _engage(self, engine: Engine, cargo: Cargo) -> Stats:
        """Run an engine, and add to its evidence what the kernel says of storage meanwhile."""
        if cargo.stream is not None and engine.route is Route.MAPPED:
            return engine.run(cargo)  # it may only enqueue, and then every microsecond counts
        before = storage_read_nbytes(self._equipment.bindings.system)
        stats = engine.run(cargo)
        after = storage_read_nbytes(self._equipment.bindings.system)
        if before is None or after is None:
            return stats
        read = format_nbytes(after - before)
        evidence = f"{stats.evidence}; block devices gave this process {read} meanwhile"
        return replace(stats, evidence=evidence)


def _find_stored(
    catalogs: Sequence[Catalog], wanted: Sequence[Sequence[TensorSpec]]
) -> tuple[StoredChecksum, ...]:
    """Checksums of wanted tensors, once it is sure that they can be compared."""
    from headrace.engines.checksum import load_xxh3
    from headrace.formats.checksums import find_checksums

    load_xxh3()
    return find_checksums(catalogs, wanted)


def _mark_clean(plan: Plan, sources: Sequence[Source]) -> None:
    """Let the kernel read nothing ahead where nothing shall stay in the page cache."""
    for transfer in plan.transfers:
        if transfer.keep_clean:
            sources[transfer.source].expect_random()

"""Reading: from what is wanted to bytes in place, and a report; or only to an explanation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.engines.base import Cargo, Engine, Stats
from headrace.engines.lanes import Fence
from headrace.equipment import Equipment
from headrace.errors import RouteUnavailable, SourceChanged
from headrace.formats.catalog import TensorSpec
from headrace.memory.buffer import Buffer
from headrace.options import Options
from headrace.planning.effort import choose_workers
from headrace.planning.plan import Plan, Rejection
from headrace.planning.planner import make_plan
from headrace.probing.fact import Fact
from headrace.probing.machine import storage_read_nbytes
from headrace.progress import Odometer, OnProgress
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
from headrace.types import Device, Route

Allocate = Callable[[tuple[TensorSpec, ...]], Sequence[Buffer]]
"""Makes a destination for each tensor, in order."""


class ReadTransfers:
    """Plans reads and lets the engines do them.

    Parameters
    ----------
    equipment
        The drivers and pools of a context.
    options
        Its options.
    """

    def __init__(self, equipment: Equipment, options: Options) -> None:
        self._equipment = equipment
        self._options = options

    def run(
        self,
        want: Want,
        device: Device,
        allocate: Allocate,
        forced: Route | None,
        progress: OnProgress | None,
    ) -> tuple[Report, tuple[Rejection, ...]]:
        """Read what is wanted; the report, and the downgrades to warn of.

        See `headrace.context.Context.transfer` for parameters and errors.
        """
        watch = Stopwatch()
        with contextlib.ExitStack() as stack:
            with watch.stage("open"):
                files = self._equipment.bindings.files
                sources = stack.enter_context(open_sources(want.paths, files))
                wanted = select(want.describe(sources), want.names)
            with watch.stage("plan"):
                found, plan = self._plan(sources, wanted, device, forced)
                plan = self._prepare(plan, device)
            with watch.stage("allocate"):
                buffers = allocate(found.specs)
            try:
                with watch.stage("transfer"), self._equipment.fence(device, buffers) as fence:
                    cargo = self._load_cargo(found, buffers, device, fence)
                    stats, plan = self._run(plan, found, cargo, device, progress, forced)
                with watch.stage("verify"):
                    for source in sources:
                        source.verify_unchanged()
            except SourceChanged:
                for source in sources:
                    self._equipment.forget_file(source.identity)
                raise
            held = (self._equipment.pinned_nbytes, self._equipment.mapped_nbytes)
        return make_report(want.label, device, plan, stats, watch, held), plan.downgrades

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
        probes = _NO_GPU if device.is_host else self._gpu_probes(device.index, forced)
        system, granule = self._equipment.bindings.system, self._options.block_nbytes
        found = survey(sources, wanted, system, probes, granule)
        return found, make_plan(found.files, device, self._options, forced)

    def _gpu_probes(self, index: int, forced: Route | None) -> GpuProbes:
        gpu = self._equipment.gpu_fact(index)
        if gpu.holds is not True:
            return GpuProbes(gpu, gpu, lambda _: gpu)
        is_forced = forced is Route.GDS
        return GpuProbes(
            gpu,
            self._equipment.mapping_fact(index),
            lambda path: self._equipment.gds_fact(path, is_forced),
        )

    def _prepare(self, plan: Plan, device: Device) -> Plan:
        """Get a first block of page-locked memory, while the plan can still change."""
        if device.is_host or not plan.uses(Route.CACHED, Route.DIRECT):
            return plan
        failure = self._equipment.prepare_ring(device.index)
        if failure is None:
            return plan
        rejection = Rejection(
            Route.CACHED,
            f"no page-locked memory, so copies go through ordinary memory: {failure}",
            "raise the limit of locked memory (ulimit -l), or lower Options.pinned_nbytes",
        )
        if self._options.strict:
            raise RouteUnavailable(f"strict=True forbids a downgrade: {rejection}")
        return plan.downgraded(rejection)

    def _load_cargo(
        self, found: Survey, buffers: Sequence[Buffer], device: Device, fence: Fence
    ) -> Cargo:
        """All that the engines share; each gets the transfers of its own route."""
        return Cargo(
            transfers=(),
            sources=found.sources,
            buffers=buffers,
            workers=choose_workers(self._options, found.machine, device, found.nbytes),
            block_nbytes=self._options.block_nbytes,
            fence=fence,
        )

    def _run(
        self,
        plan: Plan,
        found: Survey,
        cargo: Cargo,
        device: Device,
        progress: OnProgress | None,
        forced: Route | None,
    ) -> tuple[list[Stats], Plan]:
        """Let the engine of each route move its stretches, one engine after the other."""
        for transfer in plan.transfers:
            if transfer.keep_clean:
                found.sources[transfer.source].expect_random()
        stats: list[Stats] = []
        odometer = Odometer(progress, found.nbytes) if progress else None
        alignments = [volume.alignment for volume in found.volumes]
        for route in dict.fromkeys(transfer.route for transfer in plan.transfers):
            before = sum(done.nbytes for done in stats)
            part = replace(
                cargo,
                transfers=[each for each in plan.transfers if each.route is route],
                on_progress=odometer.of_leg(before) if odometer else None,
            )
            try:
                engine = self._equipment.engine(route, device, alignments)
                stats.append(self._observe(engine, part))
            except RouteUnavailable as error:
                rejection = self._reject(route, error, forced)
                taken = _instead_of(route, found)
                plan = plan.rerouted(rejection, taken)
                engine = self._equipment.engine(taken, device, alignments)
                stats.append(self._observe(engine, part))
            for downgrade in stats[-1].downgrades:
                plan = plan.warned(downgrade)
        return stats, plan

    def _reject(self, route: Route, error: RouteUnavailable, forced: Route | None) -> Rejection:
        """Why a route could not serve after all; the error itself where no other may take over."""
        remedies = {
            Route.MAPPED: "raise the limit of locked memory (ulimit -l)",
            Route.GDS: "headrace doctor tells what cuFile lacks here",
        }
        if route not in remedies or forced is not None or self._options.strict:
            raise error
        why = str(error).removeprefix(f"route {str(route)!r} cannot serve: ")
        return Rejection(route, why, remedies[route])

    def _observe(self, engine: Engine, cargo: Cargo) -> Stats:
        """Run an engine, and add to its evidence what the kernel says of storage meanwhile."""
        before = storage_read_nbytes(self._equipment.bindings.system)
        stats = engine.run(cargo)
        after = storage_read_nbytes(self._equipment.bindings.system)
        if before is None or after is None:
            return stats
        read = format_nbytes(after - before)
        evidence = f"{stats.evidence}; block devices gave this process {read} meanwhile"
        return replace(stats, evidence=evidence)


def _instead_of(route: Route, found: Survey) -> Route:
    """What takes over from a route that could not serve after all."""
    opens_direct = all(volume.direct.holds is True for volume in found.volumes)
    return Route.DIRECT if route is Route.GDS and opens_direct else Route.CACHED


_NOT_LOOKED_FOR = Fact("CUDA device", None, "not looked for", "the destination is host memory")
_NO_GPU = GpuProbes(_NOT_LOOKED_FOR, _NOT_LOOKED_FOR, lambda _: _NOT_LOOKED_FOR)

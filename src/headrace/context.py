"""Context: the only wiring. It owns drivers, pools, streams and observers, and closes them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.bindings.cuda import Cuda
from headrace.bindings.posix import Files, PosixFiles
from headrace.bindings.sysfs import Linux, System
from headrace.engines.base import Cargo, Engine, Stats
from headrace.equipment import Bindings, Equipment
from headrace.errors import RouteUnavailable, SourceChanged
from headrace.formats.catalog import TensorSpec
from headrace.memory.buffer import Buffer
from headrace.observers import Observers, process_observers
from headrace.options import Options
from headrace.planning.effort import choose_workers
from headrace.planning.plan import Plan, Rejection
from headrace.planning.planner import make_plan
from headrace.planning.route import parse_route
from headrace.probing.fact import Fact
from headrace.probing.machine import storage_read_nbytes
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

if TYPE_CHECKING:
    from headrace.bindings.cufile import CuFile
    from headrace.probing.examination import Instruments

Allocate = Callable[[tuple[TensorSpec, ...]], Sequence[Buffer]]
"""Makes a destination for each tensor, in order."""

Progress = Callable[[int, int], None]
"""Told the bytes moved so far, and the bytes of the whole transfer."""


class Context:
    """Owns what transfers need: page-locked memory, streams, bindings, options.

    Use it as a context manager, or call `close`. Threads may share one.

    Parameters
    ----------
    options
        How transfers are made.
    files, cuda, cufile, system
        What to make the foreign calls with; the defaults are the real ones. Tests hand in
        `headrace.testing.FaultyFiles`, `headrace.testing.FakeCuda` and
        `headrace.testing.FakeCuFile`.
    cufile_environment
        The ``CUFILE_*`` variables that tell where cuFile's settings are; `default` passes those
        of the process.
    observers
        Told of each `Report`; by default those of the process, which `headrace.trace` uses.
    """

    _process = -1

    def __init__(
        self,
        options: Options | None = None,
        *,
        files: Files | None = None,
        cuda: Cuda | None = None,
        cufile: CuFile | None = None,
        system: System | None = None,
        cufile_environment: Mapping[str, str] | None = None,
        observers: Observers | None = None,
    ) -> None:
        self.options = options or Options()
        self.observers = observers or process_observers()
        self.bindings = Bindings(
            files or PosixFiles(), system or Linux(), cuda, cufile, cufile_environment or {}
        )
        self._equipment = Equipment(self.bindings, self.options)
        self._warned: set[Rejection] = set()
        self._closed = False
        self._forget_parent()

    @classmethod
    def default(cls) -> Context:
        """The context of the module functions: default options, made at the first call."""
        return default_context()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for transfers under way, then release page-locked memory and streams.

        Safe to call again. A transfer asked for afterwards raises ValueError.

        Raises
        ------
        RuntimeError
            It is called from within a transfer (a progress callback), which it would wait for.
        """
        self._forget_parent()
        with self._changed:
            if threading.get_ident() in self._under_way.values():
                raise RuntimeError("close() within a transfer would wait for itself; call it after")
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way)
        self._equipment.close()

    def load_cuda(self) -> Cuda:
        """The CUDA bindings.

        Raises
        ------
        ImportError
            ``cuda.bindings`` is not installed.
        """
        return self._equipment.load_cuda()

    def gpu_fact(self, index: int = 0) -> Fact:
        """Whether a CUDA device can be used, how that is known, and what would change it."""
        return self._equipment.gpu_fact(index)

    def instruments(self) -> Instruments:
        """What `headrace.doctor` looks with: the bindings of this context."""
        return self._equipment.instruments()

    def transfer(
        self,
        want: Want,
        device: Device,
        allocate: Allocate,
        *,
        route: str = "auto",
        progress: Progress | None = None,
    ) -> Report:
        """Read what is wanted into memory that `allocate` makes.

        Parameters
        ----------
        want
            What to read.
        device
            Where to.
        allocate
            Called once, after the plan is made: buffers for the wanted tensors, in order.
        route
            A route, or "auto" for the best of each stretch.
        progress
            Called in this thread, about ten times a second.

        Raises
        ------
        RouteUnavailable, FormatError, ShortRead, SourceChanged, DeviceError, OSError, ValueError
            See `headrace.errors`; ValueError for a route that does not exist or a closed context.
        """
        forced = parse_route(route)
        watch = Stopwatch()
        with self._use(), contextlib.ExitStack() as stack:
            with watch.stage("open"):
                sources = stack.enter_context(open_sources(want.paths, self.bindings.files))
                wanted = select(want.describe(sources), want.names)
            with watch.stage("plan"):
                found, plan = self._plan(sources, wanted, device, forced)
                plan = self._prepare(plan, device)
            with watch.stage("allocate"):
                buffers = allocate(found.specs)
            try:
                with watch.stage("transfer"):
                    stats, plan = self._run(plan, found, buffers, device, progress, forced)
                with watch.stage("verify"):
                    for source in sources:
                        source.verify_unchanged()
            except SourceChanged:
                for source in sources:
                    self._equipment.forget_file(source.identity)
                raise
            held = (self._equipment.pinned_nbytes, self._equipment.mapped_nbytes)
        report = make_report(want.label, device, plan, stats, watch, held)
        self._publish(report, plan.downgrades)
        return report

    def explain(self, want: Want, device: Device, *, route: str = "auto") -> Explanation:
        """Say what `transfer` would do; reads headers and facts, no payload.

        Raises
        ------
        RouteUnavailable, FormatError, OSError, ValueError
            As `transfer`.
        """
        forced = parse_route(route)
        with self._use(), open_sources(want.paths, self.bindings.files) as sources:
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
        system, granule = self.bindings.system, self.options.block_nbytes
        found = survey(sources, wanted, system, probes, granule)
        return found, make_plan(found.files, device, self.options, forced)

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
        if self.options.strict:
            raise RouteUnavailable(f"strict=True forbids a downgrade: {rejection}")
        return plan.downgraded(rejection)

    def _run(
        self,
        plan: Plan,
        found: Survey,
        buffers: Sequence[Buffer],
        device: Device,
        progress: Progress | None,
        forced: Route | None,
    ) -> tuple[list[Stats], Plan]:
        """Let the engine of each route move its stretches, one engine after the other."""
        for transfer in plan.transfers:
            if transfer.keep_clean:
                found.sources[transfer.source].expect_random()
        stats: list[Stats] = []
        workers = choose_workers(self.options, found.machine, device, found.nbytes)
        alignments = [volume.alignment for volume in found.volumes]
        for route in dict.fromkeys(transfer.route for transfer in plan.transfers):
            before = sum(done.nbytes for done in stats)
            cargo = Cargo(
                transfers=[each for each in plan.transfers if each.route is route],
                sources=found.sources,
                buffers=buffers,
                workers=workers,
                block_nbytes=self.options.block_nbytes,
                on_progress=progress and _shifted(progress, before, found.nbytes),
            )
            try:
                engine = self._equipment.engine(route, device, alignments)
                stats.append(self._observe(engine, cargo))
            except RouteUnavailable as error:
                rejection = self._reject(route, error, forced)
                taken = _instead_of(route, found)
                plan = plan.rerouted(rejection, taken)
                engine = self._equipment.engine(taken, device, alignments)
                stats.append(self._observe(engine, cargo))
            for downgrade in stats[-1].downgrades:
                plan = plan.warned(downgrade)
        return stats, plan

    def _reject(self, route: Route, error: RouteUnavailable, forced: Route | None) -> Rejection:
        """Why a route could not serve after all; the error itself where no other may take over."""
        remedies = {
            Route.MAPPED: "raise the limit of locked memory (ulimit -l)",
            Route.GDS: "headrace doctor tells what cuFile lacks here",
        }
        if route not in remedies or forced is not None or self.options.strict:
            raise error
        why = str(error).removeprefix(f"route {str(route)!r} cannot serve: ")
        return Rejection(route, why, remedies[route])

    def _observe(self, engine: Engine, cargo: Cargo) -> Stats:
        """Run an engine, and add to its evidence what the kernel says of storage meanwhile."""
        before = storage_read_nbytes(self.bindings.system)
        stats = engine.run(cargo)
        after = storage_read_nbytes(self.bindings.system)
        if before is None or after is None:
            return stats
        read = format_nbytes(after - before)
        evidence = f"{stats.evidence}; block devices gave this process {read} meanwhile"
        return replace(stats, evidence=evidence)

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Keep the context open until a transfer has ended."""
        self._forget_parent()
        transfer = object()
        try:
            with self._changed:
                if self._closed:
                    raise ValueError("the context is closed; make a new one for further transfers")
                self._under_way[transfer] = threading.get_ident()
            yield
        finally:
            with self._changed:
                self._under_way.pop(transfer, None)
                self._changed.notify_all()

    def _forget_parent(self) -> None:
        """In a forked child: its parent's threads are not here to end their transfers."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._under_way: dict[object, int] = {}  # threads, by their transfers
            self._changed = threading.Condition()

    def _publish(self, report: Report, downgrades: tuple[Rejection, ...]) -> None:
        logger = logging.getLogger("headrace")
        for downgrade in downgrades:
            with self._changed:
                new = downgrade not in self._warned
                self._warned.add(downgrade)
            if new:
                logger.warning("%s: downgrade: %s", report.source, downgrade)
        logger.info("%s", report)
        self.observers.tell(report)


def default_context() -> Context:
    """The context of the module functions, made at the first call, with default options."""
    with _MAKING_DEFAULT:  # the cache alone would let threads that ask together make one each
        return _make_default_context()


_MAKING_DEFAULT = threading.Lock()


@functools.cache
def _make_default_context() -> Context:
    return Context(cufile_environment=read_cufile_environment())


def read_cufile_environment() -> dict[str, str]:
    """The ``CUFILE_*`` variables of the process, for `Context`."""
    return {name: os.environ[name] for name in os.environ if name.startswith("CUFILE_")}


def _instead_of(route: Route, found: Survey) -> Route:
    """What takes over from a route that could not serve after all."""
    opens_direct = all(volume.direct.holds is True for volume in found.volumes)
    return Route.DIRECT if route is Route.GDS and opens_direct else Route.CACHED


def _shifted(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    """Report an engine's progress as that of the whole transfer."""
    return lambda moved: progress(before + moved, total)


_NOT_LOOKED_FOR = Fact("CUDA device", None, "not looked for", "the destination is host memory")
_NO_GPU = GpuProbes(_NOT_LOOKED_FOR, _NOT_LOOKED_FOR, lambda _: _NOT_LOOKED_FOR)

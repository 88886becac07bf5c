"""Context: the only wiring. It owns drivers, pools, streams and observers, and closes them."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from headrace.bindings.cuda import Cuda, CudaRuntime
from headrace.bindings.posix import Files, PosixFiles
from headrace.bindings.sysfs import Linux, System
from headrace.engines.base import Cargo, Engine, Stats
from headrace.engines.cached import CachedEngine
from headrace.engines.direct import DirectEngine
from headrace.engines.host import HostEngine
from headrace.engines.ring import Ring
from headrace.errors import RouteUnavailable
from headrace.formats.catalog import TensorSpec
from headrace.memory.buffer import Buffer
from headrace.memory.pinned import PinnedPool
from headrace.observers import Observers, process_observers
from headrace.options import Options
from headrace.planning.effort import choose_workers
from headrace.planning.plan import Plan, Rejection
from headrace.planning.planner import make_plan
from headrace.probing.fact import Fact
from headrace.probing.gpu import probe_gpu
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
from headrace.survey import Survey, Want, open_sources, select, survey
from headrace.types import Device, Route

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
    files, cuda, system
        What to make the foreign calls with; the defaults are the real ones. Tests hand in
        `headrace.testing.FaultyFiles` and `headrace.testing.FakeCuda`.
    observers
        Told of each `Report`; by default those of the process, which `headrace.trace` uses.
    """

    def __init__(
        self,
        options: Options | None = None,
        *,
        files: Files | None = None,
        cuda: Cuda | None = None,
        system: System | None = None,
        observers: Observers | None = None,
    ) -> None:
        self.options = options or Options()
        self.observers = observers or process_observers()
        self._files = files or PosixFiles()
        self._system = system or Linux()
        self._cuda = cuda
        self._gpus: dict[int, Fact] = {}
        self._ring: Ring | None = None
        self._warned: set[Rejection] = set()
        self._under_way: list[int] = []  # threads that have transfers under way
        self._closed = False
        self._changed = threading.Condition()

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
        with self._changed:
            if threading.get_ident() in self._under_way:
                raise RuntimeError("close() within a transfer would wait for itself; call it after")
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way)
            ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def load_cuda(self) -> Cuda:
        """The CUDA bindings.

        Raises
        ------
        ImportError
            ``cuda.bindings`` is not installed.
        """
        with self._changed:
            if self._cuda is None:
                self._cuda = CudaRuntime()
            return self._cuda

    def gpu_fact(self, index: int = 0) -> Fact:
        """Whether a CUDA device can be used, how that is known, and what would change it."""
        if index not in self._gpus:
            self._gpus[index] = probe_gpu(self.load_cuda, index)
        return self._gpus[index]

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
                sources = stack.enter_context(open_sources(want.paths, self._files))
                wanted = select(want.describe(sources), want.names)
            with watch.stage("plan"):
                found, plan = self._plan(sources, wanted, device, forced)
                plan = self._prepare(plan, device)
            with watch.stage("allocate"):
                buffers = allocate(found.specs)
            with watch.stage("transfer"):
                stats = self._run(plan, found, buffers, device, progress)
            with watch.stage("verify"):
                for source in sources:
                    source.verify_unchanged()
            pinned = self._ring.pool.nbytes if self._ring else 0
        report = make_report(want.label, device, plan, stats, watch, pinned)
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
        with self._use(), open_sources(want.paths, self._files) as sources:
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
        gpu = _NO_GPU_WANTED if device.is_host else self.gpu_fact(device.index)
        found = survey(sources, wanted, self._system, gpu, self.options.block_nbytes)
        return found, make_plan(found.files, device, self.options, forced)

    def _prepare(self, plan: Plan, device: Device) -> Plan:
        """Get a first block of page-locked memory, while the plan can still change."""
        if device.is_host or not plan.transfers:
            return plan
        failure = self._borrow_ring().prepare(device.index)
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
    ) -> list[Stats]:
        """Let the engine of each route move its stretches, one engine after the other."""
        for transfer in plan.transfers:
            if transfer.keep_clean:
                found.sources[transfer.source].expect_random()
        stats: list[Stats] = []
        workers = choose_workers(self.options, found.machine, device, found.nbytes)
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
            stats.append(self._observe(self._engine(route, found, device), cargo))
        return stats

    def _observe(self, engine: Engine, cargo: Cargo) -> Stats:
        """Run an engine, and add to its evidence what the kernel says of storage meanwhile."""
        before = storage_read_nbytes(self._system)
        stats = engine.run(cargo)
        after = storage_read_nbytes(self._system)
        if before is None or after is None:
            return stats
        read = format_nbytes(after - before)
        evidence = f"{stats.evidence}; block devices gave this process {read} meanwhile"
        return replace(stats, evidence=evidence)

    def _engine(self, route: Route, found: Survey, device: Device) -> Engine:
        if route is Route.HOST:
            return HostEngine()
        ring = None if device.is_host else self._borrow_ring()
        if route is Route.DIRECT:
            return DirectEngine([volume.alignment for volume in found.volumes], ring)
        if route is Route.CACHED and ring is not None:
            return CachedEngine(ring)
        raise RouteUnavailable(f"no engine moves bytes to {device} by the route {route}")

    def _borrow_ring(self) -> Ring:
        cuda, options = self.load_cuda(), self.options
        with self._changed:
            if self._ring is None:
                pool = PinnedPool(cuda, options.block_nbytes, options.pinned_nbytes)
                self._ring = Ring(cuda, pool)
            return self._ring

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Keep the context open until a transfer has ended."""
        with self._changed:
            if self._closed:
                raise ValueError("the context is closed; make a new one for further transfers")
            self._under_way.append(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._under_way.remove(threading.get_ident())
                self._changed.notify_all()

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
    return Context()


def parse_route(route: str) -> Route | None:
    """Read a route's name; None for "auto".

    Raises
    ------
    ValueError
        No such route.
    """
    if route == "auto":
        return None
    try:
        return Route(route)
    except ValueError:
        names = ", ".join(["auto", *Route])
        raise ValueError(f"route {route!r} does not exist; choose one of {names}") from None


def _shifted(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    """Report an engine's progress as that of the whole transfer."""
    return lambda moved: progress(before + moved, total)


_NO_GPU_WANTED = Fact("CUDA device", None, "not looked for", "the destination is host memory")

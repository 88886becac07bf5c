"""What reads and writes share: probing the GPU, getting ready, and running the engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.bindings.posix import DirectAlignment
from headrace.engines.base import Cargo, Engine, OnMoved, Stats
from headrace.engines.lanes import Fence
from headrace.equipment import Equipment
from headrace.errors import RouteUnavailable
from headrace.memory.buffer import Buffer
from headrace.options import Options
from headrace.planning.effort import choose_workers
from headrace.planning.plan import Plan, Rejection, Transfer
from headrace.probing.fact import Fact
from headrace.probing.machine import MachineFacts
from headrace.probing.volume import VolumeFacts
from headrace.progress import Odometer, OnProgress
from headrace.storage.sink import Sink
from headrace.storage.source import Source
from headrace.survey import GpuProbes
from headrace.types import HOST, Device, Route

if TYPE_CHECKING:
    from headrace.engines.checksum import Digests

MakeEngine = Callable[[Route, Device, Sequence[DirectAlignment]], Engine]
"""Gives the engine of a route for memory of a device."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the engines of one transfer work with."""

    cargo: Cargo
    """Everything but the transfers: each engine gets those of its own."""
    volumes: Sequence[VolumeFacts]
    """The volume under each file."""
    forced: Route | None
    """The only route allowed."""
    make_engine: MakeEngine
    """Gives the engines."""


class Transfers:
    """Runs transfers with the equipment of a context.

    Parameters
    ----------
    equipment
        Its drivers and pools.
    options
        Its options.
    """

    def __init__(self, equipment: Equipment, options: Options) -> None:
        self._equipment = equipment
        self._options = options

    def digest(
        self,
        buffers: Sequence[Buffer],
        progress: OnProgress | None = None,
        fence: Fence | None = None,
    ) -> Digests:
        """Checksums of buffers; see `headrace.context.Context.digest`."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        machine = MachineFacts(self._equipment.bindings.system)
        on_progress = Odometer(progress, nbytes).of_leg(0) if progress else None
        with self._after(fence, buffers) as after:
            cargo = self._load_cargo(buffers, nbytes, machine, after, on_progress=on_progress)
            if any(buffer.device.is_host for buffer in buffers):
                self._equipment.wait_for(after)
            return self._equipment.digest(cargo)

    def _load_cargo(
        self,
        buffers: Sequence[Buffer],
        nbytes: int,
        machine: MachineFacts,
        fence: Fence,
        *,
        transfers: Sequence[Transfer] = (),
        sources: Sequence[Source] = (),
        sinks: Sequence[Sink] = (),
        stream: int | None = None,
        on_progress: OnMoved | None = None,
    ) -> Cargo:
        """What any engine needs to move so many bytes, by as many workers as those deserve."""
        return Cargo(
            transfers=transfers,
            sources=sources,
            buffers=buffers,
            workers=choose_workers(self._options, machine, first_gpu(buffers), nbytes),
            block_nbytes=self._options.block_nbytes,
            sinks=sinks,
            fence=fence,
            stream=stream,
            on_progress=on_progress,
        )

    def _probes(self, device: Device, forced: Route | None) -> GpuProbes:
        """What is known of a device, as far as it is a GPU."""
        if device.is_host:
            return _NO_GPU
        gpu = self._equipment.gpu_fact(device.index)
        if gpu.holds is not True:
            return GpuProbes(gpu, gpu, lambda _: gpu)
        equipment, is_forced = self._equipment, forced is Route.GDS
        profits = forced in (None, Route.MAPPED)  # no other route does from what is registered
        return GpuProbes(
            gpu,
            equipment.mapping_fact(device.index),
            lambda path: equipment.gds_fact(path, is_forced),
            equipment.is_registered if profits else lambda *_: False,
        )

    def _prepare(self, plan: Plan, devices: Iterable[Device]) -> Plan:
        """Get a first block of page-locked memory, while the plan can still change."""
        gpus = [device.index for device in devices if not device.is_host]
        if not plan.uses(Route.CACHED, Route.DIRECT):
            return plan
        failures = [self._equipment.prepare_ring(index) for index in gpus]
        failure = next(filter(None, failures), None)
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

    def _dispatch(
        self, plan: Plan, order: Order, progress: OnProgress | None
    ) -> tuple[list[Stats], Plan]:
        """Let the engine of each route and device move its part, one after the other."""
        stats: list[Stats] = []
        total = sum(transfer.nbytes for transfer in plan.transfers)
        odometer = Odometer(progress, total) if progress else None
        for (route, device), transfers in _by_engine(plan, order.cargo).items():
            before = sum(done.nbytes for done in stats)
            on_progress = odometer.of_leg(before) if odometer else None
            part = replace(order.cargo, transfers=transfers, on_progress=on_progress)
            try:
                stats.append(self._send(order, route, device, part))
            except RouteUnavailable as error:
                rejection = self._reject(route, error, order.forced)
                taken = _instead_of(route, order.volumes)
                plan = plan.rerouted(rejection, taken)
                stats.append(self._send(order, taken, device, part))
            for downgrade in stats[-1].downgrades:
                plan = plan.warned(downgrade)
            stats.extend(stats[-1].beside)
        if odometer and not total:
            odometer.of_leg(0)(0)  # no engine had anything to tell
        return stats, plan

    def _send(self, order: Order, route: Route, device: Device, part: Cargo) -> Stats:
        if device.is_host:  # the CPU moves the bytes, and it follows no stream
            self._equipment.wait_for(part.fence)
        alignments = [volume.alignment for volume in order.volumes]
        return self._engage(order.make_engine(route, device, alignments), part)

    @contextlib.contextmanager
    def _after(self, fence: Fence | None, buffers: Sequence[Buffer]) -> Iterator[Fence]:
        """The fence that was made when the transfer was asked for, or one of now."""
        if fence is not None:
            yield fence
            return
        with self._equipment.fence(buffers) as made:
            yield made

    def _engage(self, engine: Engine, cargo: Cargo) -> Stats:
        """Run one engine."""
        return engine.run(cargo)

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


def first_gpu(buffers: Iterable[Buffer]) -> Device:
    """The device of the first buffer that is on a GPU; the host where none is."""
    return next((each.device for each in buffers if not each.device.is_host), HOST)


def _by_engine(plan: Plan, cargo: Cargo) -> dict[tuple[Route, Device], list[Transfer]]:
    """Transfers of each route and device, in the order of their first ones."""
    found: dict[tuple[Route, Device], list[Transfer]] = {}
    for transfer in plan.transfers:
        device = cargo.buffers[transfer.pieces[0].buffer].device
        found.setdefault((transfer.route, device), []).append(transfer)
    return found


def _instead_of(route: Route, volumes: Sequence[VolumeFacts]) -> Route:
    """What takes over from a route that could not serve after all."""
    opens_direct = all(volume.direct.holds is True for volume in volumes)
    return Route.DIRECT if route is Route.GDS and opens_direct else Route.CACHED


_NOT_LOOKED_FOR = Fact("CUDA device", None, "not looked for", "the bytes stay in host memory")
_NO_GPU = GpuProbes(_NOT_LOOKED_FOR, _NOT_LOOKED_FOR, lambda _: _NOT_LOOKED_FOR)

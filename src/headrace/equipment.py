"""Equipment: the drivers, pools and sessions that one context's engines work with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from headrace.bindings.cuda import Cuda, CudaRuntime
from headrace.bindings.posix import DirectAlignment, Files, FileStatus, PosixFiles
from headrace.bindings.sysfs import Linux, System
from headrace.engines.base import Cargo, Engine
from headrace.engines.cached import CachedEngine, CachedWriter
from headrace.engines.direct import DirectEngine
from headrace.engines.host import HostEngine, HostWriter
from headrace.engines.lanes import Fence, Lanes
from headrace.engines.ring import Ring, Spill
from headrace.errors import RouteUnavailable
from headrace.memory.buffer import Buffer
from headrace.memory.pinned import PinnedPool
from headrace.options import Options
from headrace.probing.fact import Fact
from headrace.probing.gpu import probe_gpu
from headrace.types import ByteRange, Device, Route

if TYPE_CHECKING:
    from headrace.bindings.cufile import CuFile
    from headrace.engines.checksum import Digests
    from headrace.engines.gds_session import GdsLease, GdsSession
    from headrace.memory.mappings import Mappings
    from headrace.probing.examination import Instruments

# What only some machines and routes need is imported where it is needed: the first load of a
# process waits for every module.


@dataclass(frozen=True, slots=True)
class Bindings:
    """The foreign calls; what is None is the real one, loaded when it is first needed."""

    files: Files = field(default_factory=PosixFiles)
    """Calls on files."""
    system: System = field(default_factory=Linux)
    """Text files of the kernel."""
    cuda: Cuda | None = None
    """The CUDA runtime."""
    cufile: CuFile | None = None
    """NVIDIA's cuFile."""
    cufile_environment: Mapping[str, str] = field(default_factory=dict)
    """The ``CUFILE_*`` variables of the process."""


class Equipment:
    """Makes what an engine needs when it is first needed, keeps it, and releases it in `close`.

    Parameters
    ----------
    bindings
        The foreign calls.
    options
        Budgets.
    """

    def __init__(self, bindings: Bindings, options: Options) -> None:
        self.bindings = bindings
        self._options = options
        self._cuda = bindings.cuda
        self._gpus: dict[int, Fact] = {}
        self._mapping: dict[int, Fact] = {}
        self._lanes: Lanes | None = None
        self._ring: Ring | None = None
        self._mappings: Mappings | None = None
        self._session: GdsSession | None = None
        self._lease: GdsLease | None = None
        self._gds_way: Fact | None = None
        self._gds_volumes: dict[int, Fact] = {}
        self._lock = threading.RLock()

    def load_cuda(self) -> Cuda:
        """The CUDA bindings.

        Raises
        ------
        ImportError
            ``cuda.bindings`` is not installed.
        """
        if self._cuda is None:
            with self._lock:
                if self._cuda is None:
                    self._cuda = CudaRuntime()
        return self._cuda

    def gpu_fact(self, index: int) -> Fact:
        """Whether a CUDA device can be used."""
        if index not in self._gpus:
            self._gpus[index] = probe_gpu(self.load_cuda, index)
        return self._gpus[index]

    def mapping_fact(self, index: int) -> Fact:
        """Whether a CUDA device can read registered pages of a file."""
        if index not in self._mapping:
            from headrace.probing.devices import probe_attributes

            wanted = ("host registration", "read-only host registration")
            found = [f for f in probe_attributes(self.load_cuda, index) if f.name in wanted]
            against = [fact for fact in found if fact.holds is not True]
            self._mapping[index] = (against or found)[0]
        return self._mapping[index]

    def gds_fact(self, path: str, forced: bool) -> Fact:
        """Whether cuFile can serve a file: without the CPU or, where it is forced, at all.

        Only a forced route opens the driver; otherwise the doctor's facts decide.
        """
        if forced:
            return self._forced_gds_fact()
        if self._gds_way is None:
            self._gds_way = self._find_gds_way()
        if self._gds_way.holds is not True:
            return self._gds_way
        from headrace.probing.examination import examine

        volume = self.bindings.files.path_status(path).device
        if volume not in self._gds_volumes:
            verdicts = {each.route: each for each in examine(path, self.instruments()).routes}
            gds = verdicts[Route.GDS]
            self._gds_volumes[volume] = Fact(
                "GPUDirect Storage", gds.available, gds.why, "headrace doctor", gds.remedy
            )
        return self._gds_volumes[volume]

    def mark(self, buffers: Iterable[Buffer]) -> Fence:
        """Mark what is queued now on the streams of some buffers; `forget` it afterwards."""
        by_device: dict[int, set[int]] = {}
        for buffer in buffers:
            if buffer.stream is not None:
                by_device.setdefault(self._device_of(buffer), set()).add(buffer.stream)
        with contextlib.ExitStack() as undo:
            events: list[int] = []
            for device, streams in by_device.items():
                fence = self._borrow_lanes().fence(device, streams)
                undo.callback(self.forget, fence)
                events.extend(fence.events)
            undo.pop_all()
        return Fence(tuple(events))

    def forget(self, fence: Fence) -> None:
        """Give up the events of a fence."""
        if fence.events:
            self._borrow_lanes().forget(fence)

    def wait_for(self, fence: Fence) -> None:
        """Let the calling thread wait until the work before a fence is done."""
        for event in fence.events:
            self.load_cuda().synchronize_event(event)

    @contextlib.contextmanager
    def fence(self, buffers: Iterable[Buffer]) -> Iterator[Fence]:
        """Mark what is queued now, for the length of a block."""
        fence = self.mark(buffers)
        try:
            yield fence
        finally:
            self.forget(fence)

    def on_device(self, device: Device) -> AbstractContextManager[None]:
        """Make a GPU the calling thread's current device, for the length of a block."""
        return self._borrow_lanes().on_device(device.index)

    def drain(self, cargo: Cargo, spill: Spill) -> None:
        """Move a cargo from a GPU through the ring, to wherever `spill` takes it."""
        self._borrow_ring().drain(cargo, spill)

    def prepare_ring(self, device: int) -> str | None:
        """Get a first page-locked block; why there is none, or None when all is well."""
        return self._borrow_ring().prepare(device)

    def engine(self, route: Route, device: Device, alignments: Sequence[DirectAlignment]) -> Engine:
        """The engine of a route.

        Raises
        ------
        RouteUnavailable
            No engine serves that destination by that route.
        """
        if route is Route.HOST:
            return HostEngine()
        if route is Route.DIRECT:
            return DirectEngine(alignments, None if device.is_host else self._borrow_ring())
        if device.is_host:
            raise RouteUnavailable(f"no engine moves bytes to {device} by the route {route}")
        if route is Route.CACHED:
            return CachedEngine(self._borrow_ring())
        cuda, lanes = self.load_cuda(), self._borrow_lanes()
        if route is Route.MAPPED:
            from headrace.engines.mapped import MappedEngine

            return MappedEngine(cuda, lanes, self._borrow_mappings())
        from headrace.engines.gds import GdsEngine

        lease = self._borrow_lease()
        strict = self._options.strict
        return GdsEngine(
            lease.cufile, cuda, lanes, registrations=lease.registrations, strict=strict
        )

    def writer(
        self,
        route: Route,
        device: Device,
        alignments: Sequence[DirectAlignment],
        *,
        forced: bool = False,
    ) -> Engine:
        """The engine that writes files by a route; where that is forced, by no other beside it.

        Raises
        ------
        RouteUnavailable
            No engine writes from that device by that route.
        """
        if route is Route.HOST:
            return HostWriter()
        if route is Route.DIRECT:
            from headrace.engines.direct_writer import DirectWriter

            return DirectWriter(alignments, None if device.is_host else self._borrow_ring())
        if device.is_host:
            raise RouteUnavailable(f"no engine moves bytes from {device} by the route {route}")
        if route is Route.CACHED:
            return CachedWriter(self._borrow_ring())
        if route is Route.MAPPED:
            from headrace.engines.mapped_writer import MappedWriter

            cuda, lanes = self.load_cuda(), self._borrow_lanes()
            if forced:
                return MappedWriter(cuda, lanes)
            return MappedWriter(cuda, lanes, partial(self._ring_writer, device))
        from headrace.engines.gds_writer import GdsWriter

        lease = self._borrow_lease()
        return GdsWriter(
            self._borrow_ring(),
            lease.cufile,
            self.load_cuda(),
            self._borrow_lanes(),
            registrations=lease.registrations,
            strict=self._options.strict,
        )

    def digest(self, cargo: Cargo) -> Digests:
        """Checksums of a cargo's buffers, which may be on several devices.

        Raises
        ------
        ImportError
            ``xxhash`` is not installed.
        DeviceError
            The GPU refused.
        """
        from headrace.engines.checksum import digest

        gpus = {b.device.index for b in cargo.buffers if b.nbytes and not b.device.is_host}
        for gpu in gpus:
            self.prepare_ring(gpu)
        return digest(cargo, self._borrow_ring() if gpus else None)

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked bytes held now."""
        return self._ring.pool.nbytes if self._ring else 0

    @property
    def mapped_nbytes(self) -> int:
        """File bytes that stay registered now, and cannot be reclaimed."""
        return self._mappings.nbytes if self._mappings else 0

    def is_registered(self, identity: FileStatus, wanted: Sequence[ByteRange]) -> bool:
        """Whether all of some ranges of a file stay registered since an earlier transfer."""
        return self._mappings is not None and self._mappings.covers(identity, wanted)

    def forget_file(self, identity: FileStatus) -> None:
        """Release what is kept of a file that changed while it was read."""
        if self._mappings is not None:
            self._mappings.forget_file(identity)

    def close(self) -> None:
        """Release everything; nothing may be under way. Safe to call again."""
        with self._lock:
            owned = (self._lease, self._mappings, self._ring, self._lanes)
            self._lease = self._mappings = self._ring = self._lanes = None
        with contextlib.ExitStack() as stack:  # each, even when the driver fails for one
            for each in reversed(owned):
                if each is not None:
                    stack.callback(each.close)

    def instruments(self) -> Instruments:
        """What the doctor looks with."""
        from headrace.probing.examination import Instruments

        return Instruments(
            self.bindings.system,
            self.bindings.files,
            self.load_cuda,
            self.bindings.cufile_environment,
        )

    def _find_gds_way(self) -> Fact:
        """nvidia-fs or else P2PDMA; looked for once, since both need root and a new start."""
        from headrace.probing.cufile_config import probe_cufile_config
        from headrace.probing.devices import find_gpus
        from headrace.probing.gds import probe_nvidia_fs, probe_p2pdma

        system = self.bindings.system
        nvidia_fs = {fact.name: fact for fact in probe_nvidia_fs(system)}["nvidia-fs"]
        config = probe_cufile_config(system, self.bindings.cufile_environment)
        if nvidia_fs.holds is True or not config.uses_p2pdma:
            return nvidia_fs
        models = tuple(gpu.model for gpu in find_gpus(system) if gpu.model)
        p2pdma = probe_p2pdma(system, config, models)[0]
        return p2pdma if p2pdma.holds is True else nvidia_fs

    def _forced_gds_fact(self) -> Fact:
        try:
            self._borrow_lease()
        except RouteUnavailable as error:
            remedy = "headrace doctor tells what cuFile lacks here"
            found = str(error).removeprefix("route 'gds' cannot serve: ")
            return Fact("cuFile", False, found, "cuFileDriverOpen", remedy)
        return Fact("cuFile", True, "the driver is open", "cuFileDriverOpen")

    def _device_of(self, buffer: Buffer) -> int:
        """The device of a buffer's stream."""
        if buffer.device.is_host and buffer.stream is not None:
            return self.load_cuda().stream_device(buffer.stream)
        return buffer.device.index

    def _borrow_lanes(self) -> Lanes:
        lanes = self._lanes  # without the lock, which whoever opens cuFile holds for seconds
        if lanes is None:
            with self._lock:
                lanes = self._lanes = self._lanes or Lanes(self.load_cuda())
        return lanes

    def _ring_writer(self, device: Device) -> Engine | None:
        """What writes through the page cache; None where no memory can be page-locked for it."""
        unlocked = self.prepare_ring(device.index)
        return CachedWriter(self._borrow_ring()) if unlocked is None else None

    def _borrow_ring(self) -> Ring:
        options = self._options
        with self._lock:
            if self._ring is None:
                pool = PinnedPool(self.load_cuda(), options.block_nbytes, options.pinned_nbytes)
                self._ring = Ring(self.load_cuda(), self._borrow_lanes(), pool)
            return self._ring

    def _borrow_mappings(self) -> Mappings:
        budget = self._options.mapped_nbytes
        with self._lock:
            if self._mappings is None:
                from headrace.memory.mappings import Mappings

                self._mappings = Mappings(self.load_cuda(), self.bindings.files, budget)
            return self._mappings

    def _borrow_lease(self) -> GdsLease:
        from headrace.engines.gds_session import GdsSession, process_session

        with self._lock:
            if self._session is None:
                given = self.bindings.cufile
                self._session = process_session() if given is None else GdsSession(given)
            reason = self._session.refusal()
            if reason is not None:  # also with a lease in hand: it may come from before a fork
                raise RouteUnavailable(f"route 'gds' cannot serve: {reason}")
            if self._lease is None:
                self._lease = self._session.lease()
            return self._lease

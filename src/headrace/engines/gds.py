"""GDS engine: cuFile reads straight into memory of the GPU, by whatever way it finds.

Which way that was, only its statistics tell: where nvidia-fs and P2PDMA are absent, it goes
through host memory and says nothing.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from headrace.bindings.cuda import Cuda
from headrace.bindings.cufile import CuFile
from headrace.bindings.cufile_values import Counters, Kind
from headrace.engines.base import Cargo, Jobs, Stats, Tally, run_workers, total
from headrace.engines.lanes import Fence, Lanes
from headrace.errors import DeviceError, RouteUnavailable, ShortRead
from headrace.memory.alignment import align_up
from headrace.memory.buffer import Buffer
from headrace.memory.registrations import Registrations
from headrace.options import PAGE_NBYTES
from headrace.planning.plan import Piece, Rejection
from headrace.storage.open_file import OpenFile
from headrace.storage.source import Source
from headrace.types import Route

REQUEST_NBYTES = 16 << 20
"""Most bytes that cuFile asks of the driver at a time (1.20); larger reads are cut there."""

REGISTER_NBYTES = 1 << 20
"""Buffers below this go through cuFile's bounce buffers, which are as large."""

COMPATIBILITY = "gds (cuFile compatibility mode)"
"""What the report calls the route where cuFile went through host memory."""

PARTLY = "gds (partly in cuFile compatibility mode)"
"""The same, where it did so with some of its reads or writes."""


class GdsTransfer(ABC):
    """What reads and writes through cuFile share: handles, registrations, and the truth.

    Made anew for each transfer, since it says afterwards how that one went.

    Parameters
    ----------
    cufile
        The calls to make; its driver is open.
    cuda, lanes
        For ordering them after work on the buffers' streams.
    registrations
        Where buffers are registered for direct transfers; None takes them as they are.
    strict
        Raise, where a buffer cannot be registered or cuFile did not go directly.
    request_nbytes
        Most bytes of one request, if `Cargo.block_nbytes` is not more.

    Attributes
    ----------
    mode : str
        After `run`: what the report calls the route; "" for its own name.
    downgrades : list[Rejection]
        After `run`: what did not go as the route promises, and what would change it.
    """

    route = Route.GDS
    kind: ClassVar[Kind]
    """What the statistics call it."""

    def __init__(
        self,
        cufile: CuFile,
        cuda: Cuda,
        lanes: Lanes,
        *,
        registrations: Registrations | None = None,
        strict: bool = False,
        request_nbytes: int = REQUEST_NBYTES,
    ) -> None:
        self.mode = ""
        self.downgrades: list[Rejection] = []
        self._unregistered = registrations is None
        self._cufile = cufile
        self._cuda = cuda
        self._lanes = lanes
        self._registrations = registrations
        self._strict = strict
        self._request_nbytes = request_nbytes

    @property
    def compatibility(self) -> bool:
        """After `run`: whether cuFile served bytes through host memory."""
        return bool(self.mode)

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`.

        Raises
        ------
        RouteUnavailable
            `strict`, and it did not go directly.
        """
        cargo = replace(cargo, block_nbytes=self._block_nbytes(cargo))
        before = self._cufile.read_counters()
        with contextlib.ExitStack() as stack:
            handles = stack.enter_context(self._handles(cargo))
            self._wait_for_fence(cargo.fence)
            for buffer in self._worth_registering(cargo, before):
                stack.enter_context(self._registered(buffer))
            tallies = self._move_all(cargo, handles)
        after = self._cufile.read_counters()
        evidence = self._judge(before, after)
        unaligned = any(tally.unaligned_nbytes for tally in tallies)
        stats = total(self.route, tallies, evidence, self._bounce(unaligned))
        return replace(stats, mode=self.mode, downgrades=tuple(self.downgrades))

    def _move_all(self, cargo: Cargo, handles: Mapping[int, int]) -> list[Tally]:
        device = cargo.device.index

        def work(jobs: Jobs, tally: Tally) -> None:
            with self._lanes.on_device(device):
                while (job := jobs.take()) is not None:
                    began = time.perf_counter()
                    for piece in job.pieces():
                        self._move(cargo, handles, job.transfer.source, piece)
                        tally.moved_nbytes += piece.nbytes
                        tally.unaligned_nbytes += self._unaligned_nbytes(piece, cargo.buffers)
                    tally.file_seconds += time.perf_counter() - began

        return run_workers(work, cargo)

    @abstractmethod
    def _move(self, cargo: Cargo, handles: Mapping[int, int], index: int, piece: Piece) -> None:
        """Move one piece of one file until it is whole."""

    @abstractmethod
    def _file(self, cargo: Cargo, index: int) -> OpenFile:
        """One of the files, which are open with O_DIRECT where they can be: cuFile prefers that."""

    @abstractmethod
    def _unaligned_nbytes(self, piece: Piece, buffers: Sequence[Buffer]) -> int:
        """Bytes of a piece that cuFile cannot move as they are."""

    def _bounce(self, unaligned: bool) -> str:
        """What bytes bounced through; cuFile takes nothing unaligned straight."""
        bounced = self.compatibility or self._unregistered or unaligned
        return "cuFile's own buffers" if bounced else ""

    def _block_nbytes(self, cargo: Cargo) -> int:
        """Bytes of one request: large, but with something to do for every worker."""
        share = align_up(-(-cargo.nbytes // cargo.workers), cargo.block_nbytes)
        return max(cargo.block_nbytes, min(self._request_nbytes, share))

    @contextlib.contextmanager
    def _handles(self, cargo: Cargo) -> Iterator[dict[int, int]]:
        """Register each file of the cargo once, and forget it afterwards."""
        with contextlib.ExitStack() as stack:
            handles = {}
            for index in dict.fromkeys(transfer.source for transfer in cargo.transfers):
                file = self._file(cargo, index)
                handles[index] = self._register(
                    file.fd if file.direct_fd is None else file.direct_fd
                )
                stack.callback(self._cufile.deregister_handle, handles[index])
            yield handles

    def _register(self, fd: int) -> int:
        """Register a file; nothing was moved yet where that fails, and another route may serve."""
        try:
            return self._cufile.register_handle(fd)
        except DeviceError as error:
            raise RouteUnavailable(f"route 'gds' cannot serve: {error}") from error

    def _wait_for_fence(self, fence: Fence) -> None:
        """Let work end that was queued before and may use the buffers: cuFile knows no stream."""
        for event in fence.events:
            self._cuda.synchronize_event(event)

    def _worth_registering(self, cargo: Cargo, before: Counters | None) -> list[Buffer]:
        """Large buffers, unless this process went through host memory alone so far."""
        if self._registrations is None or (before and before.compatibility(self.kind)):
            return []
        used = {p.buffer for transfer in cargo.transfers for p in transfer.pieces}
        buffers = [cargo.buffers[index] for index in sorted(used)]
        self._unregistered |= any(buffer.nbytes < REGISTER_NBYTES for buffer in buffers)
        return [buffer for buffer in buffers if buffer.nbytes >= REGISTER_NBYTES]

    @contextlib.contextmanager
    def _registered(self, buffer: Buffer) -> Iterator[None]:
        """Have a buffer registered; say so where there was no room for it on the GPU."""
        registrations = self._registrations
        if registrations is None:
            yield
            return
        owner = buffer.owner[0] if isinstance(buffer.owner, tuple) else buffer.owner
        with contextlib.ExitStack() as stack:
            try:
                held = stack.enter_context(
                    registrations.borrow(buffer.pointer, buffer.nbytes, owner)
                )
            except DeviceError as error:
                raise RouteUnavailable(f"route 'gds' cannot serve: {error}") from error
            self._unregistered |= not held
            if not held and registrations.failure is not None:
                self._downgrade(
                    f"buffers are not registered, so cuFile bounces: {registrations.failure}",
                    "register less, or free the GPU's BAR1",
                )
            yield

    def _judge(self, before: Counters | None, after: Counters | None) -> str:
        """Say from the difference of two counts which way the bytes went."""
        if before is None or after is None:
            return f"{self.kind} of cuFile; nobody counts which way they go"
        done = after - before
        told = f"{done.describe(self.kind)} of the whole process meanwhile"
        if not done.by_way(self.kind).get("posix"):
            return told
        self.mode = COMPATIBILITY if done.compatibility(self.kind) else PARTLY
        self._downgrade(
            f"{self.mode}: it went through host memory",
            "headrace doctor tells what nvidia-fs or P2PDMA lack here",
        )
        return f"{self.mode}; {told}"

    def _downgrade(self, why: str, remedy: str) -> None:
        rejection = Rejection(self.route, why, remedy)
        if self._strict:
            raise RouteUnavailable(f"strict=True forbids a downgrade: {rejection}")
        if rejection not in self.downgrades:
            self.downgrades.append(rejection)


class GdsEngine(GdsTransfer):
    """`Engine` for destinations on a GPU, through cuFile."""

    kind = "reads"

    def _move(self, cargo: Cargo, handles: Mapping[int, int], index: int, piece: Piece) -> None:
        """Read one piece, going on after short counts until it is whole."""
        handle, source = handles[index], cargo.sources[index]
        buffer, done = cargo.buffers[piece.buffer], 0
        while done < piece.nbytes:
            place = piece.buffer_offset + done
            try:
                count = self._cufile.read(
                    handle, buffer.pointer, piece.nbytes - done, piece.file_offset + done, place
                )
            except InterruptedError:
                continue
            except OSError as error:
                error.filename = source.path
                raise
            if count == 0:
                source.verify_unchanged()  # a file that was truncated explains it
                raise _ended(source, piece, done)
            done += count

    def _file(self, cargo: Cargo, index: int) -> OpenFile:
        return cargo.sources[index]

    def _unaligned_nbytes(self, piece: Piece, buffers: Sequence[Buffer]) -> int:
        address = buffers[piece.buffer].pointer + piece.buffer_offset
        return piece.nbytes if (piece.file_offset | piece.nbytes | address) % PAGE_NBYTES else 0


def _ended(source: Source, piece: Piece, done: int) -> ShortRead:
    return ShortRead(
        f"{source.path}: cuFileRead found the end of the file at byte {piece.file_offset + done}, "
        f"but bytes up to {piece.file_stop} were wanted; ask for fewer bytes, or check that the "
        "file is whole"
    )

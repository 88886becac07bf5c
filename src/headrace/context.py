"""Context: the only wiring. It owns drivers, pools, streams and observers, and closes them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.bindings.cuda import Cuda
from headrace.bindings.posix import Files, PosixFiles
from headrace.bindings.sysfs import Linux, System
from headrace.engines.lanes import Fence
from headrace.equipment import Bindings, Equipment
from headrace.futures import TransferFuture
from headrace.memory.buffer import Buffer
from headrace.observers import Observers, Publisher, process_observers
from headrace.options import Options
from headrace.planning.route import parse_route
from headrace.probing.fact import Fact
from headrace.probing.gpu import find_pointer_device
from headrace.progress import OnProgress
from headrace.read_transfers import Allocate, ReadTransfers
from headrace.report import Explanation, Report, Snapshot
from headrace.survey import PathLike, Want, absolute
from headrace.types import Device
from headrace.usage import Usage

if TYPE_CHECKING:
    from headrace.bindings.cufile import CuFile
    from headrace.probing.examination import Instruments
    from headrace.requests import Request
    from headrace.snapshots import Spare
    from headrace.write_transfers import Delivery

# What loads do not need is imported where it is needed: the first one waits for every module.


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
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options is {options!r}; pass a headrace.Options")
        self.options = options or Options()
        self.observers = observers or process_observers()
        self.bindings = Bindings(
            files or PosixFiles(), system or Linux(), cuda, cufile, cufile_environment or {}
        )
        self._equipment = Equipment(self.bindings, self.options)
        self._reads = ReadTransfers(self._equipment, self.options)
        self._publisher = Publisher(self.observers)
        self._usage = Usage()

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
        """Wait for transfers, submitted ones too, then release page-locked memory and streams.

        Safe to call again. A transfer asked for afterwards raises ValueError.

        Raises
        ------
        RuntimeError
            It is called from within a transfer (a progress callback), which it would wait for.
        """
        self._usage.close()
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
        progress: OnProgress | None = None,
        fence: Fence | None = None,
        stream: int | None = None,
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
        fence
            What to come after; None for what is queued on the buffers' streams now.
        stream
            CUDA stream that copies may be left under way on.

        Raises
        ------
        RouteUnavailable, FormatError, ShortRead, SourceChanged, DeviceError, OSError, ValueError
            See `headrace.errors`; ValueError for a route that does not exist or a closed context.
        """
        forced = parse_route(route)
        with self._usage.transfer():
            done = self._reads.run(want, device, allocate, forced, progress, fence, stream)
        return self._publisher.publish(*done)

    def deliver(
        self, delivery: Delivery, *, route: str = "auto", progress: OnProgress | None = None
    ) -> Report:
        """Write buffers into files that are open.

        Parameters
        ----------
        delivery
            What to write, and where.
        route
            A route, or "auto" for the best of each device.
        progress
            Called in this thread, about ten times a second.

        Raises
        ------
        RouteUnavailable, DeviceError, OSError, ValueError
            See `headrace.errors`; ValueError for a route that does not exist or a closed context.
        """
        from headrace.write_transfers import WriteTransfers

        forced = parse_route(route)
        with self._usage.transfer():
            done = WriteTransfers(self._equipment, self.options).run(delivery, forced, progress)
        return self._publisher.publish(*done)

    @property
    def request(self) -> Callable[..., Request]:
        """Checks what one buffer and one stretch of a file ask for: `make_request`."""
        from headrace.requests import make_request

        load_cuda = self._equipment.load_cuda
        find = functools.partial(find_pointer_device, load_cuda)
        return functools.partial(make_request, load_cuda=load_cuda, pointer_device=find)

    def read(self, request: Request, *, route: str = "auto", fence: Fence | None = None) -> Report:
        """Read a stretch of a file into a buffer; see `headrace.read_into`."""
        want, buffer = request.want(), request.buffer
        stream = request.stream if fence is None else None  # what was submitted is waited for
        return self.transfer(
            want, buffer.device, lambda _: (buffer,), route=route, fence=fence, stream=stream
        )

    def write(
        self,
        request: Request,
        *,
        route: str = "auto",
        progress: OnProgress | None = None,
        fence: Fence | None = None,
    ) -> Report:
        """Write a buffer into a stretch of a file; see `headrace.write_from`."""
        parse_route(route)  # before a file is made
        with request.delivery(self.bindings.files, fence) as delivery:
            return self.deliver(delivery, route=route, progress=progress)

    def snapshot(
        self, buffers: Sequence[Buffer], spare: Spare, *, wait: bool
    ) -> tuple[list[Buffer], Snapshot]:
        """Copy buffers as they are now; see `headrace.snapshots.SnapshotTransfers.run`."""
        from headrace.snapshots import SnapshotTransfers

        with self._usage.transfer():
            return SnapshotTransfers(self._equipment, self.options).run(buffers, spare, wait=wait)

    def submit_read(
        self,
        buffer: Any,
        path: PathLike,
        *,
        file_offset: int = 0,
        nbytes: int | None = None,
        route: str = "auto",
        stream: Any = None,
    ) -> TransferFuture:
        """Read into a buffer while the caller goes on; parameters as for `headrace.read_into`.

        The read comes after what is queued on `stream`, or on the producer's current one, now. Once
        `TransferFuture.result` has returned, the bytes are there for every stream: the caller's own
        stream is never held until then. The buffer must not be used before.

        Raises
        ------
        BufferMismatch, TypeError, ValueError
            As `headrace.read_into`; what happens to the file is told by the future.
        """
        request = self.request(
            "submit_read",
            buffer,
            absolute(path),
            file_offset=file_offset,
            nbytes=nbytes,
            stream=stream,
        )
        parse_route(route)
        run = functools.partial(self.read, request, route=route)
        return self.submit(run, request.path, (request.buffer,))

    def submit_write(
        self,
        buffer: Any,
        path: PathLike,
        *,
        file_offset: int = 0,
        nbytes: int | None = None,
        route: str = "auto",
        stream: Any = None,
    ) -> TransferFuture:
        """Write a buffer while the caller goes on; parameters as for `headrace.write_from`.

        The write comes after what is queued on `stream`, or on the producer's current one, now. The
        buffer must not be changed before `TransferFuture.result` has returned.

        Raises
        ------
        BufferMismatch, TypeError, ValueError
            As `headrace.write_from`; what happens to the file is told by the future.
        """
        request = self.request(
            "submit_write",
            buffer,
            absolute(path),
            file_offset=file_offset,
            nbytes=nbytes,
            stream=stream,
            writable=False,
        )
        parse_route(route)
        run = functools.partial(self.write, request, route=route)
        return self.submit(run, request.path, (request.buffer,))

    def submit(
        self,
        run: Callable[..., Report],
        label: str,
        buffers: Sequence[Buffer],
        turn: str | None = None,
    ) -> TransferFuture:
        """Let a thread of this context make a transfer.

        Parameters
        ----------
        run
            Makes it, after the ``fence`` that it is given: what is queued on the buffers' streams
            now.
            No function with a closure: the traceback of an error would keep that, buffers and all.
        label
            What reports call it.
        buffers
            What it reads or writes; `run` keeps them alive.
        turn
            Those of one turn are made in the order of submission.

        Raises
        ------
        ValueError
            The context is closed.
        """
        fence = self._equipment.mark(buffers)
        forget = functools.partial(self._equipment.forget, fence)
        return self._usage.submit(functools.partial(run, fence=fence), label, forget, turn)

    def digest(
        self,
        buffers: Sequence[Buffer],
        *,
        progress: OnProgress | None = None,
        fence: Fence | None = None,
    ) -> tuple[str, ...]:
        """XXH3-64 of buffers on any devices, in 16 hexadecimal digits each, without a copy of them.

        It comes after `fence`, or after what is queued on the buffers' streams now.

        Raises
        ------
        ImportError, DeviceError, ValueError
            ``xxhash`` is not installed; the GPU refused; the context is closed.
        """
        with self._usage.transfer():
            return self._reads.digest(buffers, progress, fence).by_buffer

    def explain(self, want: Want, device: Device, *, route: str = "auto") -> Explanation:
        """Say what `transfer` would do; reads headers and facts, no payload.

        Raises
        ------
        RouteUnavailable, FormatError, OSError, ValueError
            As `transfer`.
        """
        with self._usage.transfer():
            return self._reads.explain(want, device, parse_route(route))


def choose_context(context: Context | None) -> Context:
    """The context that a caller gave, or else the default one.

    Raises
    ------
    TypeError
        It is something else.
    """
    if context is None:
        return default_context()
    if not isinstance(context, Context):
        raise TypeError(f"context is {context!r}; pass a headrace.Context, which takes options=")
    return context


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

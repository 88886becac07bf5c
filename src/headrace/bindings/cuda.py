"""CUDA: the Protocol of the calls that headrace makes, and the real one over ``cuda.bindings``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.errors import DeviceError

LEGACY_STREAM = 1
"""``cudaStreamLegacy``: the default stream, which waits for every blocking stream."""

PER_THREAD_STREAM = 2
"""``cudaStreamPerThread``: the default stream of the thread that makes the call."""

DEFAULT_STREAMS = (0, LEGACY_STREAM, PER_THREAD_STREAM)
"""Handles that mean a stream of the thread's current device; 0 is the legacy stream."""

Copy = tuple[int, int, int]
"""Destination address, source address, bytes."""

_BATCH_COPIES = 4
# From a few copies on, one batch beats a loop: 24.6 against 7.0 GB/s for blocks of 64 KiB pieces
# (16 threads, benchmarks/results).
_BATCH_VERSION = 13000  # before CUDA 13 cudaMemcpyBatchAsync has another signature


class Cuda(Protocol):
    """The CUDA runtime, with pointers, streams and events as integers.

    `headrace.testing.FakeCuda` implements it without a GPU, and holds every copy back until
    something waits for it.
    """

    def device_count(self) -> int:
        """Devices that this process sees."""

    def device_attribute(self, name: str, device: int) -> int:
        """Value of an attribute: a name of ``cudaDeviceAttr``, or of ``CUdevice_attribute``.

        Makes no context on the device. `DeviceError` for an attribute that CUDA does not know.
        """

    def current_device(self) -> int:
        """Ordinal of the calling thread's device."""

    def set_device(self, device: int) -> None:
        """Make `device` the calling thread's device."""

    def pointer_device(self, pointer: int) -> int | None:
        """Ordinal of the device that owns `pointer`; None for host memory."""

    def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        """Page-lock host memory that the caller owns, for every device; whole pages.

        `read_only` is for memory that the process itself may only read, such as a mapped file.
        """

    def unregister_host(self, pointer: int) -> None:
        """Undo `register_host`; no copy may be under way."""

    def create_stream(self) -> int:
        """Create a non-blocking stream on the calling thread's device."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream."""

    def synchronize_stream(self, stream: int) -> None:
        """Wait for all work on the stream, spinning: for waits that are short."""

    def stream_device(self, stream: int) -> int:
        """Ordinal of the stream's device; that of the calling thread for `DEFAULT_STREAMS`.

        The stream must exist: CUDA may crash on other handles.
        """

    def create_event(self) -> int:
        """Create an event without timing on the calling thread's device."""

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""

    def record_event(self, event: int, stream: int) -> None:
        """Record the event after the work that is on the stream now."""

    def synchronize_event(self, event: int) -> None:
        """Sleep until the event's last record has happened."""

    def event_is_done(self, event: int) -> bool:
        """Whether the event's last record has happened; True if there is none. Does not wait."""

    def wait_event(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event; does not block the host."""

    def copy_to_device(self, copies: Sequence[Copy], stream: int) -> None:
        """Enqueue copies from host memory, in any order among themselves.

        The sources must stay unchanged until the copies are done.
        """

    def copy_to_host(self, copies: Sequence[Copy], stream: int) -> None:
        """Enqueue copies from device memory to host memory, in any order among themselves.

        The destinations hold the bytes once something has waited for the copies. They ought to be
        page-locked: a copy to other memory blocks the whole interpreter until it is done.
        """

    def copy_on_device(self, copies: Sequence[Copy], stream: int) -> None:
        """Enqueue copies within the memory of one device, in any order among themselves."""

    def free_memory(self, device: int) -> int:
        """Bytes of the device's memory that nobody holds now; makes a context on the device."""


class CudaRuntime:
    """`Cuda` over ``cuda.bindings.runtime``, and the driver for the calls made most often.

    A worker makes three calls for each block: it reads, it enqueues a copy, it waits for an older
    copy. The bindings release the interpreter lock in each, and a dozen workers that hand it to
    each other lose a sixth of the link (44 against 51 GB/s). Enqueueing takes 2 microseconds, and
    the older copy is mostly done: both are therefore called without releasing the lock.

    Raises
    ------
    ImportError
        ``cuda.bindings`` is not installed (extras ``cuda12`` and ``cuda13`` bring it).
    """

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime: Any = runtime
        self._success = runtime.cudaError_t.cudaSuccess
        self._batch_attributes = _make_batch_attributes(runtime)
        self._driver = driver = _load_driver()
        kinds = runtime.cudaMemcpyKind
        self._to_device = _Direction(
            kinds.cudaMemcpyHostToDevice, driver and driver.cuMemcpyHtoDAsync_v2
        )
        self._to_host = _Direction(
            kinds.cudaMemcpyDeviceToHost, driver and driver.cuMemcpyDtoHAsync_v2
        )
        self._on_device = _Direction(
            kinds.cudaMemcpyDeviceToDevice, driver and driver.cuMemcpyDtoDAsync_v2
        )

    def device_count(self) -> int:
        """See `Cuda.device_count`."""
        try:
            answer = self._runtime.cudaGetDeviceCount()
        except RuntimeError as error:  # the binding found no driver library to load
            raise DeviceError(f"cudaGetDeviceCount failed: {error}") from error
        if answer[0] == self._runtime.cudaError_t.cudaErrorNoDevice:
            return 0
        return int(self._check("cudaGetDeviceCount", answer))

    def device_attribute(self, name: str, device: int) -> int:
        """See `Cuda.device_attribute`."""
        if name.startswith("CU_"):
            return self._driver_attribute(name, device)
        attribute = getattr(self._runtime.cudaDeviceAttr, name, None)
        if attribute is None:
            raise DeviceError(f"cudaDeviceGetAttribute: this cuda.bindings has no {name}")
        answer = self._runtime.cudaDeviceGetAttribute(attribute, device)
        return int(self._check("cudaDeviceGetAttribute", answer))

    def _driver_attribute(self, name: str, device: int) -> int:
        """Value of an attribute that the driver has and the runtime has not."""
        from cuda.bindings import driver

        attribute = getattr(driver.CUdevice_attribute, name, None)
        if attribute is None:
            raise DeviceError(f"cuDeviceGetAttribute: this cuda.bindings has no {name}")
        self.device_count()  # the runtime initialises the driver
        answer = driver.cuDeviceGetAttribute(attribute, device)
        return int(_check_driver("cuDeviceGetAttribute", answer))

    def current_device(self) -> int:
        """See `Cuda.current_device`."""
        return int(self._check("cudaGetDevice", self._runtime.cudaGetDevice()))

    def set_device(self, device: int) -> None:
        """See `Cuda.set_device`."""
        self._check("cudaSetDevice", self._runtime.cudaSetDevice(device))

    def pointer_device(self, pointer: int) -> int | None:
        """See `Cuda.pointer_device`."""
        attributes = self._check(
            "cudaPointerGetAttributes", self._runtime.cudaPointerGetAttributes(pointer)
        )
        kinds = self._runtime.cudaMemoryType
        on_device = (kinds.cudaMemoryTypeDevice, kinds.cudaMemoryTypeManaged)
        return int(attributes.device) if attributes.type in on_device else None

    def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        """See `Cuda.register_host`."""
        flags = self._runtime.cudaHostRegisterPortable
        if read_only:
            flags |= self._runtime.cudaHostRegisterReadOnly
        self._check("cudaHostRegister", self._runtime.cudaHostRegister(pointer, nbytes, flags))

    def unregister_host(self, pointer: int) -> None:
        """See `Cuda.unregister_host`."""
        self._check("cudaHostUnregister", self._runtime.cudaHostUnregister(pointer))

    def create_stream(self) -> int:
        """See `Cuda.create_stream`."""
        flags = self._runtime.cudaStreamNonBlocking
        created = self._runtime.cudaStreamCreateWithFlags(flags)
        return int(self._check("cudaStreamCreateWithFlags", created))

    def destroy_stream(self, stream: int) -> None:
        """See `Cuda.destroy_stream`."""
        self._check("cudaStreamDestroy", self._runtime.cudaStreamDestroy(stream))

    def synchronize_stream(self, stream: int) -> None:
        """See `Cuda.synchronize_stream`."""
        if self._driver is not None and self._driver.cuStreamQuery(stream) == 0:
            return
        self._check("cudaStreamSynchronize", self._runtime.cudaStreamSynchronize(stream))

    def stream_device(self, stream: int) -> int:
        """See `Cuda.stream_device`."""
        if stream in DEFAULT_STREAMS:
            return self.current_device()
        from cuda.bindings import driver

        # The runtime's own call for it needs a driver of CUDA 12.8; these are as old as contexts.
        self.device_count()  # the runtime initialises the driver
        context = _check_driver("cuStreamGetCtx", driver.cuStreamGetCtx(stream))
        _check_driver("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))
        try:
            return int(_check_driver("cuCtxGetDevice", driver.cuCtxGetDevice()))
        finally:
            _check_driver("cuCtxPopCurrent", driver.cuCtxPopCurrent())

    def create_event(self) -> int:
        """See `Cuda.create_event`."""
        # A thread that waits for it sleeps: a wait of a tenth of a second would else burn one CPU.
        flags = self._runtime.cudaEventDisableTiming | self._runtime.cudaEventBlockingSync
        created = self._runtime.cudaEventCreateWithFlags(flags)
        return int(self._check("cudaEventCreateWithFlags", created))

    def destroy_event(self, event: int) -> None:
        """See `Cuda.destroy_event`."""
        self._check("cudaEventDestroy", self._runtime.cudaEventDestroy(event))

    def record_event(self, event: int, stream: int) -> None:
        """See `Cuda.record_event`."""
        self._check("cudaEventRecord", self._runtime.cudaEventRecord(event, stream))

    def synchronize_event(self, event: int) -> None:
        """See `Cuda.synchronize_event`."""
        self._check("cudaEventSynchronize", self._runtime.cudaEventSynchronize(event))

    def event_is_done(self, event: int) -> bool:
        """See `Cuda.event_is_done`."""
        answer = self._runtime.cudaEventQuery(event)
        if answer[0] == self._runtime.cudaError_t.cudaErrorNotReady:
            return False
        self._check("cudaEventQuery", answer)
        return True

    def wait_event(self, stream: int, event: int) -> None:
        """See `Cuda.wait_event`."""
        self._check("cudaStreamWaitEvent", self._runtime.cudaStreamWaitEvent(stream, event, 0))

    def copy_to_device(self, copies: Sequence[Copy], stream: int) -> None:
        """See `Cuda.copy_to_device`; many small copies go as one batch where CUDA has that."""
        self._copy(copies, stream, self._to_device)

    def copy_to_host(self, copies: Sequence[Copy], stream: int) -> None:
        """See `Cuda.copy_to_host`; in batches as `copy_to_device`."""
        self._copy(copies, stream, self._to_host)

    def copy_on_device(self, copies: Sequence[Copy], stream: int) -> None:
        """See `Cuda.copy_on_device`; in batches as `copy_to_device`."""
        self._copy(copies, stream, self._on_device)

    def free_memory(self, device: int) -> int:
        """See `Cuda.free_memory`."""
        before = self.current_device()
        self.set_device(device)
        try:
            return int(self._check("cudaMemGetInfo", self._runtime.cudaMemGetInfo()))
        finally:
            self.set_device(before)

    def _copy(self, copies: Sequence[Copy], stream: int, direction: _Direction) -> None:
        if len(copies) < _BATCH_COPIES or not self._takes_batches(stream):
            fast = direction.driver_call
            for copy in copies:
                # Without a driver, or where its call failed: the runtime's gives the error a name.
                if fast is None or fast(*copy, stream):
                    self._copy_by_runtime(*copy, stream, direction)
            return
        destinations, sources, lengths = (list(column) for column in zip(*copies, strict=True))
        answer = self._runtime.cudaMemcpyBatchAsync(
            destinations, sources, lengths, len(copies), [self._batch_attributes], [0], 1, stream
        )
        self._check("cudaMemcpyBatchAsync", answer)

    def _takes_batches(self, stream: int) -> bool:
        """Whether CUDA takes batches at all, and here: it takes none on the legacy stream."""
        return self._batch_attributes is not None and stream not in (0, LEGACY_STREAM)

    def _copy_by_runtime(
        self, destination: int, source: int, nbytes: int, stream: int, direction: _Direction
    ) -> None:
        answer = self._runtime.cudaMemcpyAsync(destination, source, nbytes, direction.kind, stream)
        self._check("cudaMemcpyAsync", answer)

    def _check(self, call: str, answer: tuple[Any, ...]) -> Any:
        """Raise on any code but success; else give back what the call returned."""
        if answer[0] != self._success:
            code = answer[0]
            _, text = self._runtime.cudaGetErrorString(code)
            raise DeviceError(f"{call} failed: {code.name} ({int(code)}): {text.decode()}")
        return answer[1] if len(answer) > 1 else None


@dataclass(frozen=True, slots=True)
class _Direction:
    kind: Any
    """The runtime's ``cudaMemcpyKind``."""
    driver_call: Callable[[int, int, int, int], int] | None
    """The driver's call for one copy, which keeps the interpreter lock; None without a driver."""


def _check_driver(call: str, answer: tuple[Any, ...]) -> Any:
    """Raise on any code of the driver but success; else give back what the call returned."""
    if int(answer[0]):
        raise DeviceError(f"{call} failed: {answer[0].name} ({int(answer[0])})")
    return answer[1] if len(answer) > 1 else None


def _make_batch_attributes(runtime: Any) -> Any | None:
    """Attributes of a batch whose sources are read in stream order; None without batches.

    Without stream order a copy out of device memory could overtake the work that fills it.
    """
    if not hasattr(runtime, "cudaMemcpyBatchAsync") or runtime.CUDART_VERSION < _BATCH_VERSION:
        return None
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    return attributes


def _load_driver() -> Any | None:
    """The driver, for calls that keep the interpreter lock; None where there is no driver."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    host, device, rest = ctypes.c_void_p, ctypes.c_uint64, (ctypes.c_size_t, ctypes.c_void_p)
    driver.cuMemcpyHtoDAsync_v2.argtypes = (device, host, *rest)
    driver.cuMemcpyDtoHAsync_v2.argtypes = (host, device, *rest)
    driver.cuMemcpyDtoDAsync_v2.argtypes = (device, device, *rest)
    driver.cuStreamQuery.argtypes = (ctypes.c_void_p,)
    return driver

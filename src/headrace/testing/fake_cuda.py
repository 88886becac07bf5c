"""FakeCuda: CUDA without a GPU, as lazy as the real one is allowed to be."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from headrace.bindings.cuda import DEFAULT_STREAMS, LEGACY_STREAM, PER_THREAD_STREAM, Copy
from headrace.testing.fake_memory import Block, Blocks, FindBlock, Refusals, move

POISON = 0xA5
"""Byte that fills a new `headrace.testing.FakeDeviceArray`."""

_PLENTY = 1 << 40


@dataclass(slots=True, eq=False)
class _Stream:
    handle: int
    device: int
    queue: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Record:
    """A moment in a stream, which outlives the event and the stream."""

    stream: _Stream
    happened: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False)
class _Event:
    device: int
    latest: _Record | None = None


class FakeCuda:
    """`headrace.bindings.cuda.Cuda` over host memory, for tests.

    A copy, in any direction, reads its source only when something waits for it:
    `synchronize_stream`, `synchronize_event`, or another stream that was told to wait and is itself
    waited for; `event_is_done` does not wait. So a source that is changed too early, a destination
    that is read too early, or a call that returns too early, gives wrong bytes. A destroyed stream
    does what is queued only for those who wait for an event on it. Streams 0 and 1 are each
    device's legacy stream, 2 is each thread's own; neither waits for a stream of `create_stream`.

    Misuse that real CUDA may forgive raises `DeviceError`: memory freed, or no longer pinned, while
    a queued copy names it, copies out of range or into files that are registered read-only, double
    frees, destroyed streams and events, and those of another device than the memory or the stream
    they are used with.

    Parameters
    ----------
    devices
        How many devices there are.
    pinned_limit_nbytes
        `register_host` fails as CUDA does when more than this would be held; None for no limit.
    fail_copy_at
        The copy that fails, counted from 1 over all streams and directions; None for none.
    free_nbytes
        What `free_memory` says of each device; None for plenty.

    Attributes
    ----------
    pinned_nbytes, peak_pinned_nbytes : int
        Page-locked bytes that are held now, and the most that ever were.
    mapped_nbytes : int
        Bytes of files that are registered read-only now.
    copies, copied_nbytes, pending_copies : int
        Copies that ran, their bytes, and copies that are queued and have not run.
    pageable_copies : int
        Copies that were asked for from or to host memory that is not pinned.
    errors : list[str]
        Every misuse, also where the `DeviceError` was swallowed; injected failures do not count.
    """

    def __init__(
        self,
        devices: int = 1,
        *,
        pinned_limit_nbytes: int | None = None,
        fail_copy_at: int | None = None,
        free_nbytes: int | None = None,
    ) -> None:
        self.pinned_nbytes = self.peak_pinned_nbytes = self.mapped_nbytes = 0
        self.copies = self.copied_nbytes = self.pending_copies = self.pageable_copies = 0
        self.errors: list[str] = []
        self._devices = devices
        self._pinned_limit = math.inf if pinned_limit_nbytes is None else pinned_limit_nbytes
        self._fail_copy_at = fail_copy_at
        self._free_nbytes = _PLENTY if free_nbytes is None else free_nbytes
        self._copy_calls = itertools.count(1)
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._handles = itertools.count(0x1000)
        self._refuse = Refusals(self.errors)
        self._memory = Blocks(self._refuse)
        self._legacy = [_Stream(LEGACY_STREAM, device) for device in range(devices)]
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event] = {}

    @property
    def live_streams(self) -> int:
        """Streams that were created and not destroyed."""
        return len(self._streams)

    @property
    def live_events(self) -> int:
        """Events that were created and not destroyed."""
        return len(self._events)

    def device_count(self) -> int:
        """See `Cuda.device_count`."""
        return self._devices

    def current_device(self) -> int:
        """See `Cuda.current_device`."""
        if not self._devices:
            self._refuse("cudaGetDevice", "cudaErrorNoDevice", 100, "there are 0 devices")
        return int(getattr(self._thread, "device", 0))

    def device_attribute(self, name: str, device: int) -> int:
        """See `Cuda.device_attribute`; a fake device can do everything, and is not integrated."""
        self._check_device("cudaDeviceGetAttribute", device)
        return int("Integrated" not in name)

    def set_device(self, device: int) -> None:
        """See `Cuda.set_device`."""
        self._check_device("cudaSetDevice", device)
        self._thread.device = device

    def pointer_device(self, pointer: int) -> int | None:
        """See `Cuda.pointer_device`."""
        with self._lock:
            return next((block.device for block in self._memory.met_by(pointer, 1)), None)

    def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        """See `Cuda.register_host`."""
        call = "cudaHostRegister"
        self._check_nbytes(call, nbytes)
        with self._lock:
            if self._memory.met_by(pointer, nbytes):
                what = f"[{pointer:#x}, {pointer + nbytes:#x}) meets memory that CUDA knows"
                self._refuse(call, "cudaErrorHostMemoryAlreadyRegistered", 712, what)
            wanted = self.pinned_nbytes + self.mapped_nbytes + nbytes
            if wanted > self._pinned_limit:
                what = f"{nbytes} bytes make it {wanted}, above the limit {self._pinned_limit}"
                self._refuse(call, "cudaErrorMemoryAllocation", 2, what, misuse=False)
            self._memory.add(Block(pointer, nbytes, None, read_only=read_only))
            if read_only:
                self.mapped_nbytes += nbytes
                return
            self.pinned_nbytes += nbytes
            self.peak_pinned_nbytes = max(self.peak_pinned_nbytes, self.pinned_nbytes)

    def unregister_host(self, pointer: int) -> None:
        """See `Cuda.unregister_host`."""
        with self._lock:
            block = self._memory.remove("cudaHostUnregister", pointer, pinned=True)
            if block.read_only:
                self.mapped_nbytes -= block.nbytes
            else:
                self.pinned_nbytes -= block.nbytes

    def device_alloc(self, nbytes: int, device: int = 0) -> int:
        """Allocate memory of `device` and return its address; its bytes are zero."""
        self._check_device("cudaMalloc", device)
        self._check_nbytes("cudaMalloc", nbytes)
        with self._lock:
            return self._memory.allocate(nbytes, device)

    def device_free(self, pointer: int) -> None:
        """Free what `device_alloc` gave."""
        with self._lock:
            self._memory.remove("cudaFree", pointer, pinned=False)

    def device_bytes(self, pointer: int, nbytes: int) -> bytes:
        """Bytes that device memory holds now; copies that are still queued do not run."""
        with self._lock:
            self._memory.on_device("device_bytes", pointer, nbytes)
            return ctypes.string_at(pointer, nbytes)

    def device_write(self, pointer: int, data: bytes) -> None:
        """Put bytes into device memory now, past every stream."""
        with self._lock:
            self._memory.on_device("device_write", pointer, len(data))
            ctypes.memmove(pointer, data, len(data))

    def create_stream(self) -> int:
        """See `Cuda.create_stream`."""
        device = self.current_device()
        with self._lock:
            handle = next(self._handles)
            self._streams[handle] = _Stream(handle, device)
            return handle

    def destroy_stream(self, stream: int) -> None:
        """See `Cuda.destroy_stream`; what is queued stays queued."""
        with self._lock:
            if self._streams.pop(stream, None) is None:
                self._refuse_handle("cudaStreamDestroy", "stream", stream)

    def synchronize_stream(self, stream: int) -> None:
        """See `Cuda.synchronize_stream`."""
        with self._lock:
            found = self._find_stream("cudaStreamSynchronize", stream)
            while found.queue:
                found.queue.popleft()()

    def stream_device(self, stream: int) -> int:
        """See `Cuda.stream_device`."""
        with self._lock:
            return self._find_stream("cuStreamGetCtx", stream).device

    def create_event(self) -> int:
        """See `Cuda.create_event`."""
        device = self.current_device()
        with self._lock:
            handle = next(self._handles)
            self._events[handle] = _Event(device)
            return handle

    def destroy_event(self, event: int) -> None:
        """See `Cuda.destroy_event`; streams that were told to wait for it still do."""
        with self._lock:
            self._find_event("cudaEventDestroy", event)
            del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        """See `Cuda.record_event`."""
        call = "cudaEventRecord"
        with self._lock:
            found, on = self._find_event(call, event), self._find_stream(call, stream)
            self._check_device_is(found.device, on, call, f"event {event}")
            found.latest = _Record(on)
            on.queue.append(found.latest.happened.set)

    def synchronize_event(self, event: int) -> None:
        """See `Cuda.synchronize_event`; an event that was never recorded is complete."""
        with self._lock:
            record = self._find_event("cudaEventSynchronize", event).latest
            if record is not None:
                self._run_until(record)

    def event_is_done(self, event: int) -> bool:
        """See `Cuda.event_is_done`; False for as long as nothing waits for what is recorded."""
        with self._lock:
            record = self._find_event("cudaEventQuery", event).latest
            return record is None or record.happened.is_set()

    def wait_event(self, stream: int, event: int) -> None:
        """See `Cuda.wait_event`; it is the event's latest record now that counts."""
        call = "cudaStreamWaitEvent"
        with self._lock:
            on, record = self._find_stream(call, stream), self._find_event(call, event).latest
            if record is not None:
                on.queue.append(partial(self._run_until, record))

    def copy_to_device(self, copies: Sequence[Copy], stream: int) -> None:
        """See `Cuda.copy_to_device`; the last one runs first, since no order is promised."""
        self._queue_copies(copies, stream, self._memory.on_device, self._memory.on_host)

    def copy_to_host(self, copies: Sequence[Copy], stream: int) -> None:
        """See `Cuda.copy_to_host`; the last one runs first, since no order is promised."""
        self._queue_copies(copies, stream, self._memory.writable_on_host, self._memory.on_device)

    def copy_on_device(self, copies: Sequence[Copy], stream: int) -> None:
        """See `Cuda.copy_on_device`; the last one runs first, since no order is promised."""
        self._queue_copies(copies, stream, self._memory.on_device, self._memory.on_device)

    def free_memory(self, device: int) -> int:
        """See `Cuda.free_memory`; what `device_alloc` gave is not taken off."""
        self._check_device("cudaMemGetInfo", device)
        return self._free_nbytes

    def enqueue_on(self, stream: int, work: Callable[[], None]) -> None:
        """Queue a user's `work`; it runs in the thread that waits, and must not wait itself."""
        with self._lock:
            self._find_stream("enqueue_on", stream).queue.append(work)

    def _run_until(self, record: _Record) -> None:
        """Run the record's stream up to the record, and no further."""
        while not record.happened.is_set():
            record.stream.queue.popleft()()

    def _queue_copies(
        self, copies: Sequence[Copy], stream: int, find_target: FindBlock, find_source: FindBlock
    ) -> None:
        with self._lock:
            on = self._find_stream("cudaMemcpyAsync", stream)
            for copy in reversed(copies):
                self._queue_copy(copy, on, find_target, find_source)

    def _queue_copy(
        self, copy: Copy, on: _Stream, find_target: FindBlock, find_source: FindBlock
    ) -> None:
        call, (destination, source, nbytes) = "cudaMemcpyAsync", copy
        if next(self._copy_calls) == self._fail_copy_at:
            what = f"copy {self._fail_copy_at} was told to fail"
            self._refuse(call, "cudaErrorUnknown", 999, what, misuse=False)
        self._check_nbytes(call, nbytes)
        target = find_target(call, destination, nbytes)
        origin = find_source(call, source, nbytes)
        for block in (target, origin):
            if block is not None and block.device is not None:
                self._check_device_is(block.device, on, call, str(block))
        on.queue.append(partial(self._run_copy, copy, target, origin))
        self.pending_copies += 1
        self.pageable_copies += target is None or origin is None

    def _run_copy(self, copy: Copy, target: Block | None, origin: Block | None) -> None:
        self.pending_copies -= 1
        for block in (target, origin):
            if block is not None and not block.alive:
                what = f"{block} was freed while a queued copy of {copy[2]} bytes names it"
                self._refuse("cudaMemcpyAsync", "cudaErrorIllegalAddress", 700, what)
        move(
            *copy,
            of_file=origin is not None and origin.read_only,
            to_locked=target is not None and target.device is None,
        )
        self.copies += 1
        self.copied_nbytes += copy[2]

    def _check_nbytes(self, call: str, nbytes: int) -> None:
        self.current_device()
        if nbytes < 1:
            self._refuse(call, "cudaErrorInvalidValue", 1, f"{nbytes} bytes; at least 1 is wanted")

    def _find_stream(self, call: str, stream: int) -> _Stream:
        if stream in DEFAULT_STREAMS:
            return self._find_default_stream(stream)
        if stream not in self._streams:
            self._refuse_handle(call, "stream", stream)
        return self._streams[stream]

    def _find_default_stream(self, stream: int) -> _Stream:
        device = self.current_device()
        if stream != PER_THREAD_STREAM:
            return self._legacy[device]
        own: dict[int, _Stream] = vars(self._thread).setdefault("streams", {})
        return own.setdefault(device, _Stream(PER_THREAD_STREAM, device))

    def _find_event(self, call: str, event: int) -> _Event:
        if event not in self._events:
            self._refuse_handle(call, "event", event)
        return self._events[event]

    def _check_device(self, call: str, device: int) -> None:
        if not 0 <= device < self._devices:
            self._refuse(call, "cudaErrorInvalidDevice", 101, f"{device} of {self._devices}")

    def _check_device_is(self, device: int | None, on: _Stream, call: str, what: str) -> None:
        if device != on.device:
            what = f"{what} is of device {device}, stream {on.handle} of device {on.device}"
            self._refuse(call, "cudaErrorInvalidResourceHandle", 400, what)

    def _refuse_handle(self, call: str, kind: str, handle: int) -> NoReturn:
        what = f"{kind} {handle} is destroyed or never was"
        self._refuse(call, "cudaErrorInvalidResourceHandle", 400, what)

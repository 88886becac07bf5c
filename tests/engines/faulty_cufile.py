"""FaultyCuFile: any cuFile, also the real one, that goes wrong as FaultyFiles does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.bindings.cufile import CuFile
from headrace.bindings.cufile_values import BatchEvent, BatchRequest, Counters, StreamCount
from headrace.options import PAGE_NBYTES
from headrace.testing import FaultyFiles


class FaultyCuFile:
    """`headrace.bindings.cufile.CuFile` over another one, with the faults of files.

    cuFile reads and writes a descriptor itself, past `FaultyFiles`; so each `read` and each `write`
    is announced there and counted there. Only those calls have faults: no engine makes those of
    batches and streams.

    Parameters
    ----------
    inner
        What does the work. Its driver is open and stays so: opening and closing it are counted
        here and go no further, so that contexts may come and go over one real driver.
    files
        Whose descriptors are read and written, and whose faults the calls have.

    Attributes
    ----------
    handles : dict[int, int]
        Descriptors by the handles that were registered and not given back.
    buffers : set[int]
        Pointers of buffers that were registered and not given back.
    driver_uses : int
        Openings of the driver that were not closed.
    """

    def __init__(self, inner: CuFile, files: FaultyFiles) -> None:
        self.handles: dict[int, int] = {}
        self.buffers: set[int] = set()
        self.driver_uses = 0
        self._inner = inner
        self._files = files

    def version(self) -> int:
        return self._inner.version()

    def open_driver(self, log_path: str) -> None:
        self.driver_uses += 1

    def close_driver(self) -> None:
        self.driver_uses -= 1

    def register_handle(self, fd: int) -> int:
        handle = self._inner.register_handle(fd)
        self.handles[handle] = fd
        return handle

    def deregister_handle(self, handle: int) -> None:
        del self.handles[handle]  # before the number may be given away again
        self._inner.deregister_handle(handle)

    def register_buffer(self, pointer: int, nbytes: int) -> None:
        self._inner.register_buffer(pointer, nbytes)
        self.buffers.add(pointer)

    def deregister_buffer(self, pointer: int) -> None:
        self.buffers.remove(pointer)
        self._inner.deregister_buffer(pointer)

    def read(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, buffer_offset: int = 0
    ) -> int:
        fd = self.handles[handle]
        nbytes = self._files.begin_read(fd, file_offset, nbytes, call="cuFileRead")
        done = self._inner.read(handle, pointer, nbytes, file_offset, buffer_offset)
        self._files.end_read(fd, done)
        return done

    def write(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, buffer_offset: int = 0
    ) -> int:
        fd = self.handles[handle]
        # cuFile would read and rewrite the whole page around what ends inside of one.
        unit = math.gcd(nbytes, file_offset, PAGE_NBYTES)
        taken = self._files.begin_write(fd, file_offset, nbytes, call="cuFileWrite", unit=unit)
        done = 0
        try:
            done = self._inner.write(handle, pointer, taken, file_offset, buffer_offset)
        finally:
            self._files.end_write(fd, taken, done)
        return done

    def create_batch(self, capacity: int) -> int:
        return self._inner.create_batch(capacity)

    def submit_batch(self, batch: int, requests: Sequence[BatchRequest]) -> None:
        self._inner.submit_batch(batch, requests)

    def batch_events(self, batch: int, minimum: int, timeout_s: float) -> list[BatchEvent]:
        return self._inner.batch_events(batch, minimum, timeout_s)

    def destroy_batch(self, batch: int) -> None:
        self._inner.destroy_batch(batch)

    def register_stream(self, stream: int) -> None:
        self._inner.register_stream(stream)

    def deregister_stream(self, stream: int) -> None:
        self._inner.deregister_stream(stream)

    def read_async(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, stream: int
    ) -> StreamCount:
        return self._inner.read_async(handle, pointer, nbytes, file_offset, stream)

    def write_async(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, stream: int
    ) -> StreamCount:
        return self._inner.write_async(handle, pointer, nbytes, file_offset, stream)

    def read_counters(self) -> Counters | None:
        return self._inner.read_counters()

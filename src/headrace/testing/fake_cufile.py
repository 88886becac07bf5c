"""FakeCuFile: cuFile without a GPU, over a `FakeCuda` and real files."""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from headrace.bindings.cufile_errors import CuFileError
from headrace.bindings.cufile_values import BatchEvent, BatchRequest, Counters, StreamCount
from headrace.bindings.posix import Files, PosixFiles
from headrace.bindings.pymemory import map_pages
from headrace.memory.alignment import align_down, align_up
from headrace.testing.fake_cuda import FakeCuda

Mode = Literal["p2p", "nvfs", "compat"]

_PAGE = 4096


@dataclass(slots=True)
class _Counts:
    """What the statistics say."""

    reads: int = 0
    writes: int = 0
    unaligned_reads: int = 0
    unaligned_writes: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0


@dataclass(slots=True)
class _Batch:
    capacity: int
    events: list[BatchEvent] = field(default_factory=list)


class FakeCuFile:
    """`headrace.bindings.cufile.CuFile` over the memory of a `FakeCuda`, for tests.

    Misuse that the real one forgives or answers with a crash raises, and stays in `errors`:
    calls on a closed driver or in a forked process, unknown handles and buffers, a handle whose
    descriptor was closed, memory that is not the GPU's.

    Parameters
    ----------
    cuda
        Owns the memory.
    files
        What the bytes are read and written with; `headrace.testing.FaultyFiles` brings its faults
        along.
    mode
        The way that the statistics tell of: "p2p", "nvfs", or "compat" for POSIX reads.
    codes
        Calls that fail, such as ``{"cuFileBufRegister": 5016}``; may be changed at any time.
    short_reads
        No read or write moves more bytes than this; None for no limit.
    statistics
        Whether `read_counters` answers, as it does not on CUDA 12.

    Attributes
    ----------
    handles, buffers, streams, batches : dict or set
        What is registered now and was not given back.
    driver_uses : int
        Openings of the driver that were not closed.
    peak_registered_nbytes : int
        The most bytes of buffers that ever were registered at a time.
    errors : list[str]
        Every misuse, also where the error was swallowed; `codes` do not count.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        files: Files | None = None,
        *,
        mode: Mode = "p2p",
        codes: Mapping[str, int] | None = None,
        short_reads: int | None = None,
        statistics: bool = True,
    ) -> None:
        self.mode, self.short_reads, self.statistics = mode, short_reads, statistics
        self.codes = dict(codes or {})
        self.handles: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.streams: set[int] = set()
        self.batches: dict[int, _Batch] = {}
        self.driver_uses = self.peak_registered_nbytes = 0
        self.errors: list[str] = []
        self._cuda = cuda
        self._files = files or PosixFiles()
        self._counts = _Counts()
        self._numbers = itertools.count(0x7000)
        self._opened_by: int | None = None
        self._lock = threading.RLock()

    def version(self) -> int:
        """See `CuFile.version`."""
        return 1200

    def open_driver(self, log_path: str) -> None:
        """See `CuFile.open_driver`; writes no log."""
        self._fail_if_told("cuFileDriverOpen")
        with self._lock:
            self.driver_uses += 1
            self._opened_by = self._opened_by or os.getpid()

    def close_driver(self) -> None:
        """See `CuFile.close_driver`."""
        self._begin("cuFileDriverClose")
        with self._lock:
            self.driver_uses -= 1
            if not self.driver_uses and (self.handles or self.buffers):
                self.errors.append(f"the driver closed over {self.handles} and {self.buffers}")

    def register_handle(self, fd: int) -> int:
        """See `CuFile.register_handle`."""
        call = "cuFileHandleRegister"
        self._begin(call)
        if not _is_open(fd):
            self._refuse(call, 5027, f"descriptor {fd} is not open")
        with self._lock:
            handle = next(self._numbers)
            self.handles[handle] = fd
            return handle

    def deregister_handle(self, handle: int) -> None:
        """See `CuFile.deregister_handle`."""
        call = "cuFileHandleDeregister"
        self._begin(call)
        with self._lock:
            self._find_fd(call, handle)
            del self.handles[handle]

    def register_buffer(self, pointer: int, nbytes: int) -> None:
        """See `CuFile.register_buffer`."""
        call = "cuFileBufRegister"
        self._begin(call)
        self._check_on_gpu(call, pointer)
        with self._lock:
            if pointer in self.buffers:
                self._refuse(call, 5023, f"{pointer:#x} is registered already")
            self.buffers[pointer] = nbytes
            held = sum(self.buffers.values())
            self.peak_registered_nbytes = max(self.peak_registered_nbytes, held)

    def deregister_buffer(self, pointer: int) -> None:
        """See `CuFile.deregister_buffer`."""
        call = "cuFileBufDeregister"
        self._begin(call)
        with self._lock:
            if self.buffers.pop(pointer, None) is None:
                self._refuse(call, 5024, f"{pointer:#x} is not registered")

    def read(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, buffer_offset: int = 0
    ) -> int:
        """See `CuFile.read`; device memory changes at once, past every stream."""
        call = "cuFileRead"
        self._begin(call)
        fd = self._find_fd(call, handle)
        self._check_on_gpu(call, pointer)
        target = pointer + buffer_offset
        data = self._pread(fd, nbytes, file_offset)
        if data:
            self._cuda.device_write(target, data)
        with self._lock:
            self._counts.reads += 1
            self._counts.unaligned_reads += _is_unaligned(target, nbytes, file_offset)
            self._counts.read_nbytes += nbytes
        return len(data)

    def write(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, buffer_offset: int = 0
    ) -> int:
        """See `CuFile.write`; what is not aligned is written with the pages around it."""
        call = "cuFileWrite"
        self._begin(call)
        fd = self._find_fd(call, handle)
        self._check_on_gpu(call, pointer)
        source = pointer + buffer_offset
        limit = nbytes if self.short_reads is None else min(nbytes, self.short_reads)
        count = self._pwrite(fd, self._cuda.device_bytes(source, limit), file_offset)
        with self._lock:
            self._counts.writes += 1
            self._counts.unaligned_writes += _is_unaligned(source, nbytes, file_offset)
            self._counts.written_nbytes += nbytes
        return count

    def create_batch(self, capacity: int) -> int:
        """See `CuFile.create_batch`."""
        self._begin("cuFileBatchIOSetUp")
        with self._lock:
            batch = next(self._numbers)
            self.batches[batch] = _Batch(capacity)
            return batch

    def submit_batch(self, batch: int, requests: Sequence[BatchRequest]) -> None:
        """See `CuFile.submit_batch`; the last request is done first, for no order is promised."""
        call = "cuFileBatchIOSubmit"
        self._begin(call)
        if len(requests) > self.batches[batch].capacity:
            self._refuse(call, 5037, f"{len(requests)} requests in {self.batches[batch]}")
        for each in reversed(requests):
            move = self.write if each.write else self.read
            place = (each.handle, each.pointer, each.nbytes, each.file_offset, each.buffer_offset)
            event = BatchEvent(each.cookie, True, move(*place))
            self.batches[batch].events.append(event)

    def batch_events(self, batch: int, minimum: int, timeout_s: float) -> list[BatchEvent]:
        """See `CuFile.batch_events`."""
        self._begin("cuFileBatchIOGetStatus")
        with self._lock:
            found = self.batches[batch]
            events, found.events = found.events, []
        return events

    def destroy_batch(self, batch: int) -> None:
        """See `CuFile.destroy_batch`."""
        self._begin("cuFileBatchIODestroy")
        del self.batches[batch]

    def register_stream(self, stream: int) -> None:
        """See `CuFile.register_stream`."""
        self._begin("cuFileStreamRegister")
        self.streams.add(stream)

    def deregister_stream(self, stream: int) -> None:
        """See `CuFile.deregister_stream`."""
        self._begin("cuFileStreamDeregister")
        self.streams.remove(stream)

    def read_async(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, stream: int
    ) -> StreamCount:
        """See `CuFile.read_async`; nothing is read before something waits for the stream."""
        count = StreamCount("cuFileReadAsync", nbytes, file_offset)
        place = (handle, pointer, nbytes, file_offset)
        self._cuda.enqueue_on(stream, lambda: count.settle(self.read(*place)))
        return count

    def write_async(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, stream: int
    ) -> StreamCount:
        """See `CuFile.write_async`."""
        count = StreamCount("cuFileWriteAsync", nbytes, file_offset)
        place = (handle, pointer, nbytes, file_offset)
        self._cuda.enqueue_on(stream, lambda: count.settle(self.write(*place)))
        return count

    def read_counters(self) -> Counters | None:
        """See `CuFile.read_counters`."""
        if not self.statistics:
            return None
        counts, way = self._counts, {"compat": "posix"}.get(self.mode, self.mode)
        ways = {f"{each}_reads": 0 for each in ("p2p", "nvfs", "posix")}
        ways |= {f"{each}_writes": 0 for each in ("p2p", "nvfs", "posix")}
        ways |= {f"{way}_reads": counts.reads, f"{way}_writes": counts.writes}
        return Counters(
            "cuFile statistics",
            **ways,
            unaligned_reads=counts.unaligned_reads,
            unaligned_writes=counts.unaligned_writes,
            read_nbytes=counts.read_nbytes,
            written_nbytes=counts.written_nbytes,
        )

    def _pread(self, fd: int, nbytes: int, file_offset: int) -> bytes:
        """Read as the descriptor demands: O_DIRECT takes whole pages only."""
        wanted = nbytes if self.short_reads is None else min(nbytes, self.short_reads)
        unit = _PAGE if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else 1
        start = align_down(file_offset, unit)
        view = map_pages(max(align_up(file_offset + wanted, unit) - start, 1))
        lead, done = file_offset - start, 0
        while done <= lead:  # a short count may end before what is wanted
            count = self._files.preadv(fd, [view[done:]], start + done) if wanted else 0
            done += count
            if not count:
                break
        return bytes(view[lead : min(done, lead + wanted)])

    def _pwrite(self, fd: int, data: bytes, file_offset: int) -> int:
        """Write as the descriptor demands: O_DIRECT takes whole pages only.

        Of others the pages around are read, changed and written back whole, over whatever others
        wrote there meanwhile; of a file that ends inside of them, the end stays.
        """
        stop = file_offset + len(data)
        unit = _PAGE if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else 1
        start = align_down(file_offset, unit)
        view = map_pages(align_up(stop, unit) - start)
        lead = file_offset - start
        if lead or len(view) > len(data):
            self._files.preadv(fd, [view], start)
            time.sleep(0)  # to whoever writes meanwhile
        view[lead : lead + len(data)] = data
        with self._lock:
            before, done = os.fstat(fd).st_size, 0
            while done <= lead:  # a short count may end before what is to be written
                done += self._files.pwritev(fd, [view[done:]], start + done)
            # What the last page has too much goes, unless others made the file longer meanwhile.
            if os.fstat(fd).st_size == start + done > max(before, stop):
                os.ftruncate(fd, max(before, stop))
        return max(min(done - lead, len(data)), 0)

    def _begin(self, call: str) -> None:
        self._fail_if_told(call)
        if not self.driver_uses:
            self._refuse(call, 5001, "the driver is not open")
        if self._opened_by != os.getpid():
            self._refuse(call, 5001, "the process was forked since the driver was opened")

    def _find_fd(self, call: str, handle: int) -> int:
        if handle not in self.handles:
            self._refuse(call, 5027, f"handle {handle:#x} is not registered")
        fd = self.handles[handle]
        if not _is_open(fd):
            self._refuse(call, 5027, f"descriptor {fd} was closed before its handle")
        return fd

    def _check_on_gpu(self, call: str, pointer: int) -> None:
        if self._cuda.pointer_device(pointer) is None:
            self._refuse(call, 5013, f"{pointer:#x} is not memory of a GPU")

    def _fail_if_told(self, call: str) -> None:
        if call in self.codes:
            raise CuFileError(call, self.codes[call])

    def _refuse(self, call: str, code: int, what: str) -> NoReturn:
        error = CuFileError(call, code, f"{code}: {what}")
        self.errors.append(str(error))
        raise error


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _is_unaligned(pointer: int, nbytes: int, file_offset: int) -> bool:
    return bool((pointer | nbytes | file_offset) % _PAGE)

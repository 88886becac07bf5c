"""cuFile: the Protocol of the calls that headrace makes, and the real one over ``cuda.bindings``.

NVIDIA's own binding raises its own exceptions, or a bare ValueError where the number is the
operating system's; here they become `CuFileError` and OSError.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.bindings.cufile_errors import (
    ALREADY_OPEN,
    FIRST_CODE,
    CuFileError,
    logged_reason,
)
from headrace.bindings.cufile_values import (
    BatchEvent,
    BatchRequest,
    Counters,
    StreamCount,
    checked_count,
    parse_nvidia_fs,
)
from headrace.bindings.sysfs import Linux, System
from headrace.errors import DeviceError

NVIDIA_FS_STATS = "/proc/driver/nvidia-fs/stats"
"""Where nvidia-fs counts the reads of all processes."""

_STATS_LEVEL = 3  # the level that counts by path and GPU
_LOG_VARIABLE = "CUFILE_LOGFILE_PATH"
_NO_CUDA_ERROR = "; CUDA status: CUDA_SUCCESS (0)"


class CuFile(Protocol):
    """cuFile, with pointers, handles and streams as integers.

    `headrace.testing.FakeCuFile` implements it without a GPU.
    """

    def version(self) -> int:
        """Version of the library: 1200 for 1.20."""

    def open_driver(self, log_path: str) -> None:
        """Open the driver and start its statistics; its log goes to `log_path`."""

    def close_driver(self) -> None:
        """Close what `open_driver` opened."""

    def register_handle(self, fd: int) -> int:
        """Make an open file known; `fd` stays open until `deregister_handle`."""

    def deregister_handle(self, handle: int) -> None:
        """Forget a file; no operation on it may be under way."""

    def register_buffer(self, pointer: int, nbytes: int) -> None:
        """Pin memory of a GPU for direct transfers."""

    def deregister_buffer(self, pointer: int) -> None:
        """Undo `register_buffer`."""

    def read(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, buffer_offset: int = 0
    ) -> int:
        """Read into ``pointer + buffer_offset``; bytes read, possibly fewer, 0 at the end."""

    def write(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, buffer_offset: int = 0
    ) -> int:
        """Write from ``pointer + buffer_offset``; bytes written, possibly fewer."""

    def create_batch(self, capacity: int) -> int:
        """Make room for so many requests at a time (at most 128 by default)."""

    def submit_batch(self, batch: int, requests: Sequence[BatchRequest]) -> None:
        """Start requests; `batch_events` tells when they are done."""

    def batch_events(self, batch: int, minimum: int, timeout_s: float) -> list[BatchEvent]:
        """Wait for at least `minimum` requests, or the time-out; those that are done."""

    def destroy_batch(self, batch: int) -> None:
        """Give a batch up; none of its requests may be under way."""

    def register_stream(self, stream: int) -> None:
        """Prepare a CUDA stream for `read_async` and `write_async`; optional."""

    def deregister_stream(self, stream: int) -> None:
        """Undo `register_stream`."""

    def read_async(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, stream: int
    ) -> StreamCount:
        """Enqueue a read on a CUDA stream."""

    def write_async(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, stream: int
    ) -> StreamCount:
        """Enqueue a write on a CUDA stream."""

    def read_counters(self) -> Counters | None:
        """What was served so far, and by which way; None where nobody counts."""


class CuFileLibrary:
    """`CuFile` over ``cuda.bindings.cufile``.

    Parameters
    ----------
    system
        Where nvidia-fs's statistics are read, if the library itself has none (CUDA 12).

    Raises
    ------
    ImportError
        ``cuda.bindings`` is not installed (extras ``cuda12`` and ``cuda13`` bring it).
    """

    def __init__(self, system: System | None = None) -> None:
        from cuda.bindings import cufile

        self._cufile: Any = cufile
        self._system = system or Linux()
        self._counts = False
        self._log_path: str | None = None
        self._closes = True
        self._submitted: dict[int, list[Any]] = {}
        self._enqueued: list[StreamCount] = []

    def version(self) -> int:
        """See `CuFile.version`."""
        return int(self._check("cuFileGetVersion", self._cufile.get_version))

    def open_driver(self, log_path: str) -> None:
        """See `CuFile.open_driver`."""
        self._counts = self._start_counting("set_stats_level", _STATS_LEVEL)
        with _environment(_LOG_VARIABLE, log_path):
            try:
                self._check("cuFileDriverOpen", self._cufile.driver_open)
                self._closes = True
            except CuFileError as error:
                if error.code != ALREADY_OPEN:
                    raise CuFileError(
                        error.call, error.code, logged=_logged_since(log_path, 0)
                    ) from None
                self._closes = False  # whoever opened it closes it
        self._log_path = log_path
        self._counts = self._counts and self._start_counting("stats_start")

    def close_driver(self) -> None:
        """See `CuFile.close_driver`."""
        if self._closes:
            self._check("cuFileDriverClose", self._cufile.driver_close)

    def register_handle(self, fd: int) -> int:
        """See `CuFile.register_handle`."""
        descriptor = self._cufile.Descr()
        # The binding gives memory as it comes from malloc: what is left of fs_ops would be called.
        descriptor.handle.handle = 0
        descriptor.fs_ops = 0
        descriptor.type = int(self._cufile.FileHandleType.OPAQUE_FD)
        descriptor.handle.fd = fd
        path = self._log_path
        logged = os.path.getsize(path) if path and os.path.exists(path) else 0
        register = self._cufile.handle_register
        try:
            return int(self._check("cuFileHandleRegister", register, descriptor.ptr))
        except CuFileError as error:
            # The code is the same whatever is wrong with the file; the log tells which it is.
            reason = _logged_since(path, logged) if path else None
            raise CuFileError(error.call, error.code, logged=reason) from None

    def deregister_handle(self, handle: int) -> None:
        """See `CuFile.deregister_handle`."""
        self._check("cuFileHandleDeregister", self._cufile.handle_deregister, handle)

    def register_buffer(self, pointer: int, nbytes: int) -> None:
        """See `CuFile.register_buffer`."""
        self._check("cuFileBufRegister", self._cufile.buf_register, pointer, nbytes, 0)

    def deregister_buffer(self, pointer: int) -> None:
        """See `CuFile.deregister_buffer`."""
        self._check("cuFileBufDeregister", self._cufile.buf_deregister, pointer)

    def read(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, buffer_offset: int = 0
    ) -> int:
        """See `CuFile.read`."""
        place = (handle, pointer, nbytes, file_offset, buffer_offset)
        return self._count("cuFileRead", self._cufile.read, *place)

    def write(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, buffer_offset: int = 0
    ) -> int:
        """See `CuFile.write`."""
        place = (handle, pointer, nbytes, file_offset, buffer_offset)
        return self._count("cuFileWrite", self._cufile.write, *place)

    def create_batch(self, capacity: int) -> int:
        """See `CuFile.create_batch`."""
        batch = int(self._check("cuFileBatchIOSetUp", self._cufile.batch_io_set_up, capacity))
        self._submitted[batch] = []
        return batch

    def submit_batch(self, batch: int, requests: Sequence[BatchRequest]) -> None:
        """See `CuFile.submit_batch`."""
        records = np.zeros(len(requests), dtype=self._cufile.io_params_dtype)
        for record, request in zip(records, requests, strict=True):
            record["mode"] = int(self._cufile.BatchMode.BATCH)
            record["u"]["batch"]["dev_ptr_base"] = request.pointer
            record["u"]["batch"]["file_offset"] = request.file_offset
            record["u"]["batch"]["dev_ptr_offset"] = request.buffer_offset
            record["u"]["batch"]["size_"] = request.nbytes
            record["fh"] = request.handle
            record["opcode"] = int(request.write)
            record["cookie"] = request.cookie
        self._submitted[batch].append(records)  # until the batch is destroyed
        submit = self._cufile.batch_io_submit
        address = records.ctypes.data
        self._check("cuFileBatchIOSubmit", submit, batch, len(requests), address, 0)

    def batch_events(self, batch: int, minimum: int, timeout_s: float) -> list[BatchEvent]:
        """See `CuFile.batch_events`."""
        capacity = sum(len(records) for records in self._submitted[batch])
        events = np.zeros(capacity, dtype=self._cufile.io_events_dtype)
        count = np.array([capacity], dtype=np.uint32)
        seconds = int(timeout_s)
        timeout = np.array([seconds, int((timeout_s - seconds) * 1e9)], dtype=np.int64)
        places = (count.ctypes.data, events.ctypes.data, timeout.ctypes.data)
        ask = self._cufile.batch_io_get_status
        self._check("cuFileBatchIOGetStatus", ask, batch, minimum, *places)
        complete = int(self._cufile.Status.COMPLETE)
        return [
            BatchEvent(int(event["cookie"]), int(event["status"]) == complete, int(event["ret"]))
            for event in events[: int(count[0])]
        ]

    def destroy_batch(self, batch: int) -> None:
        """See `CuFile.destroy_batch`."""
        self._check("cuFileBatchIODestroy", self._cufile.batch_io_destroy, batch)
        del self._submitted[batch]

    def register_stream(self, stream: int) -> None:
        """See `CuFile.register_stream`."""
        self._check("cuFileStreamRegister", self._cufile.stream_register, stream, 0)

    def deregister_stream(self, stream: int) -> None:
        """See `CuFile.deregister_stream`."""
        self._check("cuFileStreamDeregister", self._cufile.stream_deregister, stream)

    def read_async(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, stream: int
    ) -> StreamCount:
        """See `CuFile.read_async`."""
        place = (handle, pointer, nbytes, file_offset, stream)
        return self._enqueue("cuFileReadAsync", self._cufile.read_async, *place)

    def write_async(
        self, handle: int, pointer: int, nbytes: int, file_offset: int, stream: int
    ) -> StreamCount:
        """See `CuFile.write_async`."""
        place = (handle, pointer, nbytes, file_offset, stream)
        return self._enqueue("cuFileWriteAsync", self._cufile.write_async, *place)

    def read_counters(self) -> Counters | None:
        """See `CuFile.read_counters`."""
        if not self._counts:
            return parse_nvidia_fs(self._system.read(NVIDIA_FS_STATS))
        record = np.zeros(1, dtype=self._cufile.stats_level3_dtype)
        self._check("cuFileGetStatsL3", self._cufile.get_stats_l3, record.ctypes.data)
        return Counters.from_level3(record[0])

    def _start_counting(self, name: str, *arguments: int) -> bool:
        """Call a function of the statistics; False where library or binding lack it."""
        try:
            self._check(name, getattr(self._cufile, name), *arguments)
        except (AttributeError, DeviceError):
            return False
        return True

    def _enqueue(
        self,
        call: str,
        function: Callable[..., Any],
        handle: int,
        pointer: int,
        nbytes: int,
        file_offset: int,
        stream: int,
    ) -> StreamCount:
        count = StreamCount(call, nbytes, file_offset)
        # cuFile reads and writes these numbers when the stream gets there, whoever still holds
        # the count by then.
        self._enqueued = [each for each in self._enqueued if not each.done]
        self._enqueued.append(count)
        self._check(call, function, handle, pointer, *count.addresses, stream)
        return count

    def _count(self, call: str, function: Callable[..., Any], *arguments: int) -> int:
        """Make a call that returns a byte count, or a code as a negative number."""
        return checked_count(call, int(self._check(call, function, *arguments)))

    def _check(self, call: str, function: Callable[..., Any], *arguments: int) -> Any:
        """Make a call; raise on any code but success, else give back what it returned."""
        try:
            return function(*arguments)
        except self._cufile.cuFileError as error:
            text = str(error).replace(_NO_CUDA_ERROR, "")
            raise CuFileError(call, error.status, text) from None
        except ValueError as error:
            # The binding looked for errno, or for a code that it does not know, among its names.
            raise _unknown_number(call, error) from None
        except RuntimeError as error:  # the binding found no library, or no such function in it
            raise DeviceError(
                f"{call} failed: {error} (install nvidia-cufile, or the CUDA toolkit's libcufile)"
            ) from error


def _unknown_number(call: str, error: ValueError) -> OSError | CuFileError:
    found = re.match(r"-?\d+", str(error))
    number = abs(int(found.group())) if found else 0
    if number > FIRST_CODE:
        return CuFileError(call, number)
    return OSError(number, f"{call}: {os.strerror(number) if number else error}")


def _logged_since(path: str, offset: int) -> str | None:
    """Tell the first error that cuFile logged after an offset of its log."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as log:
        log.seek(offset)
        return logged_reason(log.read())
    return None


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for a C library that reads it once, when it starts.

    The rule that only the command line and `Context.default` look at the environment has this
    exception: libcufile 1.20 takes CUFILE_PARAM_LOG_DIR and CUFILE_PARAM_ENV_LOGFILE_PATH, says
    success, and still writes cufile.log into the working directory. Only the variable keeps the
    log out of the user's folder. It is set while the driver opens, and as before afterwards.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

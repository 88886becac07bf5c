"""Requests: one buffer and one stretch of one file, for a read into it or a write out of it."""

from __future__ import annotations

import contextlib
import errno
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from headrace.bindings.cuda import Cuda
from headrace.bindings.posix import Files
from headrace.engines.lanes import Fence
from headrace.errors import BufferMismatch
from headrace.formats.raw import describe_raw
from headrace.memory.buffer import Buffer, buffer_from
from headrace.memory.stream import check_stream, parse_stream
from headrace.planning.plan import Piece
from headrace.storage.sink import Sink
from headrace.survey import PathLike, Want, name_path
from headrace.write_transfers import Delivery

_MOST_NBYTES = (1 << 63) - 1  # file offsets are signed in every call

LoadCuda = Callable[[], Cuda]
"""Gives the CUDA bindings, which only streams need here."""


@dataclass(frozen=True, slots=True)
class Request:
    """A buffer, and the stretch of a file that is to be read into it or written out of it."""

    buffer: Buffer
    """As long as the stretch; its stream is the caller's, if one was given."""
    path: str
    """The file."""
    file_offset: int
    """First byte of the stretch."""
    stream: int | None
    """The caller's CUDA stream; None where none was given."""

    def want(self) -> Want:
        """The stretch, as something to read."""
        path, first, nbytes = self.path, self.file_offset, self.buffer.nbytes
        return Want(
            label=path,
            paths=(path,),
            describe=lambda opened: (
                describe_raw(path, opened[0].nbytes, file_offset=first, nbytes=nbytes),
            ),
        )

    @contextlib.contextmanager
    def delivery(self, files: Files, fence: Fence | None) -> Iterator[Delivery]:
        """The buffer, as something to write into the file, which is open for a block.

        Where the block fails, the file gets its old length back, or goes if it was made here.
        Bytes inside of the old length may then be old or new.

        Raises
        ------
        OSError
            The file cannot be opened or made, or cannot be so long (EFBIG).
        """
        nbytes, stop = self.buffer.nbytes, self.file_offset + self.buffer.nbytes
        if stop > _MOST_NBYTES:
            what = f"the range ends at byte {stop}, and a file can have {_MOST_NBYTES}"
            raise OSError(errno.EFBIG, what, self.path)
        sink = Sink(self.path, files)
        pieces = (Piece(self.file_offset, nbytes, 0, 0),) if nbytes else ()
        try:
            yield Delivery(self.path, (sink,), (pieces,), (self.buffer,), fence)
        except BaseException as error:
            try:
                sink.restore(self.file_offset, stop)
            except OSError as second:
                error.add_note(f"{self.path}: its old length could not be restored: {second}")
            raise
        finally:
            sink.close()


def make_request(
    call: str,
    buffer: Any,
    path: PathLike,
    *,
    file_offset: int,
    nbytes: int | None,
    stream: Any,
    load_cuda: LoadCuda,
    pointer_device: Callable[[int], int | None],
    writable: bool = True,
) -> Request:
    """Check what a caller asks for; nothing is opened.

    Parameters
    ----------
    call
        Name of the function, for messages.
    buffer, path, file_offset, nbytes, stream
        As for `headrace.read_into` and `headrace.write_from`.
    load_cuda
        Gives the CUDA bindings.
    pointer_device
        Tells which GPU memory is on; None for host memory.
    writable
        Whether bytes are to be put into the buffer.

    Raises
    ------
    BufferMismatch, RouteUnavailable, TypeError, ValueError
        As those say.
    """
    handle = None if stream is None else parse_stream(stream)
    whole = buffer_from(buffer, pointer_device, writable=writable, stream=handle)
    if handle is not None:
        check_stream(handle, whole.device, _cuda_for_stream(call, load_cuda))
    first = operator.index(file_offset)
    if first < 0:
        raise ValueError(f"{call}: file_offset is {first}; it must not be negative")
    wanted = _check_length(call, buffer, whole, nbytes)
    part = replace(whole, nbytes=wanted, stream=whole.stream if handle is None else handle)
    return Request(part, name_path(path), first, handle)


def _cuda_for_stream(call: str, load_cuda: LoadCuda) -> Cuda:
    try:
        return load_cuda()
    except ImportError as error:
        raise ValueError(
            f"{call}: a stream is given, and there are no CUDA bindings to follow it ({error}); "
            "leave stream out"
        ) from error


def _check_length(call: str, buffer: Any, whole: Buffer, nbytes: int | None) -> int:
    if nbytes is None:
        return whole.nbytes
    nbytes = operator.index(nbytes)
    if nbytes < 0:
        raise ValueError(f"{call}: nbytes is {nbytes}; it must not be negative")
    if nbytes > whole.nbytes:
        raise BufferMismatch(
            f"{call}: {nbytes} bytes were asked for, but {type(buffer).__name__} holds "
            f"{whole.nbytes}; pass a larger buffer or a smaller nbytes"
        )
    return nbytes

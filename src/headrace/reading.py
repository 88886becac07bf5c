"""Functions that need no framework: read into memory, write out of it, explain, trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.context import Context, choose_context
from headrace.observers import Trace
from headrace.report import Explanation, Report
from headrace.survey import PathLike, SourceLike, want_any
from headrace.types import HOST, Device, parse_device


def read_into(
    buffer: Any,
    path: PathLike,
    *,
    file_offset: int = 0,
    nbytes: int | None = None,
    route: str = "auto",
    stream: Any = None,
    context: Context | None = None,
) -> Report:
    """Read bytes of a file into memory that you have.

    Without `stream` the call is ordered after what the buffer's producer has queued on its current
    stream, and returns when the bytes are in place and visible to any stream.

    Parameters
    ----------
    buffer
        Anything with the buffer protocol, ``__cuda_array_interface__``, ``__array_interface__`` or
        ``__dlpack__``: contiguous and writable, in host memory or on a CUDA device.
    path
        A file.
    file_offset
        First byte to read; any value, aligned or not.
    nbytes
        Bytes to read, to the start of the buffer; None fills the buffer.
    route
        "auto", or one of "host", "cached", "mapped", "direct", "gds", which then serves or raises.
    stream
        CUDA stream of the buffer's device: of torch, CuPy, cuda.core, or a handle. The read comes
        after what is queued on it, and what is queued on it later sees the bytes. Where they stay
        registered (`Options.mapped_nbytes`), the call only enqueues copies and returns before they
        are done: keep the buffer until then, as for a kernel on that stream; a change of the file
        after the call goes unseen. Else it returns as without.
    context
        Whose options and pools to use; None takes the default one.

    Returns
    -------
    Report
        Which way the bytes went, and why.

    Raises
    ------
    BufferMismatch
        The buffer is too small for `nbytes`, read-only, or not contiguous.
    ShortRead
        The file ends first; nothing was moved.
    RouteUnavailable
        The forced route cannot serve; the message has every reason.
    SourceChanged
        The file changed during the read; the buffer's content is void.
    FileNotFoundError, PermissionError, IsADirectoryError, OSError
        As the operating system says.
    ValueError
        The stream belongs to another device; a number is negative.
    """
    context = choose_context(context)
    request = context.request(
        "read_into", buffer, path, file_offset=file_offset, nbytes=nbytes, stream=stream
    )
    return context.read(request, route=route)


def write_from(
    buffer: Any,
    path: PathLike,
    *,
    file_offset: int = 0,
    nbytes: int | None = None,
    route: str = "auto",
    stream: Any = None,
    context: Context | None = None,
) -> Report:
    """Write bytes of memory that you have into a file.

    Bytes outside of the range stay as they are, also where it is not aligned, and where others
    write them at the same time; a file that ends before it is extended, by zeros up to
    `file_offset`. Of 0 bytes nothing is extended; the file is made if it is missing. The call
    returns when the bytes are in the file, for every reader of it; it does not wait until storage
    has them (fsync).

    Parameters
    ----------
    buffer
        Anything with the buffer protocol, ``__cuda_array_interface__``, ``__array_interface__`` or
        ``__dlpack__``: contiguous, in host memory or on a CUDA device; it may be read-only.
    path
        A file, made if it is missing; symbolic links are followed.
    file_offset
        Where its first byte goes; any value, aligned or not.
    nbytes
        Bytes to write, from the start of the buffer; None writes all of it.
    route
        "auto", or one of "host", "cached", "mapped", "direct", "gds", which then serves or raises.
    stream
        CUDA stream whose queued work comes first: of torch, CuPy, cuda.core, or a handle. None
        takes what the buffer's producer has queued on its current stream.
    context
        Whose options and pools to use; None takes the default one.

    Returns
    -------
    Report
        Which way the bytes went, and why.

    Raises
    ------
    BufferMismatch
        The buffer is too small for `nbytes`, or not contiguous.
    RouteUnavailable
        The forced route cannot serve; the message has every reason.
    OSError
        As the operating system says (ENOSPC, EROFS, EIO, EFBIG). The file then has its old length,
        or is gone if it was made here, unless others made it longer meanwhile; where old bytes
        were to be replaced, some may be. ESTALE: others truncated, replaced or removed the file
        while it was written.
    ValueError
        The stream belongs to another device; a number is negative.
    """
    context = choose_context(context)
    request = context.request(
        "write_from",
        buffer,
        path,
        file_offset=file_offset,
        nbytes=nbytes,
        stream=stream,
        writable=False,
    )
    return context.write(request, route=route)


def explain(
    source: SourceLike,
    *,
    device: Any = None,
    route: str = "auto",
    raw: bool = False,
    names: Sequence[str] | None = None,
    context: Context | None = None,
) -> Explanation:
    """Say what a load would do and why; reads headers and facts, no payload.

    Parameters
    ----------
    source
        A safetensors file, a directory or index of them, a list of files, or a ``.npy`` file.
    device
        "cpu", "cuda", "cuda:N", or a CUDA ordinal; None takes the first CUDA device, or the host
        where there is none.
    route, context
        As for a load.
    raw
        Take any file as bytes, as `read_into` does.
    names
        Only these tensors, as for a load; None for all.

    Raises
    ------
    RouteUnavailable, FormatError, KeyError, OSError, ValueError
        What the load would raise before its first byte.
    """
    context = choose_context(context)
    return context.explain(
        want_any(source, raw=raw, names=names), _pick_device(device, context), route=route
    )


def trace() -> Trace:
    """Collect the report of every transfer in a block.

    Returns
    -------
    Trace
        A context manager; ``reports`` grows by one Report for each transfer made inside it, from
        any thread and any context.
    """
    return Trace()


def _pick_device(device: Any, context: Context) -> Device:
    if device is None:
        return Device("cuda", 0) if context.gpu_fact().holds else HOST
    return parse_device(f"cuda:{device}" if isinstance(device, int) else str(device))

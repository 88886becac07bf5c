"""Functions that need no framework: read into memory that exists, explain, trace."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.context import Context, default_context
from headrace.errors import BufferMismatch
from headrace.formats.raw import describe_raw
from headrace.memory.buffer import Buffer, buffer_from
from headrace.observers import Trace
from headrace.report import Explanation, Report
from headrace.survey import PathLike, SourceLike, Want, want_any
from headrace.types import HOST, Device, parse_device


def read_into(
    buffer: Any,
    path: PathLike,
    *,
    file_offset: int = 0,
    nbytes: int | None = None,
    route: str = "auto",
    context: Context | None = None,
) -> Report:
    """Read bytes of a file into memory that you have.

    The call is ordered after what the buffer's producer has queued on its current stream, and
    returns when the bytes are in place and visible to any stream.

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
    """
    context = context or default_context()
    destination = buffer_from(buffer, lambda pointer: context.load_cuda().pointer_device(pointer))
    first = operator.index(file_offset)
    wanted = _check_length(buffer, destination, nbytes)
    where = os.fspath(path)
    want = Want(
        label=where,
        paths=(where,),
        describe=lambda opened: (
            describe_raw(where, opened[0].nbytes, file_offset=first, nbytes=wanted),
        ),
    )
    part = replace(destination, nbytes=wanted)
    return context.transfer(want, destination.device, lambda _: (part,), route=route)


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
    context = context or default_context()
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


def _check_length(buffer: Any, destination: Buffer, nbytes: int | None) -> int:
    if nbytes is None:
        return destination.nbytes
    nbytes = operator.index(nbytes)
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it must not be negative")
    if nbytes > destination.nbytes:
        raise BufferMismatch(
            f"read_into: {nbytes} bytes were asked for, but {type(buffer).__name__} holds "
            f"{destination.nbytes}; pass a larger buffer or a smaller nbytes"
        )
    return nbytes


def _pick_device(device: Any, context: Context) -> Device:
    if device is None:
        return Device("cuda", 0) if context.gpu_fact().holds else HOST
    return parse_device(f"cuda:{device}" if isinstance(device, int) else str(device))

"""Streams of any library as the handle that CUDA knows."""

from __future__ import annotations

from typing import Any

from headrace.bindings.cuda import DEFAULT_STREAMS, LEGACY_STREAM, Cuda
from headrace.types import Device

_PROTOCOL_VERSION = 0
_HANDLE_NAMES = ("cuda_stream", "ptr")  # torch's, CuPy's


def parse_stream(stream: Any) -> int:
    """Handle of a CUDA stream; nothing keeps the stream alive.

    Parameters
    ----------
    stream
        Something with ``__cuda_stream__`` (cuda.core, CuPy, torch: the protocol of cuda.core,
        version 0, as a method or an attribute), a ``torch.cuda.Stream``, a ``cupy.cuda.Stream``, or
        the handle itself as an int: 0 and 1 are the legacy default stream, 2 the per-thread one.

    Returns
    -------
    int
        The handle; `LEGACY_STREAM` for 0, which some calls of CUDA do not take for a stream.

    Raises
    ------
    TypeError
        It is none of these.
    ValueError
        The handle is negative, or the protocol is of another version.
    """
    handle = _find_handle(stream)
    if isinstance(handle, bool) or not isinstance(handle, int):
        raise TypeError(
            f"stream is {stream!r}; pass a torch.cuda.Stream, a cupy.cuda.Stream, an object with "
            "__cuda_stream__, or the handle as an int"
        )
    if handle < 0:
        raise ValueError(f"stream {stream!r} has the handle {handle}; a handle is 0 or more")
    return handle or LEGACY_STREAM


def _find_handle(stream: Any) -> Any:
    """What the object gives for its handle, of whatever type; None where it gives none."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return _handle_by_protocol(stream)
    # Events and pointers of CuPy have a ``ptr`` as well, and CUDA would crash on those.
    if not hasattr(stream, "wait_event"):
        return None
    return next((getattr(stream, name) for name in _HANDLE_NAMES if hasattr(stream, name)), None)


def _handle_by_protocol(stream: Any) -> Any:
    answer = stream.__cuda_stream__
    if callable(answer):
        answer = answer()
    try:
        version, handle = answer
    except (TypeError, ValueError):
        raise TypeError(
            f"__cuda_stream__ of {stream!r} gives {answer!r}; (version, handle) is wanted"
        ) from None
    if version != _PROTOCOL_VERSION:
        raise ValueError(
            f"__cuda_stream__ of {stream!r} is of version {version}; only {_PROTOCOL_VERSION} is "
            "known: pass the handle as an int"
        )
    return handle


def check_stream(stream: int, device: Device, cuda: Cuda) -> None:
    """Check that a stream can order a transfer to or from a device.

    Raises
    ------
    ValueError
        It belongs to another device.
    """
    if device.is_host or stream in DEFAULT_STREAMS:  # those are each device's own
        return
    owner = cuda.stream_device(stream)
    if owner != device.index:
        raise ValueError(
            f"stream {stream:#x} belongs to cuda:{owner}, but the memory is on {device}; pass a "
            f"stream of {device}"
        )

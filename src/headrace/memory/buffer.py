"""Buffer: a stretch of memory, the device it lives on, and what keeps it alive."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.bindings.cuda import LEGACY_STREAM
from headrace.bindings.dlpack import (
    NO_SYNCHRONISATION,
    device_of,
    export_dlpack,
    is_contiguous,
)
from headrace.bindings.pymemory import address_of
from headrace.errors import BufferMismatch
from headrace.types import HOST, Device


@dataclass(frozen=True, slots=True)
class Buffer:
    """Contiguous memory that somebody else owns."""

    pointer: int
    """Address of the first byte, on `device`."""
    nbytes: int
    """Length in bytes."""
    device: Device
    """Where the memory lives."""
    owner: Any = field(repr=False)
    """The object that keeps the memory alive; held for as long as this Buffer is."""
    stream: int | None = None
    """CUDA stream whose queued work may still use the memory; copies are ordered after it."""


def buffer_from(
    obj: Any,
    pointer_device: Callable[[int], int | None],
    *,
    writable: bool = True,
    stream: int | None = None,
) -> Buffer:
    """Describe the memory of any contiguous array or buffer; nothing but a NumPy scalar is copied.

    Parameters
    ----------
    obj
        Something with ``__dlpack__``, ``__cuda_array_interface__``, ``__array_interface__`` or the
        buffer protocol: NumPy, torch, CuPy, JAX, Numba, cuda.core, ``bytearray``, ``mmap``.
    pointer_device
        Tells the CUDA ordinal of a pointer; asked only where the array does not say.
    writable
        False takes memory that is only to be read as well: ``bytes``, read-only arrays and
        mappings, NumPy scalars, and torch tensors that require a gradient.
    stream
        CUDA stream that the caller has ordered the array's work on: an array on a GPU is then not
        asked to synchronise anything. None leaves the order to the array.

    Returns
    -------
    Buffer
        On a GPU, `Buffer.stream` is `stream`, or else one that waits for the producer's own work;
        for host memory it is None.

    Raises
    ------
    BufferMismatch
        It is read-only where `writable`, not contiguous, on another kind of device, or none of
        these protocols.
    """
    if not writable:
        obj = _without_gradient(obj)
    if _is_on_cuda(obj):
        return _from_gpu(obj, pointer_device, writable, stream)
    if _has(obj, "__array_interface__"):
        return _from_numpy(obj, writable)
    try:
        return _from_buffer_protocol(obj, writable)
    except TypeError:
        if not _has(obj, "__dlpack__"):
            raise BufferMismatch(
                f"{_kind(obj)} has neither the buffer protocol, __cuda_array_interface__ nor "
                "__dlpack__; pass an array or a bytearray"
            ) from None
    return _from_dlpack(obj, writable, asked=None, stream=None)


def _has(obj: Any, name: str) -> bool:
    """Whether there is such an attribute, even one that refuses to be read now.

    torch raises RuntimeError from its array interface for tensors that require a gradient, and
    KeyError for its fp8 types.
    """
    try:
        return hasattr(obj, name)
    except (KeyError, RuntimeError, TypeError, ValueError):
        return True


def _without_gradient(obj: Any) -> Any:
    """The same memory without the gradient for whose sake torch refuses every protocol."""
    return obj.detach() if getattr(obj, "requires_grad", False) is True else obj


def _is_on_cuda(obj: Any) -> bool:
    if not _has(obj, "__dlpack_device__"):
        return _has(obj, "__cuda_array_interface__")
    try:
        return device_of(obj)[0]
    except ValueError as error:
        raise BufferMismatch(f"{_kind(obj)}: {error}") from None


def _from_gpu(
    obj: Any, pointer_device: Callable[[int], int | None], writable: bool, stream: int | None
) -> Buffer:
    """Prefer DLPack, whose producers order a stream for us; some types only CUDA arrays carry."""
    refusal: BufferMismatch | None = None
    if _has(obj, "__dlpack__"):
        asked = LEGACY_STREAM if stream is None else NO_SYNCHRONISATION
        try:
            return _from_dlpack(obj, writable, asked, stream or asked)
        except BufferMismatch as error:
            refusal = error
    try:
        interface = obj.__cuda_array_interface__
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise refusal or BufferMismatch(f"{_kind(obj)}: {error}") from error
    return _from_cuda_array(obj, interface, pointer_device, writable, stream)


def _from_dlpack(obj: Any, writable: bool, asked: int | None, stream: int | None) -> Buffer:
    """Describe what the producer exports once it is asked to order the stream `asked`."""
    is_neg = getattr(obj, "is_neg", None)
    if callable(is_neg) and is_neg() is True:  # torch exports such memory as if it were not
        raise BufferMismatch(
            f"{_kind(obj)} has its negative bit set: its memory holds the numbers with the other "
            "sign; pass its resolve_neg()"
        )
    try:
        export = export_dlpack(obj, asked)
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        raise BufferMismatch(f"{_kind(obj)} cannot be exported through DLPack: {error}") from error
    if export.readonly and writable:
        raise _read_only(obj)
    if not export.contiguous:
        raise _not_contiguous(obj)
    device = HOST if export.cuda_index is None else Device("cuda", export.cuda_index)
    return Buffer(export.pointer, export.nbytes, device, (obj, export.capsule), stream)


def _from_cuda_array(
    obj: Any,
    interface: dict[str, Any],
    pointer_device: Callable[[int], int | None],
    writable: bool,
    stream: int | None,
) -> Buffer:
    try:
        pointer, readonly = interface["data"]
        shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    except (KeyError, TypeError, ValueError) as error:
        raise BufferMismatch(f"{_kind(obj)}.__cuda_array_interface__: {error!r}") from error
    if readonly and writable:
        raise _read_only(obj)
    _refuse_objects(obj, dtype)
    strides = interface.get("strides")
    if strides is not None and not is_contiguous(shape, tuple(strides), dtype.itemsize):
        raise _not_contiguous(obj)
    nbytes = math.prod(shape) * dtype.itemsize
    index = pointer_device(pointer) if nbytes else 0
    if index is None:
        raise BufferMismatch(f"{_kind(obj)} says it is on a GPU but points at host memory")
    order = stream or interface.get("stream") or LEGACY_STREAM
    return Buffer(int(pointer or 0), nbytes, Device("cuda", index), obj, order)


def _from_numpy(obj: Any, writable: bool) -> Buffer:
    if writable and isinstance(obj, np.generic):  # its interface is that of a copy
        raise _read_only(obj)
    try:
        array = np.asarray(obj)
    except (KeyError, TypeError, ValueError) as error:
        raise BufferMismatch(f"{_kind(obj)}.__array_interface__: {error}") from error
    _refuse_objects(obj, array.dtype)
    if writable and not array.flags.writeable:
        raise _read_only(obj)
    if not array.flags.c_contiguous:
        raise _not_contiguous(obj)
    pointer = int(array.__array_interface__["data"][0])
    return Buffer(pointer, array.nbytes, HOST, array if array is obj else (obj, array))


def _refuse_objects(obj: Any, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise BufferMismatch(
            f"{_kind(obj)} holds Python objects ({dtype}), which no file can hold; pass an array "
            "of numbers"
        )


def _from_buffer_protocol(obj: Any, writable: bool) -> Buffer:
    view = memoryview(obj)
    if writable and view.readonly:
        raise _read_only(obj)
    if not view.c_contiguous:
        raise _not_contiguous(obj)
    if not view.nbytes:
        return Buffer(0, 0, HOST, view)
    pointer, anchor = address_of(view)
    return Buffer(pointer, view.nbytes, HOST, (obj, anchor))


def _kind(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def _read_only(obj: Any) -> BufferMismatch:
    return BufferMismatch(f"{_kind(obj)} is read-only; pass memory that may be written")


def _not_contiguous(obj: Any) -> BufferMismatch:
    return BufferMismatch(
        f"{_kind(obj)} is not contiguous in C order; pass a contiguous array (or its base)"
    )

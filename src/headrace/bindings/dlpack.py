"""DLPack: read what an exported tensor says of its memory, without consuming the capsule.

Structures and device codes: the DLPack specification, versions 0 and 1 (``dlpack.h``).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

NO_SYNCHRONISATION = -1
"""In place of a stream: the producer makes nothing wait for its work."""

_READ_ONLY = 1
_HOST_KINDS = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA_KINDS = (2, 13)  # kDLCUDA, kDLCUDAManaged

# Prototypes of our own: those that hang on ctypes.pythonapi are shared by the whole process.
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True, slots=True)
class DLPackExport:
    """What a producer exported."""

    pointer: int
    """Address of the first element."""
    nbytes: int
    """Bytes of all elements."""
    contiguous: bool
    """Whether the elements lie one after the other, the last axis fastest."""
    readonly: bool
    """Whether the producer forbids writing; never True for producers older than DLPack 1.0."""
    cuda_index: int | None
    """Ordinal of the CUDA device; None for host memory."""
    capsule: Any = field(repr=False)
    """The capsule: the memory lives while it does."""


def device_of(obj: Any) -> tuple[bool, int]:
    """Whether a DLPack producer's memory is on a CUDA device, and which.

    Raises
    ------
    ValueError
        It is on a device that is neither the host nor CUDA.
    """
    kind, index = obj.__dlpack_device__()
    if int(kind) in _CUDA_KINDS:
        return True, int(index)
    if int(kind) in _HOST_KINDS:
        return False, 0
    raise ValueError(f"DLPack device kind {int(kind)} is neither the host nor CUDA")


def export_dlpack(obj: Any, stream: int | None) -> DLPackExport:
    """Export `obj`.

    Parameters
    ----------
    obj
        A DLPack producer.
    stream
        CUDA stream that the producer makes wait for its own work, or `NO_SYNCHRONISATION`; None
        for host memory.

    Raises
    ------
    BufferError
        The producer cannot export this array (its type, layout or state).
    """
    arguments = {} if stream is None else {"stream": stream}
    try:
        capsule = obj.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # a producer older than DLPack 1.0 does not know max_version
        capsule = obj.__dlpack__(**arguments)
    return _read_capsule(capsule)


def _read_capsule(capsule: Any) -> DLPackExport:
    name = _capsule_name(capsule)
    address = _capsule_pointer(capsule, name)
    if name == b"dltensor_versioned":
        record = _Versioned.from_address(address)
        tensor, readonly = record.tensor, bool(record.flags & _READ_ONLY)
    else:
        tensor, readonly = _Tensor.from_address(address), False
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    bits = math.prod(shape) * tensor.type_bits * tensor.type_lanes
    return DLPackExport(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        nbytes=-(-bits // 8),
        contiguous=strides is None or is_contiguous(shape, strides, 1),
        readonly=readonly,
        cuda_index=tensor.device_index if tensor.device_kind in _CUDA_KINDS else None,
        capsule=capsule,
    )


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    """Whether elements of `unit` stride units lie one after the other, the last axis fastest."""
    if 0 in shape:
        return True
    expected = unit
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True

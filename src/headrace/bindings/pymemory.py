"""Raw memory as Python objects, and Python objects as raw memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np

_PYBUF_WRITE = 0x200
_view_from_memory = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def view_memory(pointer: int, nbytes: int) -> memoryview:
    """Writable bytes at an address of host memory.

    Nothing keeps the memory alive: that is the caller's part, for as long as the view is used.
    """
    view: memoryview = _view_from_memory(pointer, nbytes, _PYBUF_WRITE)
    return view


def address_of(view: memoryview) -> tuple[int, object]:
    """Address of a contiguous view of at least one byte, and what keeps it in place.

    A view that is read-only stays so: nothing may be written at its address.
    """
    anchor = np.frombuffer(view, np.uint8)
    return int(anchor.__array_interface__["data"][0]), anchor


def map_pages(nbytes: int) -> memoryview:
    """Fresh memory at a page boundary, already backed by (huge, where possible) pages.

    It lives as long as the view and what is cast from it.
    """
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Huge pages make page-locking several times cheaper; kernels without them say EINVAL.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE] = 0
    return view

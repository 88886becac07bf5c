from __future__ import annotations

import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest

from headrace.bindings.pymemory import address_of, map_pages, view_memory


def test_view_writes_to_the_memory_at_the_address() -> None:
    memory = (ctypes.c_ubyte * 10)()
    view = view_memory(ctypes.addressof(memory) + 2, 3)
    assert (view.nbytes, view.readonly, view.format) == (3, False, "B")
    view[:] = b"abc"
    assert bytes(memory) == b"\0\0abc\0\0\0\0\0"


def test_address_is_where_numpy_says_and_keeps_the_owner_alive() -> None:
    class Owner(bytearray):
        pass

    owner = Owner(b"0123456789")
    alive = weakref.ref(owner)
    expected = np.frombuffer(owner, np.uint8).ctypes.data
    address, anchor = address_of(memoryview(owner)[3:])
    assert address == expected + 3
    del owner
    gc.collect()
    assert alive() is not None
    assert ctypes.string_at(address, 2) == b"34"
    del anchor
    gc.collect()
    assert alive() is None


def test_address_of_memory_that_may_not_be_written_is_that_of_its_bytes() -> None:
    address, anchor = address_of(memoryview(b"0123456789")[3:])
    assert ctypes.string_at(address, 7) == b"3456789"
    del anchor


def test_memory_whose_address_is_held_cannot_move() -> None:
    memory = bytearray(b"abc")
    _, anchor = address_of(memoryview(memory))
    with pytest.raises(BufferError):
        memory.append(1)
    del anchor
    memory.append(1)


@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 3 * mmap.PAGESIZE, 4 << 20])
def test_mapped_pages_are_zero_writable_and_start_at_a_page(nbytes: int) -> None:
    view = map_pages(nbytes)
    address, _ = address_of(view)
    assert (len(view), address % mmap.PAGESIZE, view.readonly) == (nbytes, 0, False)
    assert not np.frombuffer(view, np.uint8).any()
    view[-1:] = b"x"
    assert ctypes.string_at(address + nbytes - 1, 1) == b"x"


def test_mapped_pages_live_as_long_as_a_part_of_the_view() -> None:
    part = map_pages(mmap.PAGESIZE)[10:20]
    gc.collect()
    part[:] = b"0123456789"
    assert bytes(part) == b"0123456789"

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bindings.dlpack import device_of, export_dlpack, is_contiguous
from tests.support import FakeProducer


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((2, 3), None, True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 1, 3), (3, 77, 1), True),
        ((), None, True),
        ((0, 3), (3, 1), True),
    ],
)
def test_export_tells_address_length_and_layout(
    versioned: bool,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    contiguous: bool,
) -> None:
    producer = FakeProducer(
        0x7000, shape, strides=strides, bits=16, byte_offset=64, versioned=versioned
    )
    export = export_dlpack(producer, stream=1)
    assert export.pointer == 0x7000 + 64
    assert export.nbytes == 2 * int(np.prod(shape))
    assert (export.contiguous, export.cuda_index, export.readonly) == (contiguous, 0, False)
    assert producer.streams == [1]


def test_read_only_flag_is_read() -> None:
    assert export_dlpack(FakeProducer(0x7000, (4,), readonly=True), stream=1).readonly


def test_bits_and_lanes_make_whole_bytes() -> None:
    assert export_dlpack(FakeProducer(1, (3,), bits=4), stream=1).nbytes == 2
    assert export_dlpack(FakeProducer(1, (3,), bits=32, lanes=4), stream=1).nbytes == 48


def test_producer_older_than_version_one_is_asked_its_own_way() -> None:
    class Old(FakeProducer):
        def __dlpack__(self, *, stream: int | None = None) -> Any:  # type: ignore[override]
            return super().__dlpack__(stream=stream)

    old = Old(0x7000, (4,), versioned=False)
    assert export_dlpack(old, stream=1).nbytes == 4
    assert old.streams == [1]


@pytest.mark.parametrize(
    ("kind", "device"), [(1, (False, 0)), (3, (False, 0)), (2, (True, 5)), (13, (True, 5))]
)
def test_device_is_read_from_its_code(kind: int, device: tuple[bool, int]) -> None:
    assert device_of(FakeProducer(1, (1,), device=(kind, 5))) == device


@pytest.mark.parametrize("kind", [4, 7, 10, 14])
def test_device_that_is_neither_host_nor_cuda_is_a_value_error(kind: int) -> None:
    with pytest.raises(ValueError, match=f"device kind {kind} is neither"):
        device_of(FakeProducer(1, (1,), device=(kind, 0)))


def test_export_of_a_numpy_array_is_released_with_it() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    before = sys.getrefcount(array)
    export = export_dlpack(array, None)
    assert (export.pointer, export.nbytes) == (array.ctypes.data, 12)
    assert (export.cuda_index, export.contiguous) == (None, True)
    assert sys.getrefcount(array) > before
    del export
    gc.collect()
    assert sys.getrefcount(array) == before


@given(
    shape=st.lists(st.integers(0, 3), max_size=4).map(tuple),
    layout=st.sampled_from(["C", "F", "step", "back", "T"]),
)
def test_contiguity_is_what_numpy_says(shape: tuple[int, ...], layout: str) -> None:
    array = np.zeros(shape, np.int32, order="F" if layout == "F" else "C")
    if shape and layout == "step":
        array = np.zeros((*shape[:-1], 2 * shape[-1]), np.int32)[..., ::2]
    elif shape and layout == "back":
        array = array[..., ::-1]
    elif layout == "T":
        array = array.T
    assert is_contiguous(array.shape, array.strides, 4) == array.flags.c_contiguous

"""CuPy on a real GPU."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy
from safetensors.numpy import save_file

import headrace
import headrace.cupy

pytestmark = pytest.mark.gpu


def _tensors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    kinds = ("u1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "?")
    return {
        kind: generator.integers(0, 2, (5, 1001 + index)).astype(kind)
        for index, kind in enumerate(kinds)
    }


@pytest.mark.parametrize("route", ["auto", "cached", "direct"])
def test_tensors_arrive_as_numpy_wrote_them(tmp_path: Path, route: str) -> None:
    path = tmp_path / "model.safetensors"
    tensors = _tensors()
    save_file(tensors, path)
    found = headrace.cupy.load(path, route=route)
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        assert isinstance(found[name], cupy.ndarray)
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name].get(), array)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_ml_dtypes_arrive_or_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "raw"
    dtype = np.dtype(getattr(ml_dtypes, name))
    array = np.arange(256).astype(np.uint8)[: 256 // dtype.itemsize * dtype.itemsize].view(dtype)
    path.write_bytes(array.tobytes())
    try:
        cupy.empty(1, dtype)
    except (TypeError, ValueError):
        with pytest.raises(headrace.FormatError, match="CuPy"):
            headrace.cupy.read(path, dtype=dtype)
        return
    found = headrace.cupy.read(path, dtype=dtype)
    assert found.dtype == dtype
    assert found.get().tobytes() == array.tobytes()


def test_read_into_a_cupy_array_is_ordered_on_its_stream(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    content = os.urandom(8 << 20)
    path.write_bytes(content)
    with cupy.cuda.Stream(non_blocking=True):
        array = cupy.zeros(len(content), cupy.uint8)
        for _ in range(200):
            array += 1
        headrace.read_into(array, path)
        assert array.get().tobytes() == content


def test_fortran_order_npy_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "f.npy"
    array = np.asfortranarray(np.arange(1000 * 7, dtype="<f4").reshape(1000, 7))
    np.save(path, array)
    found = headrace.cupy.read(path)
    assert found.flags.f_contiguous
    assert np.array_equal(found.get(), array)


def test_strided_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(1000))
    with pytest.raises(headrace.BufferMismatch):
        headrace.read_into(cupy.zeros((10, 10), cupy.uint8)[:, ::2], path)

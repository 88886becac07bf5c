"""NumPy arrays become the files that the official writer makes of them."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.numpy import load_file, save_file

import headrace as hr
import headrace.numpy as hn

OFFICIAL_CODES = "?bBhHiIlLqQefdF"
ML_DTYPES = (
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz"),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter("__metadata__".__ne__)


def noise(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    made = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * made.itemsize
    content = np.random.default_rng(nbytes).integers(0, 2, nbytes, np.uint8)
    made_of: np.ndarray = content.view(made).reshape(shape)
    return made_of


DTYPES = st.sampled_from(
    [
        *(np.dtype(code) for code in OFFICIAL_CODES),
        *(np.dtype(code).newbyteorder(">") for code in "hIqefdF"),
        *(np.dtype(getattr(ml_dtypes, name)) for name in ML_DTYPES),
    ]
)
ARRAYS = st.builds(noise, DTYPES, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))


@settings(deadline=None, max_examples=80)
@given(
    arrays=st.dictionaries(NAMES, ARRAYS, min_size=1, max_size=5),
    metadata=st.none() | st.dictionaries(NAMES, NAMES, max_size=1),
    positional=st.booleans(),
)
def test_file_is_the_official_one_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory,
    arrays: dict[str, np.ndarray],
    metadata: dict[str, str] | None,
    positional: bool,
) -> None:
    folder = tmp_path_factory.mktemp("numpy")
    if positional:
        hn.save_file(arrays, folder / "ours", metadata)
    else:
        hn.save_file(arrays, str(folder / "ours"), metadata=metadata)
    save_file(arrays, folder / "official", metadata)
    assert (folder / "ours").read_bytes() == (folder / "official").read_bytes()


@settings(deadline=None, max_examples=40)
@given(
    array=ARRAYS.filter(lambda array: array.ndim > 0),
    axis=st.integers(0, 2),
    step=st.sampled_from([-1, 2, 3]),
    order=st.sampled_from("CF"),
)
def test_array_that_is_not_contiguous_keeps_its_values(
    tmp_path_factory: pytest.TempPathFactory,
    array: np.ndarray,
    axis: int,
    step: int,
    order: Any,
) -> None:
    folder = tmp_path_factory.mktemp("numpy")
    steps = tuple(
        slice(None, None, step if n == axis % array.ndim else 1) for n in range(array.ndim)
    )
    strided = np.asarray(array, order=order)[steps]
    hn.save_file({"a": strided, "t": array.T}, folder / "ours")
    packed = {"a": np.array(strided, order="C"), "t": np.array(array.T, order="C")}
    save_file(packed, folder / "official")
    assert (folder / "ours").read_bytes() == (folder / "official").read_bytes()


def test_what_is_saved_is_not_changed(tmp_path: Path) -> None:
    array = np.arange(24, dtype=">i4").reshape(4, 6)[:, ::2]
    before = array.copy()
    array.flags.writeable = False
    hn.save_file({"a": array}, tmp_path / "a")
    assert np.array_equal(array, before)
    assert array.dtype == np.dtype(">i4")
    assert np.array_equal(load_file(tmp_path / "a")["a"], before)


def test_views_that_share_memory_are_saved_apart(tmp_path: Path) -> None:
    whole = np.arange(100.0)
    tensors = {"whole": whole, "part": whole[10:20], "again": whole}
    hn.save_file(tensors, tmp_path / "ours")
    save_file(tensors, tmp_path / "official")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "official").read_bytes()


def test_mapping_that_is_no_dict_is_taken_as_the_official_writer_does(tmp_path: Path) -> None:
    hn.save_file(collections.UserDict(a=np.zeros(3)), tmp_path / "ours")
    assert list(load_file(tmp_path / "ours")) == ["a"]


def test_memory_mapped_arrays_are_saved(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    hn.save_file({"a": mapped}, tmp_path / "a")
    assert np.array_equal(load_file(tmp_path / "a")["a"], np.arange(1000))


@pytest.mark.parametrize(
    "array",
    [
        np.array([None, 1]),
        np.array(["text"]),
        np.array([b"text"]),
        np.array([(1, 2.0)], [("a", "<i4"), ("b", "<f8")]),
        np.array(["2026-11-29"], "M8[D]"),
        np.zeros(3, np.complex128),
        np.zeros(3, np.longdouble),
        np.zeros(3, ml_dtypes.int4),
        np.array(["a"], np.dtypes.StringDType()),
        np.array([(None,)], [("a", "O")]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_type_that_safetensors_lacks_is_a_format_error_that_names_the_tensor(
    tmp_path: Path, array: np.ndarray
) -> None:
    with pytest.raises(hr.FormatError, match="tensor 'odd'"):
        hn.save_file({"fine": np.zeros(2), "odd": array}, tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([np.zeros(2)], "tensors is list; pass a dict of names to numpy.ndarray"),
        (np.zeros(2), "tensors is ndarray; pass a dict"),
        ({"a": [1, 2]}, "tensor 'a' is builtins.list; pass numpy.ndarray"),
        ({"a": np.float32(1)}, r"tensor 'a' is numpy\.float32; pass numpy\.ndarray"),
        ({"a": None}, "tensor 'a' is builtins.NoneType"),
    ],
    ids=repr,
)
def test_what_is_no_dict_of_arrays_is_a_value_error(
    tmp_path: Path, tensors: Any, message: str
) -> None:
    for save in (hn.save_file, hn.save):
        with pytest.raises(ValueError, match=message):
            save(tensors, tmp_path / "a")
    assert os.listdir(tmp_path) == []

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headrace.errors import FormatError
from headrace.formats.dtypes import dtype_name, is_subbyte, itembits, numpy_dtype, tensor_nbytes

PAIRS = (
    ("BOOL", np.dtype(np.bool_), 8),
    ("U8", np.dtype(np.uint8), 8),
    ("I8", np.dtype(np.int8), 8),
    ("U16", np.dtype(np.uint16), 16),
    ("I16", np.dtype(np.int16), 16),
    ("F16", np.dtype(np.float16), 16),
    ("BF16", np.dtype(ml_dtypes.bfloat16), 16),
    ("U32", np.dtype(np.uint32), 32),
    ("I32", np.dtype(np.int32), 32),
    ("F32", np.dtype(np.float32), 32),
    ("U64", np.dtype(np.uint64), 64),
    ("I64", np.dtype(np.int64), 64),
    ("F64", np.dtype(np.float64), 64),
    ("C64", np.dtype(np.complex64), 64),
    ("F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn), 8),
    ("F8_E5M2", np.dtype(ml_dtypes.float8_e5m2), 8),
    ("F8_E8M0", np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    ("F8_E4M3FNUZ", np.dtype(ml_dtypes.float8_e4m3fnuz), 8),
    ("F8_E5M2FNUZ", np.dtype(ml_dtypes.float8_e5m2fnuz), 8),
    ("<c16", np.dtype(np.complex128), 128),
    (">f4", np.dtype(">f4"), 32),
    (">i8", np.dtype(">i8"), 64),
    ("<U3", np.dtype("<U3"), 96),
    ("|S5", np.dtype("S5"), 40),
    ("|V7", np.dtype("V7"), 56),
    ("<M8[ns]", np.dtype("M8[ns]"), 64),
    ("<m8[25s]", np.dtype("m8[25s]"), 64),
    ("[('x', '<f4')]", np.dtype([("x", "<f4")]), 32),
)


@pytest.mark.parametrize(("name", "dtype", "bits"), PAIRS)
def test_names_and_dtypes_are_each_others_inverse(name: str, dtype: np.dtype, bits: int) -> None:
    assert numpy_dtype(name) == dtype
    assert dtype_name(dtype) == name
    assert itembits(name) == bits
    assert not is_subbyte(name)


@settings(deadline=None)
@given(
    st.one_of(
        npst.scalar_dtypes(),
        npst.byte_string_dtypes(),
        npst.unicode_string_dtypes(),
        npst.array_dtypes(allow_subarrays=True),
    )
)
def test_any_named_dtype_comes_back(dtype: np.dtype) -> None:
    if dtype.subdtype is not None:
        with pytest.raises(FormatError):
            dtype_name(dtype)
    else:
        assert numpy_dtype(dtype_name(dtype)) == dtype


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "u1"), ("b", "<f8")], align=True),
        np.dtype([("a", "<f4", (2, 3)), ("b", [("c", ">i2")])]),
        np.dtype([(("a title", "a"), "<f4")]),
        np.dtype([("naïve", "<f4"), ("名", "<i2")]),
        np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [4], "itemsize": 32}),
        np.dtype([]),
    ],
)
def test_records_with_padding_titles_and_subarrays_come_back(dtype: np.dtype) -> None:
    assert numpy_dtype(dtype_name(dtype)) == dtype


@pytest.mark.parametrize(("name", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_packed_type_has_bits_but_no_numpy_dtype(name: str, bits: int) -> None:
    assert itembits(name) == bits
    assert is_subbyte(name)
    with pytest.raises(FormatError, match="raw bytes"):
        numpy_dtype(name)


@pytest.mark.parametrize(
    "name",
    ["", "F99", "U4", "f4", "float32", "F8", "<x4", "[", "[(", "[('x',)]", "(2,)<f4", "<f4\0"],
)
def test_unknown_name_is_a_format_error(name: str) -> None:
    for function in (numpy_dtype, itembits, is_subbyte):
        with pytest.raises(FormatError, match="unknown"):
            function(name)


def test_descriptor_is_a_literal_and_never_evaluated() -> None:
    with pytest.raises(FormatError, match="unknown"):
        numpy_dtype("[__import__('os').getpid()]")


@pytest.mark.parametrize(("left", "right"), [("[", "]"), ("-", ""), ("[('x', ", ")]"), ("[", "")])
@pytest.mark.parametrize("depth", [80, 3_000, 9_000, 100_000])
def test_deeply_nested_descriptor_is_a_format_error(left: str, right: str, depth: int) -> None:
    with pytest.raises(FormatError, match="unknown"):
        numpy_dtype(f"[{left * depth}1{right * depth}]")


@pytest.mark.parametrize(
    "name", ["[()]", "[('x', ())]", "[1]", "[('x', '|u1', -1)]", f"[('x', '|u1', {2**70})]"]
)
def test_list_that_describes_no_record_is_a_format_error(name: str) -> None:
    with pytest.raises(FormatError, match="unknown"):
        numpy_dtype(name)


@pytest.mark.parametrize("name", ["|O", "[('x', '|O')]"])
def test_python_objects_are_a_format_error(name: str) -> None:
    with pytest.raises(FormatError, match="objects"):
        numpy_dtype(name)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(object),
        np.dtype([("x", object)]),
        np.dtypes.StringDType(),
        np.dtype((np.float32, (2,))),
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]}),
        np.dtype(ml_dtypes.int4),
        np.dtype(ml_dtypes.float4_e2m1fn),
        np.dtype(ml_dtypes.bfloat16).newbyteorder(">"),
    ],
)
def test_dtype_without_a_name_is_a_format_error(dtype: np.dtype) -> None:
    with pytest.raises(FormatError):
        dtype_name(dtype)


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [
        ("F32", (), 4),
        ("F32", (2, 3), 24),
        ("F32", (2, 0, 3), 0),
        ("F4", (4,), 2),
        ("F6_E2M3", (2, 4), 6),
        ("<U0", (7,), 0),
        ("U8", (2**63 - 1,), 2**63 - 1),
    ],
)
def test_tensor_nbytes_is_what_the_elements_take(
    name: str, shape: tuple[int, ...], nbytes: int
) -> None:
    assert tensor_nbytes(name, shape) == nbytes


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("F32", (2, -1), "negative"),
        ("U8", (2**63,), "cannot address"),
        ("F32", (2**40, 2**40), "cannot address"),
        ("F32", (0, 2**62, 8), "cannot address"),
        ("F4", (3,), "whole bytes"),
        ("F6_E3M2", (2,), "whole bytes"),
        ("F99", (2,), "unknown"),
    ],
)
def test_impossible_shape_is_a_format_error(name: str, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        tensor_nbytes(name, shape)


def test_importing_the_formats_imports_no_library_of_a_format() -> None:
    code = (
        "import sys, headrace.formats.checkpoint, headrace.formats.npy, headrace.formats.raw\n"
        "from headrace.formats.dtypes import numpy_dtype\n"
        "numpy_dtype('F32')\n"
        "print([name for name in ('safetensors', 'ml_dtypes', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

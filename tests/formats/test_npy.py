from __future__ import annotations

import io
import math
import os
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog
from headrace.formats.dtypes import numpy_dtype
from headrace.formats.npy import read_catalog
from headrace.testing import FormatSuite


class TestNpy(FormatSuite):
    dtypes = (
        *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
        *("F16", "F32", "F64", "C64", "<c16", ">f4", ">i2", "<U3", "|S2", "|V3", "<M8[ns]"),
        *("[('x', '<f4'), ('y', '>i2', (2,))]", "[('a', '|u1'), ('', '|V7'), ('b', '<f8')]"),
    )
    holds_one_unnamed = True
    holds_fortran = True
    accepts_trailing_bytes = True

    def write(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        with path.open("wb") as file:
            np.save(file, arrays[""])

    def read_catalog(self, path: str) -> Catalog:
        return read_catalog(path)


def write_version(path: Path, array: np.ndarray, version: tuple[int, int]) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version)


def write_header(
    path: Path,
    header: str | bytes,
    payload: bytes = b"",
    version: tuple[int, int] = (1, 0),
    header_nbytes: int | None = None,
) -> None:
    text = header.encode("utf-8") if isinstance(header, str) else header
    length = len(text) if header_nbytes is None else header_nbytes
    path.write_bytes(
        np.lib.format.magic(*version)
        + struct.pack("<H" if version == (1, 0) else "<I", length)
        + text
        + payload
    )


def header_of(descr: str = "'|u1'", order: str = "False", shape: str = "(4,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def load_from_catalog(path: Path) -> np.ndarray:
    """What a loader makes of the catalog."""
    (spec,) = read_catalog(str(path)).tensors
    assert spec.name == ""
    with path.open("rb") as file:
        stored = os.pread(file.fileno(), spec.file_range.nbytes, spec.file_range.start)
    array = np.ndarray(spec.shape, numpy_dtype(spec.dtype), bytearray(stored), order=spec.order)
    assert array.nbytes == spec.file_range.nbytes
    return array


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


@settings(deadline=None)
@given(
    array=npst.arrays(
        st.one_of(npst.scalar_dtypes(), npst.array_dtypes(allow_subarrays=False)),
        npst.array_shapes(min_dims=0, min_side=0, max_side=4),
    ),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    fortran=st.booleans(),
)
def test_every_version_and_order_equals_np_load(
    tmp_path_factory: pytest.TempPathFactory,
    array: np.ndarray,
    version: tuple[int, int],
    fortran: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.npy"
    try:
        write_version(path, np.asfortranarray(array) if fortran else array, version)
    except UnicodeEncodeError:
        version = (3, 0)
        write_version(path, array, version)
    assert_same(load_from_catalog(path), np.load(path))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.empty((0,), np.int16),
        np.empty((3, 0, 2), np.complex128),
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
        np.arange(3, dtype=">u2"),
        np.array(["a", "bcd"]),
        np.array(["", ""], "U0"),
        np.zeros(3, "V0"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_plain_arrays_equal_np_load(
    tmp_path: Path, array: np.ndarray, version: tuple[int, int]
) -> None:
    path = tmp_path / "plain.npy"
    write_version(path, array, version)
    assert_same(load_from_catalog(path), np.load(path))


def test_field_names_beyond_latin_1_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "names.npy"
    dtype = np.dtype(
        [("重み", "<f4"), ("a\\b", "<i2"), ("naïve😀", "|u1"), ("\\u00e9é\\名", "<f8")]
    )
    array = np.arange(3).astype(np.int32)
    records = np.zeros(3, dtype)
    records["重み"] = array
    with pytest.warns(UserWarning, match="format 3.0"):
        np.save(path, records)
    assert path.read_bytes()[6:8] == b"\x03\x00"
    found = load_from_catalog(path)
    assert found.dtype.names == dtype.names
    assert_same(found, np.load(path))


@pytest.mark.parametrize("name", ["名", "é", "😀"])
@pytest.mark.parametrize("length", [500, 3_250, 3_400, 9_000, 11_000])
def test_long_version_3_headers_are_read_as_far_as_np_load_reads_them(
    tmp_path: Path, name: str, length: int
) -> None:
    path = tmp_path / "long.npy"
    write_header(path, header_of(f"[('{name * length}', '|u1')]"), b"abcd", (3, 0))
    try:
        wanted = np.load(path)
    except ValueError:
        with pytest.raises(FormatError, match=r"large|EOF"):
            read_catalog(str(path))
    else:
        assert_same(load_from_catalog(path), wanted)


def test_header_from_python_2_is_read_with_numpys_warning(tmp_path: Path) -> None:
    path = tmp_path / "old.npy"
    write_header(path, header_of(shape="(4L,)"), b"abcd")
    with pytest.warns(UserWarning, match="Python 2"):
        found = load_from_catalog(path)
    assert found.tobytes() == b"abcd"


def test_ml_dtypes_are_plain_bytes_as_for_np_load(tmp_path: Path) -> None:
    path = tmp_path / "bf16.npy"
    array = np.arange(4).astype(ml_dtypes.bfloat16)
    np.save(path, array)
    found = load_from_catalog(path)
    assert_same(found, np.load(path))
    np.testing.assert_array_equal(found.view(ml_dtypes.bfloat16), array)


class Bomb:
    """Tells when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (os.environ["HEADRACE_TEST_BOMB"],)


@pytest.mark.parametrize("descr", ["'|O'", "[('x', '|O')]", "[('x', [('y', '|u1'), ('z', 'O')])]"])
def test_pickles_are_a_format_error_and_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descr: str
) -> None:
    crater = tmp_path / "crater"
    monkeypatch.setenv("HEADRACE_TEST_BOMB", str(crater))
    path = tmp_path / "objects.npy"
    write_header(path, header_of(descr, shape="(1,)"), pickle.dumps(Bomb()) * 9)
    with pytest.raises(FormatError, match=r"(?i)objects"):
        read_catalog(str(path))
    assert not crater.exists()


def test_object_array_that_numpy_saved_is_a_format_error(tmp_path: Path) -> None:
    path = tmp_path / "objects.npy"
    np.save(path, np.array([{"a": 1}, None]), allow_pickle=True)
    with pytest.raises(FormatError, match="pickles"):
        read_catalog(str(path))


FORGED = {
    "negative axis": header_of(shape="(-4,)"),
    "two negative axes": header_of(shape="(-2, -2)"),
    "more bytes than the file": header_of(shape="(5,)"),
    "product that overflows": header_of(shape="(2**63, 2)".replace("2**63", str(2**63))),
    "product that wraps to 4": header_of(shape=f"({2**62 + 1}, 4)"),
    "product that wraps to 0": header_of(shape=f"({2**32}, {2**32})"),
    "empty but too long": header_of(shape=f"(0, {2**62}, 8)"),
    "axis of 4,000 digits": header_of(shape=f"({'9' * 4_000}, {'9' * 4_000})"),
    "axis of 5,000 digits": header_of(shape=f"({'9' * 5_000},)"),
    "truth value for an axis": header_of(shape="(True, 4)"),
    "fractional axis": header_of(shape="(4.0,)"),
    "number for a shape": header_of(shape="4"),
    "list for a shape": header_of(shape="[4]"),
    "text for an order": header_of(order="'C'"),
    "number for an order": header_of(order="0"),
    "unknown type": header_of("'<x4'"),
    "empty type": header_of("''"),
    "number for a type": header_of("4"),
    "none for a type": header_of("None"),
    "empty tuple for a type": header_of("()"),
    "bare subarray for a type": header_of("('|u1', (2,))"),
    "field without type": header_of("[('x',)]"),
    "field with negative shape": header_of("[('x', '|u1', (-2,))]"),
    "field with huge shape": header_of(f"[('x', '|u1', ({2**40}, {2**40}))]"),
    "same field twice": header_of("[('x', '|u1'), ('x', '|u1')]"),
    "missing key": "{'descr': '|u1', 'shape': (4,)}",
    "one key more": header_of().replace("{", "{'more': 1, "),
    "mixed keys": header_of().replace("{", "{1: 1, "),
    "key that cannot be one": header_of().replace("{", "{[]: 1, "),
    "no dictionary": "[1, 2]",
    "no literal": "{'descr': __import__('os').getcwd()}",
    "no Python": "{'descr': ",
    "open bracket": "(((",
    "bad indent": "  1\n 2\n",
    "null byte": header_of() + "\0",
    "deep nesting": "(" * 9_000,
    "deep sum": "-" * 3_000 + "1",
    "deeper sum": "-" * 9_000 + "1",
    "nothing": "",
    "too long to be parsed": header_of() + " " * 10_000,
}


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("attack", FORGED)
@pytest.mark.filterwarnings("ignore")
def test_forged_header_is_a_format_error(
    tmp_path: Path, attack: str, version: tuple[int, int]
) -> None:
    path = tmp_path / "forged.npy"
    write_header(path, FORGED[attack], b"abcd", version)
    with pytest.raises(FormatError) as caught:
        read_catalog(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("version", [(2, 0), (3, 0)])
@pytest.mark.parametrize("length", [200, 2**31, 2**32 - 1])
def test_forged_header_length_is_a_format_error(
    tmp_path: Path, version: tuple[int, int], length: int
) -> None:
    path = tmp_path / "forged.npy"
    write_header(path, header_of(), b"abcd", version, length)
    with pytest.raises(FormatError, match="EOF"):
        read_catalog(str(path))


@pytest.mark.parametrize("version", [(0, 0), (1, 1), (2, 1), (4, 0), (255, 255)])
def test_unknown_version_is_a_format_error(tmp_path: Path, version: tuple[int, int]) -> None:
    path = tmp_path / "version.npy"
    write_header(path, header_of(), b"abcd", version)
    with pytest.raises(FormatError, match="version"):
        read_catalog(str(path))


def test_version_3_header_that_is_no_utf8_is_a_format_error(tmp_path: Path) -> None:
    path = tmp_path / "latin.npy"
    write_header(path, header_of("[('\xe9', '|u1')]").encode("latin-1"), b"abcd", (3, 0))
    with pytest.raises(FormatError, match="utf-8"):
        read_catalog(str(path))


def test_archive_of_arrays_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "several.npz"
    np.savez(path, a=np.arange(3))
    with pytest.raises(FormatError, match="npz"):
        read_catalog(str(path))


def test_truncated_file_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "truncated.npy"
    np.save(path, np.zeros(100))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"927 bytes.*800 bytes from byte 128.*928.*truncated"):
        read_catalog(str(path))


def test_bytes_behind_the_array_are_ignored_as_by_np_load(tmp_path: Path) -> None:
    path = tmp_path / "two.npy"
    with path.open("wb") as file:
        np.save(file, np.arange(4))
        np.save(file, np.arange(5))
    assert_same(load_from_catalog(path), np.load(path))


def test_terabyte_file_is_described_without_touching_its_payload(tmp_path: Path) -> None:
    path = tmp_path / "sparse.npy"
    write_header(path, header_of(shape=f"({1 << 40},)"))
    start = path.stat().st_size
    with path.open("r+b") as file:
        try:
            file.truncate(start + (1 << 40))
        except OSError:
            pytest.skip("this file system holds no file of 1 TiB")
    (spec,) = read_catalog(str(path)).tensors
    assert (spec.file_range.start, math.prod(spec.shape)) == (start, 1 << 40)


def test_header_alone_suffices_for_an_empty_array(tmp_path: Path) -> None:
    path = tmp_path / "empty.npy"
    stream = io.BytesIO()
    np.save(stream, np.empty((0, 3)))
    path.write_bytes(stream.getvalue())
    assert load_from_catalog(path).shape == (0, 3)

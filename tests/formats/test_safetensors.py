from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog
from headrace.formats.dtypes import is_subbyte, itembits, numpy_dtype
from headrace.formats.safetensors import read_catalog
from headrace.testing import FormatSuite
from headrace.types import ByteRange


class TestSafetensors(FormatSuite):
    def write(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        # Not safetensors.numpy.save_file: releases differ in the ml_dtypes that they take.
        write_by_hand(
            path,
            {
                name: (safetensors_name(array.dtype), array.shape, array.tobytes())
                for name, array in arrays.items()
            },
        )

    def read_catalog(self, path: str) -> Catalog:
        return read_catalog(path)


class TestSafetensorsAsItsOwnLibraryWritesIt(FormatSuite):
    dtypes = (
        *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
        *("F16", "F32", "F64", "C64"),
    )

    def write(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        safetensors.numpy.save_file(dict(arrays), path)

    def read_catalog(self, path: str) -> Catalog:
        return read_catalog(path)


def safetensors_name(dtype: np.dtype) -> str:
    names = {
        "bool": "BOOL",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
    }
    kinds = {"u": "U", "i": "I", "f": "F", "c": "C"}
    return names.get(dtype.name) or f"{kinds[dtype.kind]}{dtype.itemsize * 8}"


def write_by_hand(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, payload = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = entry(dtype, shape, len(payload), len(payload) + len(content))
        payload += content
    write_header(path, header, payload)


def write_header(
    path: Path, header: object, payload: bytes = b"", header_nbytes: int | None = None
) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_nbytes is None else header_nbytes
    path.write_bytes(struct.pack("<Q", length) + text + payload)


def entry(dtype: str, shape: tuple[Any, ...], start: Any, stop: Any) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_arrays_equal_those_of_the_official_loader(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    random = np.random.default_rng(1)
    arrays = {
        "weight": random.random((3, 5), dtype=np.float32),
        "bias": random.random(5),
        "mask": np.array([True, False, True]),
        "step": np.array(7),
        "nothing": np.zeros((0, 4), np.float16),
    }
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np", "motto": "grüß"})
    catalog = read_catalog(str(path))
    content = path.read_bytes()
    official = safetensors.numpy.load_file(path)
    assert {spec.name for spec in catalog.tensors} == set(official)
    for spec in catalog.tensors:
        found = np.frombuffer(
            content,
            numpy_dtype(spec.dtype),
            math.prod(spec.shape),
            spec.file_range.start if spec.file_range.nbytes else 0,
        ).reshape(spec.shape)
        assert found.dtype == official[spec.name].dtype
        np.testing.assert_array_equal(found, official[spec.name])
    assert dict(catalog.metadata) == {"format": "np", "motto": "grüß"}


def test_bf16_and_fp8_equal_those_of_the_official_torch_loader(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "torch.safetensors"
    values = torch.linspace(-3, 3, 24).reshape(4, 6)
    kinds = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    save_file({name: values.to(kind) for name, kind in kinds.items()}, path)
    official = load_file(path)
    content = path.read_bytes()
    for spec in read_catalog(str(path)).tensors:
        assert spec.dtype == spec.name
        loaded = official[spec.name]
        stored = content[spec.file_range.start : spec.file_range.stop]
        assert stored == loaded.view(torch.uint8).numpy().tobytes()
        found = np.frombuffer(stored, numpy_dtype(spec.dtype)).reshape(spec.shape)
        np.testing.assert_array_equal(found.astype(np.float32), loaded.float().numpy())


def test_ml_dtypes_written_by_the_official_library_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bf16.safetensors"
    array = np.arange(6).astype(ml_dtypes.bfloat16)
    try:
        safetensors.numpy.save_file({"x": array}, path)
    except safetensors.SafetensorError:
        pytest.skip("this safetensors does not write ml_dtypes")
    (spec,) = read_catalog(str(path)).tensors
    assert spec.dtype == "BF16"
    assert numpy_dtype(spec.dtype) == array.dtype


def test_empty_tensors_sort_before_their_neighbour_and_move_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empties.safetensors"
    header = {
        "a": entry("F32", (1,), 0, 4),
        "z": entry("F32", (0,), 4, 4),
        "b": entry("F32", (1,), 4, 8),
        "y": entry("F32", (0, 3), 0, 0),
        "x": entry("F64", (0,), 8, 8),
    }
    write_header(path, header, bytes(range(8)))
    specs = read_catalog(str(path)).tensors
    base = path.stat().st_size - 8
    assert [spec.name for spec in specs] == ["y", "a", "z", "b", "x"]
    for spec in specs:
        placed = [spec.file_range.start - base, spec.file_range.stop - base]
        assert placed == header[spec.name]["data_offsets"]


def test_order_of_the_header_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "unordered.safetensors"
    write_header(
        path,
        {"late": entry("U8", (2,), 3, 5), "early": entry("U8", (3,), 0, 3)},
        b"eeell",
    )
    early, late = read_catalog(str(path)).tensors
    content = path.read_bytes()
    assert content[early.file_range.start : early.file_range.stop] == b"eee"
    assert content[late.file_range.start : late.file_range.stop] == b"ll"


@pytest.mark.parametrize(("dtype", "nbytes"), [("F4", 2), ("F6_E2M3", 3), ("F6_E3M2", 3)])
def test_packed_tensor_has_its_place(tmp_path: Path, dtype: str, nbytes: int) -> None:
    path = tmp_path / "packed.safetensors"
    write_by_hand(path, {"a": (dtype, (4,), b"x" * nbytes), "b": ("U8", (1,), b"y")})
    a, b = read_catalog(str(path)).tensors
    assert is_subbyte(a.dtype)
    assert (a.shape, a.file_range.nbytes) == ((4,), nbytes)
    assert b.file_range.start == a.file_range.stop


def test_every_type_that_the_library_accepts_is_known_here(tmp_path: Path) -> None:
    path = tmp_path / "each.safetensors"
    write_by_hand(path, {"a": ("F99", (1,), b"x")})
    with pytest.raises(FormatError) as caught:
        read_catalog(str(path))
    listed = str(caught.value).partition("expected one of ")[2].partition(" at line")[0]
    names = [name.strip(" `") for name in listed.split(",")]
    assert {"F32", "BF16", "F8_E8M0", "F4"} <= set(names)
    for name in names:
        write_by_hand(path, {"a": (name, (8,), b"x" * itembits(name))})
        (spec,) = read_catalog(str(path)).tensors
        assert (spec.dtype, spec.shape) == (name, (8,))


def test_file_without_tensors_is_an_empty_catalog(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    safetensors.numpy.save_file({}, path, metadata={"a": "b"})
    catalog = read_catalog(str(path))
    assert catalog.tensors == ()
    assert dict(catalog.metadata) == {"a": "b"}


def test_metadata_cannot_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "meta.safetensors"
    safetensors.numpy.save_file({}, path, metadata={"a": "b"})
    with pytest.raises(TypeError):
        read_catalog(str(path)).metadata["a"] = "c"  # type: ignore[index]


ATTACKS: dict[str, tuple[object, int]] = {
    "hole between tensors": ({"a": entry("U8", (1,), 0, 1), "b": entry("U8", (1,), 2, 3)}, 3),
    "hole at the start": ({"a": entry("U8", (1,), 1, 2)}, 2),
    "overlapping tensors": ({"a": entry("U8", (2,), 0, 2), "b": entry("U8", (2,), 1, 3)}, 3),
    "two tensors in one place": ({"a": entry("U8", (1,), 0, 1), "b": entry("U8", (1,), 0, 1)}, 1),
    "offsets that run backwards": ({"a": entry("U8", (0,), 1, 0)}, 1),
    "offsets beyond the file": ({"a": entry("U8", (9,), 0, 9)}, 3),
    "offsets near 2**64": ({"a": entry("U8", (1,), 2**64 - 1, 2**64)}, 1),
    "bytes behind the tensors": ({"a": entry("U8", (1,), 0, 1)}, 2),
    "shape smaller than its range": ({"a": entry("F32", (1,), 0, 8)}, 8),
    "shape larger than its range": ({"a": entry("F32", (3,), 0, 8)}, 8),
    "shape that overflows": ({"a": entry("F32", (2**62, 2**62), 0, 4)}, 4),
    "shape that wraps to the right size": ({"a": entry("F32", (2**63, 2, 1), 0, 0)}, 0),
    "empty shape too long for any array": ({"a": entry("F32", (0, 2**62, 8), 0, 0)}, 0),
    "negative shape": ({"a": entry("F32", (-1,), 0, 4)}, 4),
    "negative offset": ({"a": entry("F32", (1,), -4, 0)}, 4),
    "fractional shape": ({"a": entry("F32", (1.0,), 0, 4)}, 4),
    "text for a shape": ({"a": entry("F32", ("1",), 0, 4)}, 4),
    "unknown type": ({"a": entry("F99", (1,), 0, 4)}, 4),
    "type in small letters": ({"a": entry("f32", (1,), 0, 4)}, 4),
    "half a byte": ({"a": entry("F4", (3,), 0, 1)}, 1),
    "no type": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, 1),
    "no offsets": ({"a": {"shape": [1], "dtype": "U8"}}, 1),
    "metadata that is not text": ({"__metadata__": {"a": 1}}, 0),
    "metadata that is a list": ({"__metadata__": []}, 0),
    "list for a header": ([], 0),
    "no JSON": (b"{'a'}", 0),
    "cut JSON": (b'{"a":{"dtype":"U8"', 0),
    "zero bytes behind the JSON": (b"{}\0\0", 0),
    "no header": (b"", 0),
    "deep nesting": (b'{"a":' * 100_000, 0),
    "invalid UTF-8": (b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
    "lone surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
    "duplicate name in two places": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        2,
    ),
    "duplicate field": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_forged_header_is_a_format_error(tmp_path: Path, attack: str) -> None:
    header, payload_nbytes = ATTACKS[attack]
    path = tmp_path / "forged.safetensors"
    write_header(path, header, b"x" * payload_nbytes)
    with pytest.raises(FormatError) as caught:
        read_catalog(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 10_000, 100_000_001, 2**31, 2**32, 2**63, 2**64 - 1])
def test_forged_header_length_is_a_format_error(tmp_path: Path, length: int) -> None:
    path = tmp_path / "forged.safetensors"
    write_header(path, {"a": entry("U8", (4,), 0, 4)}, b"xxxx", header_nbytes=length)
    with pytest.raises(FormatError, match=str(8 + length)):
        read_catalog(str(path))


def test_same_name_twice_in_one_place_is_one_tensor_as_in_the_official_loader(
    tmp_path: Path,
) -> None:
    path = tmp_path / "twice.safetensors"
    write_header(
        path,
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    )
    (spec,) = read_catalog(str(path)).tensors
    assert numpy_dtype(spec.dtype) == safetensors.numpy.load_file(path)["a"].dtype


@pytest.mark.parametrize("content", [b"", b"abc", b"\0" * 7])
def test_file_without_room_for_a_header_says_its_size(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=f"has {len(content)} bytes; a .* starts with.*download"):
        read_catalog(str(path))


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"<!DOCTYPE html><html>not found</html>", "web page"),
        (b"PK\x03\x04 and more of a zip file", "zip"),
        (b"\x93NUMPY\x01\x00 and more", ".npy"),
        (b"GGUF\x03\x00\x00\x00 and more", "GGUF"),
    ],
)
def test_file_of_another_format_is_recognised(tmp_path: Path, content: bytes, hint: str) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=hint):
        read_catalog(str(path))


def test_truncated_file_says_both_sizes_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "truncated.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(100)}, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(FormatError) as caught:
        read_catalog(str(path))
    message = str(caught.value)
    assert f"{size - 300} bytes" in message
    assert f"byte {size - 800}" in message
    assert "download" in message


def test_file_that_shrinks_between_the_two_looks_is_a_format_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "before.safetensors", tmp_path / "after.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(100)}, path)
    safetensors.numpy.save_file({"x": np.zeros(90)}, other)
    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda _, **options: real(other, **options))
    with pytest.raises(FormatError, match="changed"):
        read_catalog(str(path))


def test_terabyte_file_is_described_without_touching_its_payload(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    terabyte = 1 << 40
    write_header(path, {"a": entry("U8", (terabyte,), 0, terabyte)})
    base = path.stat().st_size
    with path.open("r+b") as file:
        try:
            file.truncate(base + terabyte)
        except OSError:
            pytest.skip("this file system holds no file of 1 TiB")
    (spec,) = read_catalog(str(path)).tensors
    assert spec.file_range == ByteRange(base, base + terabyte)


def test_ten_thousand_tensors_take_less_than_a_second(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    arrays = {f"model.layers.{i}.weight": np.zeros((2, 3), np.float32) for i in range(10_000)}
    safetensors.numpy.save_file(arrays, path)
    start = time.perf_counter()
    catalog = read_catalog(str(path))
    assert time.perf_counter() - start < 1
    assert len(catalog.tensors) == 10_000

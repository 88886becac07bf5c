from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import FormatError
from headrace.formats.dtypes import tensor_nbytes
from headrace.formats.safetensors import read_catalog
from headrace.formats.safetensors_layout import Described, Layout, lay_out

OFFICIAL_WORDS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
"""How the official writer calls the types that it takes; it takes no F6."""

TEXT = st.text(max_size=8) | st.text('"\\/\b\f\n\r\t\0\x1f\x7f\x80é\u2028\ufeff😀', max_size=8)
NAMES = TEXT.filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple) | st.sampled_from(
    [(4096,), (512,), (1024, 4), (2, 4096), (8192, 1), (4095,), (0, 4096)]
)
METADATA = st.none() | st.dictionaries(TEXT, TEXT, max_size=4)


@st.composite
def described(draw: st.DrawFn) -> list[Described]:
    """Tensors that the official writer takes, in any order."""
    names = draw(st.lists(NAMES, max_size=8, unique=True))
    return [Described(name, *draw(dtypes_and_shapes())) for name in names]


@st.composite
def dtypes_and_shapes(draw: st.DrawFn) -> tuple[str, tuple[int, ...]]:
    dtype = draw(st.sampled_from(sorted(OFFICIAL_WORDS)))
    shape = draw(SHAPES)
    if dtype == "F4":
        # The official writer is told the bytes along the last axis, two elements in each.
        shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    return dtype, shape


def payload(tensor: Described) -> bytes:
    """Bytes that differ from tensor to tensor."""
    nbytes = tensor_nbytes(tensor.dtype, tensor.shape)
    seed = hashlib.sha256(tensor.name.encode()).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def official(tensors: Sequence[Described], metadata: Mapping[str, str] | None) -> bytes:
    """The file that the official writer makes."""
    buffers = {tensor.name: ctypes.create_string_buffer(payload(tensor)) for tensor in tensors}
    specs: dict[str, Any] = {}
    for tensor in tensors:
        shape = list(tensor.shape)
        if tensor.dtype == "F4":
            shape[-1] //= 2
        specs[tensor.name] = safetensors.TensorSpec(
            dtype=OFFICIAL_WORDS[tensor.dtype],
            shape=shape,
            data_ptr=ctypes.addressof(buffers[tensor.name]),
            data_len=tensor_nbytes(tensor.dtype, tensor.shape),
        )
    return bytes(safetensors.serialize(specs, None if metadata is None else dict(metadata)))


def write(tensors: Sequence[Described], layout: Layout) -> bytes:
    """The whole file that the layout describes."""
    content = {tensor.name: payload(tensor) for tensor in tensors}
    whole = bytearray(layout.header)
    for spec in layout.tensors:
        assert spec.file_range.start == len(whole)
        whole += content[spec.name]
        assert spec.file_range.stop == len(whole)
    assert layout.nbytes == len(whole)
    return bytes(whole)


def deserialize(file: bytes) -> list[tuple[str, dict[str, Any]]]:
    """What the official reader finds in a file."""
    found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(file)  # type: ignore[no-untyped-call]
    return found


def read_officially(file: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in deserialize(file)
    }


def parts(header: bytes) -> tuple[dict[str, str] | None, list[tuple[str, object]]]:
    """Metadata, and the entries of the tensors in the order of the header."""
    document = json.loads(header[8:])
    metadata = document.pop("__metadata__", None)
    return metadata, list(document.items())


@settings(deadline=None, max_examples=300)
@given(described(), st.none() | st.dictionaries(TEXT, TEXT, max_size=1))
def test_file_is_byte_identical_to_that_of_the_official_writer(
    tensors: list[Described], metadata: dict[str, str] | None
) -> None:
    if not tensors and metadata == {}:
        return  # the official writer fails: see the test below
    assert write(tensors, lay_out(tensors, metadata)) == official(tensors, metadata)


@settings(deadline=None)
@given(described(), st.dictionaries(TEXT, TEXT, min_size=2, max_size=6))
def test_several_entries_of_metadata_differ_from_the_official_ones_in_their_order_alone(
    tensors: list[Described], metadata: dict[str, str]
) -> None:
    ours, theirs = write(tensors, lay_out(tensors, metadata)), official(tensors, metadata)
    length = int.from_bytes(ours[:8], "little")
    assert ours[:8] == theirs[:8]
    assert ours[8 + length :] == theirs[8 + length :]
    written, entries = parts(ours[: 8 + length])
    assert (written, entries) == parts(theirs[: 8 + length])
    assert written is not None
    assert list(written) == sorted(metadata)
    # From the end of the metadata on, which is as long whatever its order, all bytes are equal.
    body = json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode()
    rest = 8 + len(b'{"__metadata__":') + len(body)
    assert ours[rest:] == theirs[rest:]


def test_official_order_of_metadata_changes_from_call_to_call() -> None:
    metadata = {letter: letter for letter in "abcdefgh"}
    assert len({official([], metadata) for _ in range(20)}) > 1
    backwards = dict(reversed(metadata.items()))
    assert lay_out([], metadata) == lay_out([], backwards)


def test_empty_metadata_without_tensors_is_valid_though_the_official_file_is_not() -> None:
    with pytest.raises(safetensors.SafetensorError):
        deserialize(official([], {}))
    header = lay_out([], {}).header
    assert parts(header) == ({}, [])
    assert deserialize(header) == []


def test_none_for_metadata_is_not_written() -> None:
    assert lay_out([]).header == official([], None) == b"\x08" + bytes(7) + b"{}      "


def test_types_are_ranked_as_in_the_official_library() -> None:
    forged = b'{"a":{"dtype":"F99","shape":[],"data_offsets":[0,0]}}'
    with pytest.raises(safetensors.SafetensorError) as caught:
        deserialize(len(forged).to_bytes(8, "little") + forged)
    listed = str(caught.value).partition("expected one of ")[2].partition(" at line")[0]
    ranked = [name.strip(" `") for name in listed.split(",")]
    assert set(OFFICIAL_WORDS) | {"F6_E2M3", "F6_E3M2"} == set(ranked)
    layout = lay_out([Described(dtype, dtype, (8,)) for dtype in sorted(ranked)])
    assert [spec.dtype for spec in layout.tensors] == ranked[::-1]


@pytest.mark.parametrize("align", [False, True])
def test_packed_types_of_six_bits_are_read_back_officially(align: bool) -> None:
    tensors = [Described("a", "F6_E3M2", (4, 3)), Described("b", "F6_E2M3", (8,))]
    file = write(tensors, lay_out(tensors, align=align))
    assert read_officially(file) == {t.name: (t.dtype, t.shape, payload(t)) for t in tensors}


def test_numpy_arrays_are_laid_out_as_save_file_writes_them(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "b.weight": np.zeros((3, 5), np.float32),
        "a.weight": np.zeros((0, 2), np.float32),
        "scale": np.zeros((), np.float64),
        "half": np.zeros(7, ml_dtypes.bfloat16),
    }
    names = {"float32": "F32", "float64": "F64", "bfloat16": "BF16"}
    path = tmp_path / "numpy.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    tensors = [Described(n, names[a.dtype.name], a.shape) for n, a in arrays.items()]
    layout = lay_out(tensors, {"format": "np"})
    assert path.read_bytes() == layout.header + bytes(layout.nbytes - len(layout.header))
    assert read_catalog(str(path)).tensors == layout.tensors


def test_torch_tensors_are_laid_out_as_save_file_writes_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {
        "é": torch.zeros(2, 3, dtype=torch.bfloat16),
        "mask": torch.zeros(5, dtype=torch.bool),
        "scalar": torch.zeros((), dtype=torch.int64),
        "packed": torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    path = tmp_path / "torch.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    layout = lay_out(
        [
            Described("é", "BF16", (2, 3)),
            Described("mask", "BOOL", (5,)),
            Described("scalar", "I64", ()),
            Described("packed", "F4", (3, 8)),
        ],
        {"format": "pt"},
    )
    assert path.read_bytes() == layout.header + bytes(layout.nbytes - len(layout.header))


@settings(deadline=None, max_examples=300)
@given(described(), METADATA)
def test_aligned_file_is_read_back_by_the_official_reader(
    tensors: list[Described], metadata: dict[str, str] | None
) -> None:
    layout = lay_out(tensors, metadata, align=True)
    file = write(tensors, layout)
    assert read_officially(file) == {t.name: (t.dtype, t.shape, payload(t)) for t in tensors}
    plain = lay_out(tensors, metadata)
    (written, entries), (wanted, plain_entries) = parts(layout.header), parts(plain.header)
    assert written == wanted == metadata
    assert {name for name, _ in entries} == {name for name, _ in plain_entries}


@settings(deadline=None, max_examples=300)
@given(described(), METADATA)
def test_aligned_file_has_whole_pages_first_and_each_group_in_the_official_order(
    tensors: list[Described], metadata: dict[str, str] | None
) -> None:
    layout = lay_out(tensors, metadata, align=True)
    assert len(layout.header) % 4096 == 0
    whole = [s for s in layout.tensors if s.file_range.nbytes % 4096 == 0]
    rest = [s for s in layout.tensors if s.file_range.nbytes % 4096]
    assert layout.tensors == (*whole, *rest)
    assert all(spec.file_range.start % 4096 == 0 for spec in whole)
    in_official_order = [spec.name for spec in lay_out(tensors, metadata).tensors]
    for group in (whole, rest):
        named = {spec.name for spec in group}
        assert [s.name for s in group] == [n for n in in_official_order if n in named]


def test_aligned_file_is_loaded_and_described_alike(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "odd": np.arange(5, dtype=np.int64),
        "pages": np.arange(2048, dtype=np.float32).reshape(2, 1024),
        "scalar": np.array(1.5),
    }
    names = {"int64": "I64", "float32": "F32", "float64": "F64"}
    tensors = [Described(n, names[a.dtype.name], a.shape) for n, a in arrays.items()]
    layout = lay_out(tensors, {"a": "b", "c": ""}, align=True)
    path = tmp_path / "aligned.safetensors"
    path.write_bytes(layout.header + b"".join(arrays[s.name].tobytes() for s in layout.tensors))
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)
    with safetensors.safe_open(path, framework="np") as opened:
        assert opened.metadata() == {"a": "b", "c": ""}
    assert read_catalog(str(path)).tensors == layout.tensors
    assert [spec.name for spec in layout.tensors] == ["pages", "odd", "scalar"]


@pytest.mark.parametrize("align", [False, True])
def test_ties_of_name_and_type_do_not_depend_on_the_given_order(align: bool) -> None:
    tensors = [Described(name, "U8", (0,)) for name in ("b", "", "a", "ab", "😀", "\uffff", "é")]
    layout = lay_out(tensors, align=align)
    assert lay_out(tensors[::-1], align=align) == layout
    assert [s.name for s in layout.tensors] == ["", "a", "ab", "b", "é", "\uffff", "😀"]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([Described("a", "U8", (1,)), Described("a", "F32", (2,))], "2 of 2 tensors .* 'a'"),
        ([Described("__metadata__", "U8", (1,))], "__metadata__.*rename"),
        ([Described("a", "F99", (1,))], "'a' has dtype 'F99'"),
        ([Described("a", "f32", (1,))], "'a' has dtype 'f32'"),
        ([Described("a", "<c16", (1,))], "'a' has dtype '<c16'"),
        ([Described("a", "F32", (2, -1))], "'a'.*negative"),
        ([Described("a", "F32", (2**62, 2**62))], "'a'.*cannot address"),
        ([Described("a", "F4", (3,))], "'a'.*whole bytes"),
        ([Described("a\ud800", "U8", (1,))], "lone surrogate .* at character 1 of 2"),
        ([Described("\ud83d\ude00", "U8", (1,))], "lone surrogate"),
    ],
)
def test_tensor_that_the_format_cannot_hold_is_a_format_error(
    tensors: list[Described], reason: str
) -> None:
    with pytest.raises(FormatError, match=reason):
        lay_out(tensors)


@pytest.mark.parametrize("metadata", [{"a\udfff": "b"}, {"a": "\ud800"}])
def test_lone_surrogate_in_metadata_is_a_format_error(metadata: dict[str, str]) -> None:
    with pytest.raises(FormatError, match=r"metadata.*lone surrogate"):
        lay_out([], metadata)


@pytest.mark.parametrize("metadata", [{1: "a"}, {"a": 1}, {"a": None}, {b"a": "b"}, [("a", "b")]])
def test_metadata_that_is_not_text_is_a_type_error_as_in_the_official_writer(metadata: Any) -> None:
    with pytest.raises(TypeError):
        safetensors.serialize({}, metadata)
    with pytest.raises(TypeError, match=r"metadata.*str"):
        lay_out([], metadata)


def test_name_that_is_not_text_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"name of a tensor.*'1', of type int"):
        lay_out([Described(1, "U8", (1,))])  # type: ignore[arg-type]


def test_fractional_axis_is_a_type_error_and_other_integers_are_plain_ones() -> None:
    with pytest.raises(TypeError):
        lay_out([Described("a", "U8", (1.0,))])  # type: ignore[arg-type]
    odd: Any = [np.int64(3), True]
    plain = lay_out([Described("a", "U8", (3, 1))])
    assert lay_out([Described("a", "U8", odd)]).header == plain.header


def test_longest_header_that_readers_take_is_made_and_no_longer_one() -> None:
    frame = len(b'{"__metadata__":{"a":""}}')
    header = lay_out([], {"a": "x" * (100_000_000 - frame)}).header
    assert len(header) == 8 + 100_000_000
    assert deserialize(header) == []
    with pytest.raises(FormatError, match=r"takes 100000008 bytes .* 100000000"):
        lay_out([], {"a": "x" * (100_000_001 - frame)})
    with pytest.raises(FormatError, match="100000000"):
        lay_out([], {"a": "x" * (100_000_000 - frame)}, align=True)


def test_offsets_of_a_terabyte_are_exact() -> None:
    terabyte = 1 << 40
    layout = lay_out([Described("a", "U8", (terabyte,)), Described("b", "BOOL", (3,))])
    start = len(layout.header)
    assert [(s.file_range.start, s.file_range.stop) for s in layout.tensors] == [
        (start, start + terabyte),
        (start + terabyte, start + terabyte + 3),
    ]
    assert math.prod(layout.tensors[0].shape) == terabyte

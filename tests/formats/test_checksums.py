from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.formats.checksums import store_checksums, stored_checksums
from headrace.formats.safetensors_layout import Described, lay_out
from headrace.types import ByteRange

DIGESTS = st.integers(0, 2**64 - 1).map("{:016x}".format)
KEYS = st.text().filter(lambda key: not key.startswith("headrace.xxh3_64."))
KINDS = st.tuples(
    st.sampled_from(["F32", "F8_E4M3FNUZ", "BOOL"]), st.lists(st.integers(0, 2**40)).map(tuple)
)
W = Described("w", "F32", (2, 3))


def catalog(metadata: Mapping[str, str], *tensors: Described) -> Catalog:
    specs = (TensorSpec(each.name, each.dtype, each.shape, ByteRange(0, 0)) for each in tensors)
    return Catalog("file", tuple(specs), metadata)


@given(st.dictionaries(KEYS, st.text()), st.dictionaries(st.text(), st.tuples(KINDS, DIGESTS)))
def test_stored_checksums_come_back_and_the_other_entries_stay(
    metadata: dict[str, str], tensors: dict[str, tuple[tuple[str, tuple[int, ...]], str]]
) -> None:
    described = [Described(name, *kind) for name, (kind, _) in tensors.items()]
    digests = {name: digest for name, (_, digest) in tensors.items()}
    stored = store_checksums(MappingProxyType(metadata), described, digests)
    assert stored_checksums(catalog(stored, *described)) == digests
    assert {k: v for k, v in stored.items() if k in metadata} == metadata
    assert len(stored) == len(metadata) + len(digests)


def test_entry_has_the_digest_the_dtype_and_the_shape() -> None:
    tensors = [Described("w.é", "F32", (2, 3)), Described("scalar", "F8_E4M3", ())]
    digests = {"w.é": "0123456789abcdef", "scalar": "f" * 16, "of another file": "0" * 16}
    assert store_checksums({"a": "b"}, tensors, digests) == {
        "a": "b",
        "headrace.xxh3_64.w.é": "0123456789abcdef F32 [2, 3]",
        "headrace.xxh3_64.scalar": "ffffffffffffffff F8_E4M3 []",
    }


def test_no_metadata_and_no_checksums_are_empty_dicts() -> None:
    assert store_checksums(None, (), {}) == {}
    assert stored_checksums(catalog({"format": "pt"}, W)) == {}


def test_checksums_of_an_earlier_file_are_dropped() -> None:
    gone = Described("gone", "U8", (1,))
    old = store_checksums({"a": "b"}, [gone, W], {"gone": "0" * 16, "w": "1" * 16})
    new = store_checksums(old, [W], {"w": "2" * 16})
    assert stored_checksums(catalog(new, W)) == {"w": "2" * 16}
    assert new["a"] == "b"
    assert stored_checksums(catalog(old, gone, W)) == {"gone": "0" * 16, "w": "1" * 16}


def test_header_has_its_final_length_before_the_digests_are_known() -> None:
    tensors = [Described("a", "U8", (3,)), Described("b", "F32", ())]
    blank = lay_out(tensors, store_checksums(None, tensors, {"a": "0" * 16, "b": "0" * 16}))
    digests = {"b": "f" * 16, "a": "123456789abcdef0"}
    known = lay_out(tensors, store_checksums(None, tensors, digests))
    assert known.tensors == blank.tensors
    assert known.header != blank.header


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "0" * 15,
        "0" * 17,
        "0" * 15 + "g",
        "A" * 16,
        "0x" + "0" * 14,
        "0" * 16 + "\n",
        "\N{ARABIC-INDIC DIGIT ZERO}" * 16,
    ],
)
def test_malformed_digest_is_a_format_error(digest: str) -> None:
    with pytest.raises(FormatError, match=r"file: .* tensor 'w' is .* \(\d+ characters\)"):
        stored_checksums(catalog({"headrace.xxh3_64.w": f"{digest} F32 [2, 3]"}, W))
    with pytest.raises(FormatError, match="tensor 'w'"):
        store_checksums({}, [W], {"w": digest})


@pytest.mark.parametrize(
    "rest", ["", " F32", " F32 [2,3]", " F32 (2, 3)", " f32 [2, 3]", " F32 [2, 3]\n", " F32 [2, ]"]
)
def test_malformed_dtype_or_shape_is_a_format_error(rest: str) -> None:
    with pytest.raises(FormatError, match=r"file: the checksum of tensor 'w' is '0{16}"):
        stored_checksums(catalog({"headrace.xxh3_64.w": "0" * 16 + rest}, W))

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FormatError
from headrace.formats.checksums import store_checksums, stored_checksums
from headrace.formats.safetensors_layout import Described, lay_out

DIGESTS = st.integers(0, 2**64 - 1).map("{:016x}".format)
KEYS = st.text().filter(lambda key: not key.startswith("headrace.xxh3_64."))


@given(st.dictionaries(KEYS, st.text()), st.dictionaries(st.text(), DIGESTS))
def test_stored_checksums_come_back_and_the_other_entries_stay(
    metadata: dict[str, str], digests: dict[str, str]
) -> None:
    stored = store_checksums(MappingProxyType(metadata), digests)
    assert stored_checksums(stored) == digests
    assert {k: v for k, v in stored.items() if k in metadata} == metadata
    assert len(stored) == len(metadata) + len(digests)


def test_entry_is_named_for_the_algorithm_and_the_tensor() -> None:
    assert store_checksums({"a": "b"}, {"w.é": "0123456789abcdef"}) == {
        "a": "b",
        "headrace.xxh3_64.w.é": "0123456789abcdef",
    }


def test_no_metadata_and_no_checksums_are_empty_dicts() -> None:
    assert store_checksums(None, {}) == {}
    assert stored_checksums({"format": "pt"}) == {}


def test_checksums_of_an_earlier_file_are_dropped() -> None:
    old = store_checksums({"a": "b"}, {"gone": "0" * 16, "changed": "1" * 16})
    new = store_checksums(old, {"changed": "2" * 16})
    assert stored_checksums(new) == {"changed": "2" * 16}
    assert new["a"] == "b"
    assert stored_checksums(old) == {"gone": "0" * 16, "changed": "1" * 16}


def test_header_has_its_final_length_before_the_digests_are_known() -> None:
    tensors = [Described("a", "U8", (3,)), Described("b", "F32", ())]
    blank = lay_out(tensors, store_checksums(None, {"a": "0" * 16, "b": "0" * 16}))
    known = lay_out(tensors, store_checksums(None, {"b": "f" * 16, "a": "123456789abcdef0"}))
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
        "\N{ARABIC-INDIC DIGIT ZERO}" * 16,
    ],
)
def test_malformed_checksum_is_a_format_error(digest: str) -> None:
    with pytest.raises(FormatError, match=r"tensor 'w' is .* \(\d+ characters\)"):
        stored_checksums({"headrace.xxh3_64.w": digest})
    with pytest.raises(FormatError, match="tensor 'w'"):
        store_checksums({}, {"w": digest})


def test_checksum_with_a_newline_behind_it_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="17 characters"):
        stored_checksums({"headrace.xxh3_64.w": "0" * 16 + "\n"})

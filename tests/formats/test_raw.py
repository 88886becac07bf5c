from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import FormatError, ShortRead
from headrace.formats.dtypes import numpy_dtype
from headrace.formats.raw import describe_raw, guess_kind, open_regular
from headrace.types import ByteRange


def test_whole_file_is_one_axis_of_bytes() -> None:
    catalog = describe_raw("data.bin", 10)
    (spec,) = catalog.tensors
    assert catalog.path == "data.bin"
    assert dict(catalog.metadata) == {}
    assert (spec.name, spec.dtype, spec.shape, spec.order) == ("", "U8", (10,), "C")
    assert spec.file_range == ByteRange(0, 10)


def test_file_is_not_opened() -> None:
    assert describe_raw("/no/such/file", 4, dtype="F32").tensors[0].shape == (1,)


@pytest.mark.parametrize(
    ("wanted", "shape", "span"),
    [
        ({"file_offset": 4}, (16,), (4, 20)),
        ({"file_offset": 20}, (0,), (20, 20)),
        ({"nbytes": 8}, (8,), (0, 8)),
        ({"nbytes": 0}, (0,), (0, 0)),
        ({"dtype": "F32"}, (5,), (0, 20)),
        ({"dtype": "BF16", "file_offset": 2, "nbytes": 6}, (3,), (2, 8)),
        ({"dtype": "F32", "shape": (2, 2)}, (2, 2), (0, 16)),
        ({"dtype": "F32", "shape": (2, 2), "nbytes": 16, "file_offset": 4}, (2, 2), (4, 20)),
        ({"dtype": "F32", "shape": ()}, (), (0, 4)),
        ({"dtype": "F32", "shape": (0, 7)}, (0, 7), (0, 0)),
        ({"dtype": "F4"}, (40,), (0, 20)),
        ({"dtype": "F6_E2M3", "nbytes": 3}, (4,), (0, 3)),
        ({"dtype": "<c16", "nbytes": 16}, (1,), (0, 16)),
        ({"dtype": "[('x', '<f4'), ('y', '|u1')]"}, (4,), (0, 20)),
    ],
)
def test_stretch_of_a_file_is_described(
    wanted: dict[str, Any], shape: tuple[int, ...], span: tuple[int, int]
) -> None:
    (spec,) = describe_raw("data.bin", 20, **wanted).tensors
    assert spec.shape == shape
    assert spec.file_range == ByteRange(*span)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"file_offset": -1}, "file_offset is -1"),
        ({"nbytes": -1}, "nbytes is -1"),
        ({"dtype": "F32", "nbytes": 6}, "6 bytes are no multiple of the 32 bits.*example 4"),
        ({"dtype": "F32", "file_offset": 1}, "19 bytes are no multiple.*example 16"),
        ({"dtype": "F6_E3M2", "nbytes": 4}, "example 3"),
        ({"dtype": "F32", "shape": (2,), "nbytes": 4}, "nbytes is 4, but .* takes 8"),
        ({"shape": (-1,)}, "negative"),
        ({"dtype": "F4", "shape": (3,)}, "whole bytes"),
        ({"dtype": "F99"}, "unknown"),
        ({"dtype": "<U0"}, "0 bytes"),
    ],
)
def test_contradictory_request_is_a_value_error(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_raw("data.bin", 20, **wanted)


@pytest.mark.parametrize(
    ("wanted", "stop"),
    [
        ({"file_offset": 21}, 21),
        ({"nbytes": 21}, 21),
        ({"file_offset": 16, "nbytes": 8}, 24),
        ({"dtype": "F32", "shape": (2, 3)}, 24),
        ({"dtype": "F32", "shape": (5,), "file_offset": 4}, 24),
        ({"shape": (0,), "file_offset": 30}, 30),
        ({"shape": (2**40,)}, 2**40),
    ],
)
def test_stretch_beyond_the_file_is_a_short_read_with_both_sizes(
    wanted: dict[str, Any], stop: int
) -> None:
    with pytest.raises(ShortRead, match=f"data.bin has 20 bytes.* need {stop};"):
        describe_raw("data.bin", 20, **wanted)


def test_unknown_dtype_is_a_format_error() -> None:
    with pytest.raises(FormatError):
        describe_raw("data.bin", 20, dtype="float32", shape=(1,))


@settings(deadline=None)
@given(
    content=st.binary(min_size=16, max_size=64),
    dtype=st.sampled_from(["U8", "I16", "F32", "F64", ">u4", "<c16"]),
    offset=st.integers(0, 16),
    count=st.integers(0, 3),
)
def test_described_bytes_equal_np_fromfile(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, dtype: str, offset: int, count: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "data.bin"
    path.write_bytes(content)
    kind = numpy_dtype(dtype)
    official = np.fromfile(path, kind, count, offset=offset)
    try:
        catalog = describe_raw(
            str(path), len(content), dtype=dtype, shape=(count,), file_offset=offset
        )
    except ShortRead:
        assert len(official) < count
    else:
        (spec,) = catalog.tensors
        stored = content[spec.file_range.start : spec.file_range.stop]
        assert stored == official.tobytes()


def test_device_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="no regular file"):
        open_regular(os.devnull)


def test_regular_file_behind_a_link_is_opened(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("target")
    with open_regular(str(tmp_path / "link")) as file:
        assert file.read() == b"abc"


def test_unknown_contents_are_to_be_downloaded_again() -> None:
    assert guess_kind(b"") == "download or write it again"

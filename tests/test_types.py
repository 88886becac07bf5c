from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.types import HOST, ByteRange, Device, Route, parse_device, windows


@given(start=st.integers(0, 300), nbytes=st.integers(0, 300), step=st.integers(1, 64))
def test_windows_are_the_range_cut_at_every_multiple_of_the_step(
    start: int, nbytes: int, step: int
) -> None:
    whole = ByteRange(start, start + nbytes)
    parts = list(windows(whole, step))
    cuts = [byte for byte in range(start + 1, whole.stop) if byte % step == 0]
    bounds = [start, *cuts, whole.stop] if nbytes else [start]
    assert parts == [ByteRange(first, stop) for first, stop in pairwise(bounds)]


def test_empty_range_has_no_windows() -> None:
    assert list(windows(ByteRange(7, 7), 4)) == []


def test_windows_of_a_huge_range_come_one_by_one() -> None:
    first = next(windows(ByteRange(5, 1 << 60), 1 << 20))
    assert first == ByteRange(5, 1 << 20)


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", HOST),
        ("host", HOST),
        ("cuda", Device("cuda", 0)),
        ("cuda:0", Device("cuda", 0)),
        ("cuda:17", Device("cuda", 17)),
    ],
)
def test_device_name_is_read(text: str, device: Device) -> None:
    assert parse_device(text) == device


@pytest.mark.parametrize(
    "text",
    ["", "CPU", "cpu:0", "host:", "cuda:", "cuda:-1", "cuda:1:2", "cuda: 1", "cuda:x", "gpu", "1"],
)
def test_text_that_names_no_device_is_a_value_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match="is not 'cpu', 'cuda' or 'cuda:N'") as caught:
        parse_device(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["cpu", "cuda:0", "cuda:3"])
def test_device_prints_as_the_name_that_made_it(text: str) -> None:
    device = parse_device(text)
    assert str(device) == text
    assert device.is_host == (text == "cpu")


def test_routes_are_those_of_the_public_interface() -> None:
    assert [str(route) for route in Route] == ["host", "cached", "mapped", "direct", "gds"]
    assert {route: route.value for route in Route} == {name: name for name in map(str, Route)}


def test_values_are_frozen_and_hashable() -> None:
    assert len({ByteRange(1, 4), ByteRange(1, 4), Device("cuda", 1), Device("cuda", 1)}) == 2
    with pytest.raises(AttributeError):
        ByteRange(1, 4).stop = 5  # type: ignore[misc]

from __future__ import annotations

import pytest
import typer

from headrace.cli import arguments
from headrace.options import Options
from headrace.types import Route


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("0", 0),
        ("4K", 4096),
        ("4k", 4096),
        ("4KiB", 4096),
        ("4kB", 4000),
        ("256MiB", 256 << 20),
        ("256M", 256 << 20),
        (" 256 MB ", 256_000_000),
        ("1.5GiB", 3 << 29),
        ("2T", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes_are_decimal_with_b_and_binary_without(text: object, nbytes: int) -> None:
    assert arguments.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "much", "-1", "4XB", "4iB4", "1e9", "4 M B", "0x10"])
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        arguments.parse_size(text)


def test_every_route_can_be_asked_for() -> None:
    assert [arguments.route_name(str(route)) for route in Route] == list(Route)
    assert arguments.route_name("auto") == "auto"


def test_a_wrong_choice_lists_the_right_ones() -> None:
    with pytest.raises(typer.BadParameter, match="auto, host, cached, mapped, direct, gds"):
        arguments.route_name("fast")


def test_options_left_out_keep_their_defaults() -> None:
    made = arguments.make_options(None, None, None, "speed", "auto", strict=False)
    assert made == Options()


def test_options_that_are_given_arrive() -> None:
    made = arguments.make_options(3, 8192, 1 << 20, "cpu", "many", strict=True)
    assert made == Options(3, 8192, 1 << 20, "cpu", reuse="many", strict=True)


def test_an_option_out_of_range_is_wrong_usage() -> None:
    with pytest.raises(typer.BadParameter, match="multiple of 4096"):
        arguments.make_options(None, 1000, None, "speed", "auto", strict=False)

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.options import PAGE_NBYTES, Options


def test_defaults_are_those_of_the_public_interface() -> None:
    assert Options() == Options(
        workers=None,
        block_nbytes=4 << 20,
        pinned_nbytes=256 << 20,
        policy="speed",
        reuse="auto",
        strict=False,
    )
    assert hr.Options is Options


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"workers": 0}, "workers is 0; it must be at least 1, or None"),
        ({"workers": -3}, "workers is -3"),
        ({"block_nbytes": 0}, "block_nbytes is 0; it must be a positive multiple of 4096"),
        ({"block_nbytes": -4096}, "block_nbytes is -4096"),
        ({"block_nbytes": 4095}, "block_nbytes is 4095"),
        ({"block_nbytes": 4097}, "block_nbytes is 4097"),
        ({"block_nbytes": 8192, "pinned_nbytes": 8191}, "must hold at least one block of 8192"),
        ({"pinned_nbytes": 0}, "raise it, or lower block_nbytes"),
        ({"policy": "fast"}, "policy is 'fast'; it must be one of ('speed', 'cpu', 'auto')"),
        ({"reuse": "twice"}, "reuse is 'twice'; it must be one of ('auto', 'once', 'many')"),
        ({"reuse": None}, "reuse is None"),
    ],
    ids=str,
)
def test_field_out_of_range_is_a_value_error_that_says_what_fits(
    fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        Options(**fields)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("value", [1.5, "8", True, None, b"x"], ids=repr)
@pytest.mark.parametrize("name", ["workers", "block_nbytes", "pinned_nbytes", "mapped_nbytes"])
def test_number_that_is_none_is_a_type_error_that_names_the_field(name: str, value: Any) -> None:
    if (name, value) == ("workers", None):
        return
    with pytest.raises(TypeError, match=f"{name} is {value!r}; it must be an integer"):
        Options(**{name: value})


def test_integers_of_numpy_are_numbers() -> None:
    assert Options(workers=np.int64(3)).workers == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"workers": 1},
        {"block_nbytes": PAGE_NBYTES},
        {"block_nbytes": PAGE_NBYTES, "pinned_nbytes": PAGE_NBYTES},
        {"block_nbytes": 3 * PAGE_NBYTES, "pinned_nbytes": 3 * PAGE_NBYTES + 1},
        {"policy": "cpu", "reuse": "many", "strict": True},
    ],
    ids=str,
)
def test_smallest_and_odd_values_within_the_range_are_taken(fields: dict[str, Any]) -> None:
    options = Options(**fields)
    assert {name: getattr(options, name) for name in fields} == fields


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().workers = 3  # type: ignore[misc]

"""What a user can choose, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["speed", "cpu", "auto"]
Reuse = Literal["auto", "once", "many"]

PAGE_NBYTES = 4096
"""Smallest block: one page of memory on every platform that headrace runs on."""


@dataclass(frozen=True, slots=True)
class Options:
    """How transfers are made.

    The defaults reach the link's speed on the machine of ``benchmarks/results``.

    Raises
    ------
    TypeError
        A number or a bool is none.
    ValueError
        A field is out of its range.
    """

    workers: int | None = None
    """Most threads of one transfer; None suits the machine, the destination and the policy."""
    block_nbytes: int = 4 << 20
    """Bytes per read; a positive multiple of 4096."""
    pinned_nbytes: int = 256 << 20
    """Most bytes of page-locked memory that the context may hold; at least one block."""
    policy: Policy = "speed"
    """"cpu" spends fewer CPU seconds for each byte; "auto" does so when the CPUs are busy."""
    mapped_nbytes: int = 0
    """Most resident file bytes, rounded up to whole pages, that may stay registered with the GPU
    between calls, and so cannot be reclaimed meanwhile; 0 releases them at the end of each call."""
    reuse: Reuse = "auto"
    """"once" keeps the page cache clean; "many" leaves the bytes in it for the next reader;
    "auto" takes whatever is fastest now."""
    strict: bool = False
    """True turns any downgrade from the first-choice route into `RouteUnavailable`."""

    def __post_init__(self) -> None:
        _check_types(self)
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}; it must be at least 1, or None")
        if self.block_nbytes < PAGE_NBYTES or self.block_nbytes % PAGE_NBYTES:
            raise ValueError(
                f"block_nbytes is {self.block_nbytes}; it must be a positive multiple of "
                f"{PAGE_NBYTES}"
            )
        if self.pinned_nbytes < self.block_nbytes:
            raise ValueError(
                f"pinned_nbytes is {self.pinned_nbytes}; it must hold at least one block of "
                f"{self.block_nbytes} bytes: raise it, or lower block_nbytes"
            )
        if self.mapped_nbytes < 0:
            raise ValueError(f"mapped_nbytes is {self.mapped_nbytes}; it must not be negative")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy is {self.policy!r}; it must be one of {get_args(Policy)}")
        if self.reuse not in get_args(Reuse):
            raise ValueError(f"reuse is {self.reuse!r}; it must be one of {get_args(Reuse)}")


def _check_types(options: Options) -> None:
    for name in ("workers", "block_nbytes", "pinned_nbytes", "mapped_nbytes"):
        _check_integer(name, getattr(options, name), may_be_none=name == "workers")
    if not isinstance(options.strict, bool):
        raise TypeError(f"strict is {options.strict!r}; it must be True or False")


def _check_integer(name: str, value: object, *, may_be_none: bool) -> None:
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_integer and not (may_be_none and value is None):
        raise TypeError(f"{name} is {value!r}; it must be an integer{' or None' * may_be_none}")

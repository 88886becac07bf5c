"""Arithmetic of alignment; no memory is touched here."""

from __future__ import annotations


def align_down(value: int, alignment: int) -> int:
    """Largest multiple of `alignment` that is not above `value`."""
    return value - value % alignment


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment

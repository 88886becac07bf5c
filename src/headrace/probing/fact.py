"""Fact: what holds here, how we know, and what would change it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is true or false of this machine, volume or GPU."""

    name: str
    """Which fact, such as "O_DIRECT" or "CUDA device"."""
    holds: bool | None
    """Whether it holds; None where it cannot be known."""
    found: str
    """What was seen."""
    why: str
    """How we know: the file, call or library that said so, and its error if it failed."""
    remedy: str = ""
    """What would change it; "" where nothing needs to."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

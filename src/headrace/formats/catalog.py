"""Catalog and TensorSpec: what a file holds and where its bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.types import ByteRange


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array inside a file."""

    name: str
    """Name in the file; "" where the format has no names."""
    dtype: str
    """Safetensors name ("F32", "BF16", "F8_E4M3", ...); for the types of .npy that safetensors
    does not have, NumPy's own header descriptor as text (``"<c16"``, ``"[('x', '<f4')]"``)."""
    shape: tuple[int, ...]
    """Elements along each axis."""
    file_range: ByteRange
    """Where its bytes are in the file."""
    order: Literal["C", "F"] = "C"
    """Which axis is contiguous: "C" the last, "F" the first."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """What one file holds."""

    path: str
    """The file."""
    tensors: tuple[TensorSpec, ...]
    """In the order of their file offsets."""
    metadata: Mapping[str, str]
    """The file's own free text entries."""

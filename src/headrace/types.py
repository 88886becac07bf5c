"""Small values that every layer speaks in: byte ranges, devices and the names of the routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Route(StrEnum):
    """A way for bytes to travel from a file to their destination."""

    HOST = "host"
    """Buffered read straight into host memory."""
    CACHED = "cached"
    """Page cache -> pinned bounce buffer -> GPU."""
    MAPPED = "mapped"
    """The GPU copies straight out of the page cache."""
    DIRECT = "direct"
    """O_DIRECT around the page cache, into host memory or through a pinned bounce buffer."""
    GDS = "gds"
    """NVIDIA GPUDirect Storage through cuFile."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A half-open range of bytes of a file or a buffer."""

    start: int
    """First byte, inclusive."""
    stop: int
    """End, exclusive; never below ``start``."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory lives: the host, or one CUDA device."""

    kind: str
    """``"cpu"`` or ``"cuda"``."""
    index: int = 0
    """CUDA ordinal as the process sees it; 0 for the host."""

    @property
    def is_host(self) -> bool:
        """Whether the CPU can address this memory."""
        return self.kind == "cpu"

    def __str__(self) -> str:
        return "cpu" if self.is_host else f"cuda:{self.index}"


HOST = Device("cpu")
"""The host as a device."""


def parse_device(text: str) -> Device:
    """Read a device name.

    Parameters
    ----------
    text
        ``"cpu"``, ``"host"``, ``"cuda"`` (the first device) or ``"cuda:N"``.

    Raises
    ------
    ValueError
        The text names no device.
    """
    kind, colon, index = text.partition(":")
    if kind in ("cpu", "host") and not colon:
        return HOST
    if kind == "cuda" and (not colon or index.isdecimal()):
        return Device("cuda", int(index or 0))
    raise ValueError(f"device {text!r} is not 'cpu', 'cuda' or 'cuda:N'")


def windows(whole: ByteRange, step: int) -> Iterator[ByteRange]:
    """Cut a range at the multiples of `step`, so that every inner cut is aligned to it."""
    start = whole.start
    while start < whole.stop:
        stop = min(start - start % step + step, whole.stop)
        yield ByteRange(start, stop)
        start = stop

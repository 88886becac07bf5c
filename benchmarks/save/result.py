"""What a run of saves yields, beyond what a run of loads does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.result import GB, Reading, Row, median_or_none, routes_of

DISK, ZRAM = "disk", "zram"
"""Keys of places, beside that of tmpfs."""

IDLE, DELAYED = "idle", "delayed"
"""`Row.place` of a read in stream order: what the stream has to do before."""


@dataclass(frozen=True, slots=True)
class Timing(Reading):
    """One timed transfer: ``seconds`` until its bytes were handed over."""

    free_seconds: float
    """Until the call returned to the caller."""
    synced_seconds: float | None
    """Until fsync of the written file returned; None where nothing was written, or none was
    called."""


@dataclass(frozen=True, slots=True)
class SaveRow(Row):
    """One contestant at one place."""

    readings: tuple[Timing, ...]
    """The measured readings, in order."""

    @property
    def free_s(self) -> float | None:
        """Median seconds until the call returned; None without a reading."""
        return median_or_none([timing.free_seconds for timing in self.readings])

    @property
    def synced_speeds(self) -> tuple[float, ...]:
        """GB/s until fsync returned, of each reading."""
        found = [timing.synced_seconds for timing in self.readings]
        return tuple(self.nbytes / GB / seconds for seconds in found if seconds)

    @property
    def synced_gb_per_s(self) -> float | None:
        """Median speed until fsync returned; None without such a reading."""
        return median_or_none(self.synced_speeds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, with the derived figures, ready for JSON."""
        free = [timing.free_seconds for timing in self.readings]
        return {
            **Row.to_dict(self),
            "free_s": self.free_s,
            "free_s_min": min(free, default=None),
            "free_s_max": max(free, default=None),
            "synced_gb_per_s": self.synced_gb_per_s,
            "synced_gb_per_s_min": min(self.synced_speeds, default=None),
            "synced_gb_per_s_max": max(self.synced_speeds, default=None),
        }


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the first save in a fresh process takes of host memory."""

    name: str
    """The contestant."""
    nbytes: int
    """Payload, in bytes."""
    growth_nbytes: int | None
    """Most anonymous memory that was resident during the call, page-locked blocks included, above
    the level just before; None if it was not measured. Pages of files are not anonymous."""
    seconds: float | None
    """Wall time of the call; None if it was not measured."""
    error: str | None
    """Why it was not measured; None if it was."""
    reports: tuple[Mapping[str, Any], ...]
    """headrace's reports; empty for others."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**asdict(self), "routes": list(routes_of(self.reports))}

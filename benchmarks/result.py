"""What a benchmark run yields: frozen values, ready for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

SCHEMA = 1
"""Version of the keys of the JSON."""

RESIDENT, TMPFS, COLD = "resident", "tmpfs", "cold"
"""Keys of the places."""

GB = 1e9
"""Bytes in one GB, as the field counts it."""


class Role(StrEnum):
    """What a contestant stands for in the comparison."""

    OURS = "headrace"
    """headrace, one default call."""
    OURS_EXTRA = "headrace-extra"
    """headrace with a forced route or another policy, to show what the default saves."""
    PEER = "peer"
    """Another library as it comes, or what people write by hand."""
    PEER_TUNED = "peer-tuned"
    """Another library with its own settings turned."""


ONCE_NOTE = "run once only"
"""How the note begins of a contestant too slow to be run again."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One timed load."""

    round: int
    """0 for the warm-up round, then 1, 2, ..."""
    seconds: float
    """Wall time of the whole call, the wait for the GPU included."""
    cpu_seconds: float
    """User and system time of the process during the call."""
    resident_nbytes: int
    """Bytes of the source that the page cache held just before."""
    peak_device_nbytes: int | None
    """Most device memory that the framework's allocator had given out during the call, above what
    it had given out before; None where there is no device."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one place."""

    kind: str
    """``"raw"`` or ``"model"``; ``"kept"``, the model from a registration that is kept; ``"gds"``,
    the raw file's first bytes through cuFile."""
    place: str
    """Key of the place: ``"resident"``, ``"tmpfs"`` or ``"cold"``."""
    name: str
    """The contestant, as tables show it."""
    package: str
    """Distribution that it measures."""
    role: Role
    """What it stands for."""
    family: str | None
    """Name shared by the settings of one library of which the best is reported; None alone."""
    nbytes: int
    """Payload of one load, in bytes."""
    first: Reading | None
    """The warm-up reading; None if there was none."""
    readings: tuple[Reading, ...]
    """The measured readings, in order."""
    compared: bool
    """Whether every result, the first included, was equal to the reference byte for byte."""
    absent: str | None
    """Why the contestant could not take part; None if it did."""
    error: str | None
    """What it raised, or where its bytes were wrong; None if all was well."""
    note: str | None
    """Why it has fewer readings than others; None if it has all."""
    reports: tuple[Mapping[str, Any], ...]
    """headrace's reports of the last reading; empty for others."""

    @property
    def measured(self) -> tuple[Reading, ...]:
        """The readings that count: the measured ones, or the first of what was run once only."""
        once = self.note is not None and self.note.startswith(ONCE_NOTE)
        return (self.first,) if once and self.first else self.readings

    @property
    def is_valid(self) -> bool:
        """Whether the row may be compared with others."""
        return bool(self.measured) and self.compared and self.error is None

    @property
    def speeds(self) -> tuple[float, ...]:
        """GB/s of each reading that counts."""
        return tuple(self.nbytes / GB / reading.seconds for reading in self.measured)

    @property
    def gb_per_s(self) -> float | None:
        """Median speed; None without a reading."""
        return statistics.median(self.speeds) if self.measured else None

    @property
    def cpu_s_per_gb(self) -> float | None:
        """Median CPU seconds for each GB; None without a reading."""
        if not self.measured or not self.nbytes:
            return None
        return statistics.median(r.cpu_seconds for r in self.measured) / (self.nbytes / GB)

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes that headrace observed in the last reading, without repetition."""
        return routes_of(self.reports)

    def to_dict(self) -> dict[str, Any]:
        """Everything, with the derived figures, ready for JSON."""
        speeds = self.speeds
        median = self.gb_per_s
        return {
            **asdict(self),
            "seconds": [reading.seconds for reading in self.measured],
            "first_seconds": self.first.seconds if self.first else None,
            "gb_per_s": median,
            "gb_per_s_min": min(speeds, default=None),
            "gb_per_s_max": max(speeds, default=None),
            "spread": (max(speeds) - min(speeds)) / median if median else None,
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "routes": list(self.routes),
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Row:
        """Make a row again from what `to_dict` gave; derived figures are left out."""
        values = {field.name: given[field.name] for field in fields(cls)}
        first = values["first"]
        return cls(
            **{
                **values,
                "role": Role(values["role"]),
                "first": Reading(**first) if first else None,
                "readings": tuple(Reading(**reading) for reading in values["readings"]),
                "reports": tuple(values["reports"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """One load beside busy neighbours, and the same time without one."""

    round: int
    """0 for the warm-up, then 1, 2, ..."""
    seconds: float
    """Wall time of the load."""
    cpu_seconds: float
    """User and system time of the loading process: what it took from the neighbours."""
    loops: float
    """Iterations of all neighbours during the load."""
    neighbour_cpu_seconds: float
    """CPU time of all neighbours during the load."""
    alone_loops: float
    """Their iterations when nothing loads, in the same time."""
    alone_cpu_seconds: float
    """Their CPU time when nothing loads, in the same time."""

    @property
    def lost_share(self) -> float:
        """Share of the iterations that the load cost."""
        return 1.0 - self.loops / self.alone_loops if self.alone_loops else 0.0

    @property
    def lost_cpu_seconds(self) -> float:
        """CPU time that the neighbours had less."""
        return self.alone_cpu_seconds - self.neighbour_cpu_seconds


@dataclass(frozen=True, slots=True)
class BesideRow:
    """One contestant beside a busy process on each core."""

    name: str
    """The contestant."""
    processes: int
    """Busy processes."""
    nbytes: int
    """Payload of one load, in bytes."""
    loads: tuple[Beside, ...]
    """The measured loads."""
    compared: bool
    """Whether every result was equal to the reference byte for byte."""
    error: str | None
    """What it raised, or where its bytes were wrong; None if all was well."""
    reports: tuple[Mapping[str, Any], ...]
    """headrace's reports of the last load."""

    @property
    def cpu_s_per_gb(self) -> float | None:
        """Median CPU seconds taken for each GB; None without a valid load."""
        if not self.compared:
            return None
        return median_or_none([load.cpu_seconds * GB / self.nbytes for load in self.loads])

    def to_dict(self) -> dict[str, Any]:
        """Everything, with the derived figures, ready for JSON."""
        per_gb = GB / self.nbytes
        return {
            **asdict(self),
            "gb_per_s": median_or_none([1 / per_gb / load.seconds for load in self.loads]),
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "lost_share": median_or_none([load.lost_share for load in self.loads]),
            "lost_cpu_s_per_gb": median_or_none(
                [load.lost_cpu_seconds * per_gb for load in self.loads]
            ),
            "lost_loops_per_gb": median_or_none(
                [(load.alone_loops - load.loops) * per_gb for load in self.loads]
            ),
            "routes": list(routes_of(self.reports)),
        }


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first and the second load in fresh processes that had a CUDA context."""

    name: str
    """The contestant."""
    first_s: tuple[float, ...]
    """Seconds of the first call, by process."""
    second_s: tuple[float, ...]
    """Seconds of the second call, by process."""
    error: str | None
    """What went wrong; None if nothing did."""

    @property
    def difference_s(self) -> float | None:
        """Median over the processes of first minus second; None without a process."""
        pairs = zip(self.first_s, self.second_s, strict=True)
        return median_or_none([first - second for first, second in pairs])

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**asdict(self), "difference_s": self.difference_s}


@dataclass(frozen=True, slots=True)
class ImportTime:
    """How long an import takes on top of another."""

    name: str
    """Module that was imported."""
    after: str
    """Module that had been imported before."""
    seconds: tuple[float, ...]
    """Seconds, by process; the warm-up process is left out."""
    error: str | None
    """What went wrong; None if nothing did."""

    @property
    def median_s(self) -> float | None:
        """Median seconds; None without a process."""
        return median_or_none(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**asdict(self), "median_s": self.median_s}


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that was asked for, beside the one measured."""

    name: str
    """What it is about."""
    asked: str
    """The figure asked for, in words."""
    measured: float | None
    """The figure of this run, in `unit`; None if it was not measured."""
    wanted: float | None
    """The bound; None if it could not be told, because the peer is missing."""
    unit: str
    """Unit of both."""
    met: bool | None
    """Whether the bound holds; None if that could not be told."""
    evidence: str
    """The rows that the figures come from, or why there are none."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)


def routes_of(reports: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Routes that headrace observed, without repetition."""
    observed = [str(o["route"]) for report in reports for o in report.get("observed", ())]
    return tuple(dict.fromkeys(observed))


def median_or_none(values: Sequence[float]) -> float | None:
    """Median, or None of nothing."""
    return statistics.median(values) if values else None

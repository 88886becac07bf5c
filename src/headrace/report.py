"""Report: what happened, as one line, a dict, or a table in a notebook."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headrace.engines.base import Stats
from headrace.formats.catalog import TensorSpec
from headrace.planning.plan import Plan, Rejection
from headrace.probing.fact import Fact
from headrace.types import Device, Route

SCHEMA = 1
"""Version of the keys of `Report.to_dict`."""


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """Bytes that were meant to take a route."""

    route: Route
    """The route."""
    nbytes: int
    """Wanted bytes."""
    why: str
    """The fact that chose it."""


@dataclass(frozen=True, slots=True)
class ObservedRoute:
    """Bytes that took a route."""

    route: Route
    """The route."""
    nbytes: int
    """Bytes that arrived."""
    evidence: str
    """How we know."""
    unaligned_nbytes: int = 0
    """Bytes whose offset, length or address was not aligned for the route."""
    bounce: str = ""
    """What the bytes bounced through; "" where they went straight."""
    mode: str = ""
    """A name that tells more than the route's own, such as "gds (cuFile compatibility mode)"."""

    def __str__(self) -> str:
        return self.mode or str(self.route)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of tensors as they were when an asynchronous save was asked for."""

    device: str
    """Where the copy was kept: ``"cpu"`` or ``"cuda:N"``; several are joined by commas."""
    nbytes: int
    """Its size."""
    seconds: float
    """Wall time until the caller could change the tensors."""

    def __str__(self) -> str:
        return (
            f"snapshot of {format_nbytes(self.nbytes)} on {self.device} "
            f"in {_three_digits(self.seconds)} s"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What one transfer did."""

    source: str
    """File, directory or list that was read, or written."""
    device: str
    """Where the bytes went, or came from: ``"cpu"`` or ``"cuda:N"``; several joined by commas."""
    nbytes: int
    """Bytes that arrived."""
    seconds: float
    """Wall time of the whole call."""
    cpu_seconds: float
    """User and system time of the threads that took part."""
    planned: tuple[PlannedRoute, ...]
    """What the planner chose, by route."""
    observed: tuple[ObservedRoute, ...]
    """What the engines did, by route."""
    rejected: tuple[Rejection, ...]
    """Routes that were not taken."""
    resident_nbytes: int
    """Wanted bytes that the page cache held before the read."""
    stages: Mapping[str, float]
    """Wall seconds: of a read "open", "plan", "allocate", "transfer", "verify"; of a write
    "checksum" (where it was asked for), "plan", "allocate", "transfer", "sync". And "read" or
    "write", the part of "transfer" inside calls on files, summed over its workers."""
    pinned_nbytes: int
    """Most page-locked memory that the context held, in bytes."""
    mapped_nbytes: int = 0
    """File bytes that the context keeps registered, so that they cannot be reclaimed."""
    operation: Literal["read", "write"] = "read"
    """Which way the bytes went."""
    durable: bool | None = None
    """Whether a write was waited for until storage had it (fsync); None for a read."""
    snapshot: Snapshot | None = None
    """The copy that an asynchronous save wrote; None where the tensors themselves were written."""
    verified_nbytes: int | None = None
    """Bytes of a read whose checksum, stored in the file, was right; None if nobody asked."""

    @property
    def gb_per_s(self) -> float:
        """Bytes over wall time, in 10**9 bytes a second; 0 for an empty transfer."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; ``schema`` tells the version of the keys."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "device": self.device,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "gb_per_s": self.gb_per_s,
            "cpu_seconds": self.cpu_seconds,
            "planned": [
                {"route": str(p.route), "nbytes": p.nbytes, "why": p.why} for p in self.planned
            ],
            "observed": [
                {
                    "route": str(o.route),
                    "nbytes": o.nbytes,
                    "evidence": o.evidence,
                    "unaligned_nbytes": o.unaligned_nbytes,
                    "bounce": o.bounce,
                }
                for o in self.observed
            ],
            "rejected": rejections_to_list(self.rejected),
            "resident_nbytes": self.resident_nbytes,
            "stages": dict(self.stages),
            "pinned_nbytes": self.pinned_nbytes,
            "mapped_nbytes": self.mapped_nbytes,
            "operation": self.operation,
            "durable": self.durable,
            "snapshot": asdict(self.snapshot) if self.snapshot else None,
            "verified_nbytes": self.verified_nbytes,
        }

    def __str__(self) -> str:
        routes = " + ".join(str(o) for o in self.observed) or "nothing to move"
        # A reason that nobody can act on (a wrong kind of destination, say) stays in the dict.
        reasons = "".join(
            f"; {r.route}: {r.why}" for r in self.rejected if r.remedy and r.ruled_out
        )
        ends = [one_line(self.source), self.device]
        way = " -> ".join(ends if self.operation == "read" else reversed(ends))
        return (
            f"{way}  {format_nbytes(self.nbytes)} in "
            f"{_three_digits(self.seconds)} s ({_three_digits(self.gb_per_s)} GB/s) "
            f"{routes}{self._extras()}{one_line(reasons)}"
        )

    def _extras(self) -> str:
        """What only some transfers have to tell."""
        extras = []
        if self.snapshot is not None:
            extras.append(str(self.snapshot))
        if self.durable is False:
            extras.append("not synced to storage")
        if self.verified_nbytes is not None:
            checked = f"checksums right for {format_nbytes(self.verified_nbytes)}"
            extras.append(checked if self.verified_nbytes else "no checksums stored")
        return "".join(f"; {extra}" for extra in extras)

    def _repr_html_(self) -> str:
        from html import escape  # a table of two thousand entities, for notebooks only

        rows = "".join(
            f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
            for name, value in self.to_dict().items()
        )
        return f"<table><caption>{escape(str(self))}</caption>{rows}</table>"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a load would do, and why; no payload was read."""

    source: str
    """File, directory or list that would be read."""
    device: str
    """Where the bytes would go."""
    tensors: tuple[Mapping[str, Any], ...]
    """Per tensor: ``name``, ``dtype``, ``shape``, ``nbytes``, ``path``, ``file_offset``."""
    planned: tuple[PlannedRoute, ...]
    """What the planner would choose, by route."""
    rejected: tuple[Rejection, ...]
    """Routes that would not be taken."""
    facts: tuple[Mapping[str, Any], ...]
    """Per fact: ``name``, ``holds``, ``found``, ``why``, ``remedy``."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "source": self.source,
            "device": self.device,
            "tensors": [dict(tensor) for tensor in self.tensors],
            "planned": [
                {"route": str(p.route), "nbytes": p.nbytes, "why": p.why} for p in self.planned
            ],
            "rejected": rejections_to_list(self.rejected),
            "facts": [dict(fact) for fact in self.facts],
        }

    def __str__(self) -> str:
        routes = " + ".join(f"{p.route} {format_nbytes(p.nbytes)} ({p.why})" for p in self.planned)
        reasons = "".join(f"; {rejection}" for rejection in self.rejected)
        return f"{one_line(self.source)} -> {self.device}  {routes or 'nothing to move'}{reasons}"


class Stopwatch:
    """Measures the stages of one transfer, and the whole of it."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._began = time.perf_counter()
        self._cpu_began = time.thread_time()

    def stage(self, name: str) -> _Stage:
        """Time a stage: the block that this enters."""
        return _Stage(self.stages, name)

    def stop(self) -> tuple[float, float]:
        """Wall seconds, and CPU seconds of this thread, since the watch was made."""
        return time.perf_counter() - self._began, time.thread_time() - self._cpu_began


class _Stage:
    """A block that is timed; no generator, for five of those would be a tenth of a short read."""

    __slots__ = ("_began", "_name", "_stages")

    def __init__(self, stages: dict[str, float], name: str) -> None:
        self._stages = stages
        self._name = name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self._stages[self._name] = time.perf_counter() - self._began


def make_report(
    label: str,
    device: object,
    plan: Plan,
    stats: Sequence[Stats],
    watch: Stopwatch,
    held: tuple[int, int],
    operation: Literal["read", "write"] = "read",
) -> Report:
    """Put together what was planned and what was done; `held`: bytes page-locked and mapped."""
    seconds, cpu_seconds = watch.stop()
    return Report(
        source=label,
        device=str(device),
        nbytes=sum(done.nbytes for done in stats),
        seconds=seconds,
        cpu_seconds=cpu_seconds + sum(done.cpu_seconds for done in stats),
        planned=_planned_routes(plan),
        observed=tuple(
            ObservedRoute(
                done.route,
                done.nbytes,
                done.evidence,
                done.unaligned_nbytes,
                done.bounce,
                done.mode,
            )
            for done in stats
        ),
        rejected=plan.rejected,
        resident_nbytes=plan.resident_nbytes,
        stages={
            **watch.stages,
            operation: sum(done.file_seconds for done in stats),
        },
        pinned_nbytes=held[0],
        mapped_nbytes=held[1],
        operation=operation,
    )


def make_explanation(
    label: str,
    device: Device,
    specs: Sequence[TensorSpec],
    paths: Sequence[str],
    plan: Plan,
    facts: Sequence[Fact],
) -> Explanation:
    """Put together what would be done; `paths` holds the file of each tensor."""
    tensors = tuple(
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "nbytes": spec.file_range.nbytes,
            "path": path,
            "file_offset": spec.file_range.start,
        }
        for spec, path in zip(specs, paths, strict=True)
    )
    return Explanation(
        source=label,
        device=str(device),
        tensors=tensors,
        planned=_planned_routes(plan),
        rejected=plan.rejected,
        facts=tuple(fact.to_dict() for fact in facts),
    )


def _planned_routes(plan: Plan) -> tuple[PlannedRoute, ...]:
    nbytes: dict[tuple[Route, str], int] = {}
    for transfer in plan.transfers:
        key = (transfer.route, transfer.why)
        nbytes[key] = nbytes.get(key, 0) + transfer.nbytes
    return tuple(PlannedRoute(route, count, why) for (route, why), count in nbytes.items())


def rejections_to_list(rejected: tuple[Rejection, ...]) -> list[dict[str, str]]:
    """Rejections, ready for JSON."""
    return [{"route": str(r.route), "why": r.why, "remedy": r.remedy} for r in rejected]


def format_nbytes(nbytes: int) -> str:
    """Bytes in decimal units with three digits, as the field writes them: ``7.85 GB``."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    """A number with three digits, or all those before the point; never an exponent above."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def one_line(text: str) -> str:
    """Text without line breaks or control characters: a path may hold them, and forge a record."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )

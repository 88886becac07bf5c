"""Running the demo's methods in turn, and what each run gave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import headrace
from headrace.cli.demo_cache import CachedFile
from headrace.cli.demo_methods import Method
from headrace.cli.progress import Meter
from headrace.errors import RouteUnavailable
from headrace.report import Report, format_nbytes

RESIDENT, COLD = "resident", "cold"
"""States of the file before a run: in the page cache, or out of it."""

_READ_AHEAD_SHARE = 0.01
# The file was out of the cache when the clock started; more than this in it when headrace looked
# is what the kernel read ahead with the header, and worth a word.


@dataclass(frozen=True, slots=True)
class Run:
    """One timed load."""

    seconds: float
    """Wall time."""
    cpu_seconds: float
    """User and system time of the whole process meanwhile."""
    report: Report | None
    """What headrace says; None for other software."""
    matches: bool
    """Whether the bytes were right."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the demo's table."""

    method: str
    """Way of loading."""
    route: str
    """Forced route, or "auto"; "" for other software."""
    state: str
    """`RESIDENT` or `COLD`."""
    gb_per_s: float | None
    """10**9 bytes a second, of the median run; None where there is no figure."""
    cpu_s_per_gb: float | None
    """CPU seconds for 10**9 bytes, median; None where there is no figure."""
    observed: tuple[str, ...]
    """Routes that the bytes took, the greatest part first; () for other software."""
    resident_nbytes: int | None
    """What the page cache held when the last run planned its routes, by headrace's report."""
    why: str
    """What chose the route, how the method works, or why there is no figure."""
    matches: bool
    """Whether every run gave the right bytes."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {
            "method": self.method,
            "route": self.route or None,
            "state": self.state,
            "gb_per_s": self.gb_per_s,
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "observed": list(self.observed),
            "resident_nbytes": self.resident_nbytes,
            "why": self.why,
            "matches": self.matches,
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that a comparison needs."""

    file: CachedFile
    """The file to load."""
    nbytes: int
    """Bytes of its tensors."""
    repeat: int
    """Timed runs of each method in each state."""
    meter: Meter
    """Told of each run."""

    def drop_unavailable(
        self, methods: Sequence[Method]
    ) -> tuple[tuple[Method, ...], dict[str, str]]:
        """Try each method once, untimed; those whose route cannot serve go, with the reason."""
        self.file.warm()
        able: list[Method] = []
        unavailable: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for index, method in enumerate(methods):
            self.meter(
                f"first call: {method.name}", index * self.nbytes, len(methods) * self.nbytes
            )
            try:
                run = run_once(method)
            except RouteUnavailable as error:
                unavailable[method.route] = reasons.get(method.route, str(error))
                continue
            able.append(method)
            if run.report is not None and method.route == "auto":
                reasons = {str(r.route): str(r).partition(": ")[2] for r in run.report.rejected}
        return tuple(able), unavailable

    def compare(self, methods: Sequence[Method], state: str) -> tuple[Row, ...]:
        """Run the methods in turn, as often as asked, each from the same state of the file."""
        runs: dict[str, list[Run]] = {method.name: [] for method in methods}
        refused: dict[str, str] = {}
        total = self.repeat * len(methods)
        for index in range(total):
            method = methods[index % len(methods)]
            if method.name in refused:
                continue
            self.meter(f"{state}: {method.name}", index * self.nbytes, total * self.nbytes)
            if obstacle := self._set_state(state):
                return tuple(_empty_row(method, state, obstacle) for method in methods)
            try:
                runs[method.name].append(run_once(method))
            except RouteUnavailable as error:
                refused[method.name] = str(error)
        return tuple(
            _empty_row(method, state, refused[method.name])
            if method.name in refused
            else self._row(method, state, runs[method.name])
            for method in methods
        )

    def _set_state(self, state: str) -> str:
        """Put the file into a state; why not, or ""."""
        if state == COLD:
            return self.file.chill()
        self.file.warm()
        return ""

    def _row(self, method: Method, state: str, runs: Sequence[Run]) -> Row:
        """Sum up the runs of one method in one state."""
        report = runs[-1].report
        return Row(
            method=method.name,
            route=method.route,
            state=state,
            gb_per_s=self.nbytes / 1e9 / median(run.seconds for run in runs),
            cpu_s_per_gb=median(run.cpu_seconds for run in runs) / (self.nbytes / 1e9),
            observed=_observed(report) if report else (),
            resident_nbytes=report.resident_nbytes if report else None,
            why=describe_choice(report, state) if report else method.how,
            matches=all(run.matches for run in runs),
        )


def _observed(report: Report) -> tuple[str, ...]:
    """Name the routes that the bytes took, the one with the most bytes first."""
    parts = sorted(report.observed, key=lambda part: -part.nbytes)
    return tuple(str(part.route) for part in parts)


def describe_choice(report: Report, state: str) -> str:
    """Say why each route was chosen, and for how much of the file if there are several."""
    parts = sorted(report.planned, key=lambda part: -part.nbytes)
    if len(parts) == 1:
        why = parts[0].why
    else:
        total = sum(part.nbytes for part in parts) or 1
        several = len({part.route for part in parts}) > 1
        why = "; ".join(
            (f"{part.route} " if several else "") + f"{part.nbytes / total:.0%}: {part.why}"
            for part in parts
        )
    if state == COLD and report.resident_nbytes > _READ_AHEAD_SHARE * report.nbytes:
        why += f", and reading the header brought {format_nbytes(report.resident_nbytes)} in"
    return why


def run_once(method: Method) -> Run:
    """Load once, timed; the comparison with the reference is outside of the time."""
    with headrace.trace() as traced:
        cpu_start, start = time.process_time(), time.perf_counter()
        loaded = method.load()
        seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - cpu_start
    report = traced.reports[-1] if traced.reports else None
    return Run(seconds, cpu_seconds, report, method.matches(loaded))


def _empty_row(method: Method, state: str, why: str) -> Row:
    """Make a line without figures."""
    return Row(method.name, method.route, state, None, None, (), None, why, True)

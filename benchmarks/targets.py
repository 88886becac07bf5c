"""The figures that were asked for, each beside the one of this run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.raw_peers import KVIKIO_TUNED
from benchmarks.result import (
    COLD,
    RESIDENT,
    TMPFS,
    BesideRow,
    FirstCall,
    ImportTime,
    Role,
    Row,
    Target,
)

RAW_GB_PER_S = 48.0
MODEL_GB_PER_S = 44.0
OVER_KVIKIO_TUNED = 1.15
OVER_KVIKIO_DEFAULT = 7.0
OVER_PEER = 1.1
FIRST_CALL_S = 0.25
IMPORT_S = {"headrace": 0.030, "headrace.torch": 0.020}
DEVICE_MEMORY_RATIO = 1.01
KEPT_GB_PER_S = 50.0
KEPT_CPU_S_PER_GB = 0.01
MAPPED_GB_PER_S = 18.0
MAPPED_CPU_S_PER_GB = 0.06
NEIGHBOUR_SHARE = 0.25

ABSENT = "not measured in this run"
"""Evidence of a figure that is missing."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that a run measured."""

    rows: Sequence[Row]
    """Contestants, at every place."""
    first_calls: Sequence[FirstCall]
    """First calls, headrace's and peers'."""
    imports: Sequence[ImportTime]
    """Imports."""
    pinned_limit_nbytes: int | None
    """``Options().pinned_nbytes``; None if it could not be read."""
    beside: Sequence[BesideRow] = ()
    """Loads beside busy neighbours."""

    def ours(self, kind: str, place: str) -> Row | None:
        """Find headrace's default call."""
        return next((r for r in self._at(kind, place) if r.role is Role.OURS), None)

    def named(self, kind: str, place: str, part: str) -> Row | None:
        """Find headrace's row whose name has this part."""
        roles = (Role.OURS, Role.OURS_EXTRA)
        rows = self._at(kind, place)
        return next((r for r in rows if r.role in roles and part in r.name), None)

    def fastest(self, kind: str, place: str, wanted: Callable[[Row], bool]) -> Row | None:
        """Find the fastest valid peer of those wanted."""
        peers = [r for r in self._at(kind, place) if r.role in (Role.PEER, Role.PEER_TUNED)]
        valid = [r for r in peers if r.is_valid and wanted(r)]
        return max(valid, key=lambda row: row.gb_per_s or 0.0, default=None)

    def _at(self, kind: str, place: str) -> Iterable[Row]:
        return (row for row in self.rows if (row.kind, row.place) == (kind, place))


def gpu_targets(findings: Findings) -> list[Target]:
    """Give the targets of a machine with a GPU."""
    return [
        _speed(findings, "raw", RESIDENT, RAW_GB_PER_S),
        _over(
            findings,
            "raw",
            RESIDENT,
            OVER_KVIKIO_TUNED,
            "the best tuned KvikIO",
            lambda row: row.family == KVIKIO_TUNED,
        ),
        _over(
            findings,
            "raw",
            RESIDENT,
            OVER_KVIKIO_DEFAULT,
            "KvikIO at its defaults",
            lambda row: row.name == "KvikIO default",
        ),
        _speed(findings, "model", RESIDENT, MODEL_GB_PER_S),
        *_over_peers(findings, RESIDENT, OVER_PEER),
        _speed(findings, "model", TMPFS, MODEL_GB_PER_S),
        *_over_peers(findings, TMPFS, OVER_PEER),
        *_over_peers(findings, COLD, 1.0),
        *process_targets(findings),
        pinned_target(findings),
        device_memory_target(findings),
        *_thrift(findings, "kept", "mapped_nbytes", KEPT_GB_PER_S, KEPT_CPU_S_PER_GB),
        *_thrift(findings, "model", 'route="mapped"', MAPPED_GB_PER_S, MAPPED_CPU_S_PER_GB),
        _gds_target(findings),
        neighbour_target(findings),
    ]


def host_targets(findings: Findings) -> list[Target]:
    """Give the targets of a machine without a GPU."""
    return [
        _over(findings, "raw", RESIDENT, 1.0, "np.fromfile", lambda row: row.name == "np.fromfile"),
        _over(findings, "raw", COLD, 1.0, "the better of buffered and O_DIRECT", _is_any),
        *process_targets(findings),
    ]


def _over_peers(findings: Findings, place: str, factor: float) -> list[Target]:
    return [
        _over(
            findings,
            "model",
            place,
            factor,
            "the fastest peer as it comes",
            lambda row: row.role is Role.PEER,
        ),
        _over(findings, "model", place, factor, "the fastest peer, tuned ones too", _is_any),
    ]


def _speed(findings: Findings, kind: str, place: str, wanted: float) -> Target:
    ours = findings.ours(kind, place)
    measured = ours.gb_per_s if ours and ours.is_valid else None
    return at_least(
        _subject(kind, place), f"at least {wanted:g} GB/s", measured, wanted, tell_speed(ours)
    )


def _over(
    findings: Findings,
    kind: str,
    place: str,
    factor: float,
    whom: str,
    wanted: Callable[[Row], bool],
) -> Target:
    """Compare headrace's speed with `factor` times the fastest peer of those wanted."""
    ours = findings.ours(kind, place)
    peer = findings.fastest(kind, place, wanted)
    measured = ours.gb_per_s if ours and ours.is_valid else None
    bound = factor * peer.gb_per_s if peer and peer.gb_per_s else None
    asked = f"at least {factor:g} times {whom}"
    evidence = f"{tell_speed(ours)}; {tell_speed(peer) if peer else f'{whom}: {ABSENT}'}"
    return at_least(_subject(kind, place), asked, measured, bound, evidence)


def _thrift(findings: Findings, kind: str, part: str, gb_per_s: float, cpu: float) -> list[Target]:
    """Ask a resident model's row for speed and for little CPU time."""
    row = findings.named(kind, RESIDENT, part)
    valid = row if row and row.is_valid else None
    kept = [int(report.get("mapped_nbytes", 0)) for report in row.reports] if row else []
    evidence = tell_speed(row) + (
        f", {max(kept) / 1e9:.3g} GB stay registered" if any(kept) else ""
    )
    name = f"{_subject('model', RESIDENT)}, {part}" + (", kept" if kind == "kept" else "")
    speed = valid.gb_per_s if valid else None
    spent = valid.cpu_s_per_gb if valid else None
    return [
        at_least(name, f"at least {gb_per_s:g} GB/s", speed, gb_per_s, evidence),
        at_most(name, spent, cpu, "CPU s/GB", evidence),
    ]


def _gds_target(findings: Findings) -> Target:
    """Compare cuFile by headrace with cuFile by KvikIO."""
    row = findings.named("gds", COLD, 'route="gds"')
    peer = findings.fastest("gds", COLD, _is_any)
    evidence = [tell_speed(row), tell_speed(peer) if peer else f"KvikIO: {_why_no_peer(findings)}"]
    return at_least(
        "raw file through cuFile, cold",
        "at least KvikIO with its compatibility mode off",
        row.gb_per_s if row and row.is_valid else None,
        peer.gb_per_s if peer else None,
        "; ".join(evidence),
    )


def _why_no_peer(findings: Findings) -> str:
    peers = [row for row in findings.rows if row.kind == "gds" and "KvikIO" in row.name]
    return next((why for r in peers if (why := r.absent or r.error)), ABSENT)


def neighbour_target(findings: Findings) -> Target:
    """Compare the CPU time that two policies take from neighbours for the same bytes."""
    by_policy = {
        policy: next((row for row in findings.beside if f'policy="{policy}"' in row.name), None)
        for policy in ("cpu", "speed")
    }
    taken = [row.cpu_s_per_gb if row else None for row in by_policy.values()]
    thrifty, fast = taken
    return at_most(
        'CPU time that policy="cpu" takes from busy neighbours, as a share of cached\'s',
        thrifty / fast if thrifty is not None and fast else None,
        NEIGHBOUR_SHARE,
        "times",
        "; ".join(_tell_beside(policy, row) for policy, row in by_policy.items()),
    )


def _tell_beside(policy: str, row: BesideRow | None) -> str:
    if row is None or row.cpu_s_per_gb is None:
        return f'policy="{policy}": {row.error if row and row.error else ABSENT}'
    lost = row.to_dict()["lost_share"]
    return (
        f'policy="{policy}" {row.cpu_s_per_gb:.3g} CPU s/GB, '
        f"{row.processes} neighbours {lost:.0%} slower meanwhile"
    )


def at_least(
    name: str, asked: str, measured: float | None, wanted: float | None, evidence: str
) -> Target:
    """Give a target on a speed, which is to reach a bound."""
    met = None if measured is None or wanted is None else measured >= wanted
    return Target(name, asked, measured, wanted, "GB/s", met, evidence)


def at_most(
    name: str, measured: float | None, wanted: float | None, unit: str, evidence: str
) -> Target:
    """Give a target on what is to stay within a bound."""
    asked = "not known" if wanted is None else f"at most {wanted:g} {unit}"
    met = None if measured is None or wanted is None else measured <= wanted
    return Target(name, asked, measured, wanted, unit, met, evidence)


def process_targets(findings: Findings) -> list[Target]:
    """Give the targets on the first call and on the imports."""
    first = next((f for f in findings.first_calls if f.name.startswith("headrace")), None)
    difference = first.difference_s if first else None
    evidence = (first.error or f"{len(first.first_s)} processes") if first else ABSENT
    name = "first call in a fresh process, over the second"
    return [
        at_most(name, difference, FIRST_CALL_S, "s", evidence),
        *(_import_target(found) for found in findings.imports),
    ]


def _import_target(found: ImportTime) -> Target:
    name = f"import {found.name}, on top of {found.after}"
    evidence = found.error or f"median of {len(found.seconds)} processes"
    return at_most(name, found.median_s, IMPORT_S.get(found.name), "s", evidence)


def pinned_target(findings: Findings) -> Target:
    """Compare the most pinned memory in any report with what the options allow."""
    ours = [row for row in findings.rows if row.role in (Role.OURS, Role.OURS_EXTRA)]
    pinned = [float(report["pinned_nbytes"]) for row in ours for report in row.reports]
    limit = findings.pinned_limit_nbytes
    return at_most(
        "peak pinned memory",
        max(pinned, default=None),
        None if limit is None else float(limit),
        "B",
        f"{len(pinned)} reports" if pinned else ABSENT,
    )


def device_memory_target(findings: Findings) -> Target:
    """Compare the allocator's peak during headrace's model loads with the size of the tensors."""
    ours = [row for row in findings.rows if row.role is Role.OURS and row.kind == "model"]
    ratios = [
        reading.peak_device_nbytes / row.nbytes
        for row in ours
        for reading in row.measured
        if reading.peak_device_nbytes is not None
    ]
    evidence = f"torch's allocator, {len(ratios)} loads" if ratios else ABSENT
    return at_most(
        "peak device memory, as a share of the tensors",
        max(ratios, default=None),
        DEVICE_MEMORY_RATIO,
        "times the tensors",
        evidence,
    )


def _is_any(row: Row) -> bool:
    return row is not None


def _subject(kind: str, place: str) -> str:
    return f"{'raw file' if kind == 'raw' else 'model'}, {place}"


def tell_speed(row: Row | None) -> str:
    """Say how fast a row was, or why that is not known."""
    if row is None:
        return f"headrace: {ABSENT}"
    if row.is_valid:
        return f"{row.name} {row.gb_per_s:.1f} GB/s"
    return f"{row.name}: {row.absent or row.error or ABSENT}"

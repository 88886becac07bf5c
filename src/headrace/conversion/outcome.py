"""What a conversion did, as value, line and dict; and many reports as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.report import SCHEMA, ObservedRoute, PlannedRoute, Report, format_nbytes, one_line


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did."""

    source: str
    """What was converted."""
    target: str
    """Where it went."""
    files: tuple[str, ...]
    """The safetensors files that were written."""
    tensors: int
    """How many tensors they hold."""
    nbytes: int
    """Bytes of the tensors."""
    seconds: float
    """Wall time of everything."""
    aligned: bool
    """Whether tensors lie at multiples of 4096 bytes, where their sizes allow it."""
    checksums: bool
    """Whether checksums are stored."""
    read: Report | None
    """All reads together; None for a source that NumPy reads."""
    write: Report
    """All writes together."""
    notes: tuple[str, ...]
    """What is not as one might expect."""

    @property
    def gb_per_s(self) -> float:
        """Bytes over wall time, in 10**9 bytes a second; 0 for no bytes."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; ``read`` and ``write`` as `Report.to_dict` has them."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "target": self.target,
            "files": list(self.files),
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "gb_per_s": self.gb_per_s,
            "aligned": self.aligned,
            "checksums": self.checksums,
            "notes": list(self.notes),
            "read": self.read and self.read.to_dict(),
            "write": self.write.to_dict(),
        }

    def __str__(self) -> str:
        what = f"{self.tensors} tensor{'s' * (self.tensors != 1)}, {format_nbytes(self.nbytes)}"
        manner = "aligned" if self.aligned else "not aligned"
        return (
            f"{one_line(self.source)} -> {one_line(self.target)}  {what} in {self.seconds:.3g} s "
            f"({self.gb_per_s:.3g} GB/s), {len(self.files)} file{'s' * (len(self.files) != 1)}, "
            f"{manner}{', with checksums' * self.checksums}"
        )


def join_reports(reports: Sequence[Report]) -> Report:
    """One report of transfers that were made one after the other, to or from the same place."""
    first, last = reports[0], reports[-1]
    planned: dict[tuple[str, str], PlannedRoute] = {}
    observed: dict[tuple[str, str], ObservedRoute] = {}
    stages: dict[str, float] = {}
    for report in reports:
        for plan in report.planned:
            before = planned.setdefault((plan.route, plan.why), replace(plan, nbytes=0))
            planned[plan.route, plan.why] = replace(plan, nbytes=before.nbytes + plan.nbytes)
        for seen in report.observed:
            known = observed.get((str(seen), seen.bounce))
            observed[str(seen), seen.bounce] = _add(known, seen) if known else seen
        for stage, seconds in report.stages.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    checked = [r.verified_nbytes for r in reports if r.verified_nbytes is not None]
    return replace(
        first,
        nbytes=sum(report.nbytes for report in reports),
        seconds=sum(report.seconds for report in reports),
        cpu_seconds=sum(report.cpu_seconds for report in reports),
        planned=tuple(planned.values()),
        observed=tuple(observed.values()),
        rejected=tuple(dict.fromkeys(each for report in reports for each in report.rejected)),
        resident_nbytes=sum(report.resident_nbytes for report in reports),
        stages=stages,
        pinned_nbytes=max(report.pinned_nbytes for report in reports),
        mapped_nbytes=last.mapped_nbytes,
        durable=last.durable,
        verified_nbytes=sum(checked) if checked else None,
    )


def _add(known: ObservedRoute, seen: ObservedRoute) -> ObservedRoute:
    rest = "; and so on, part by part"
    return replace(
        known,
        nbytes=known.nbytes + seen.nbytes,
        unaligned_nbytes=known.unaligned_nbytes + seen.unaligned_nbytes,
        evidence=known.evidence.removesuffix(rest) + rest,
    )

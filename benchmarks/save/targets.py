"""The figures that were asked for of writing, each beside the one of this run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.result import TMPFS, Role, Target
from benchmarks.save.result import DELAYED, DISK, IDLE, ZRAM, HostMemory, SaveRow
from benchmarks.save.streams import KEPT, SUBMITTED
from benchmarks.save.writers import THREADS, workers_title
from benchmarks.targets import ABSENT, at_least, at_most, tell_speed

OVER_KVIKIO = 1.5
OVER_SAFETENSORS = 3.0
HOST_NBYTES = 512 << 20
ASYNC_FREE_S = 0.05
STREAM_FREE_S = 0.001

Figure = Callable[[SaveRow], float | None]
"""A speed of a row."""


@dataclass(frozen=True, slots=True)
class SaveFindings:
    """Everything that a run of saves measured."""

    rows: Sequence[SaveRow]
    """Contestants, at every place."""
    host_memory: Sequence[HostMemory]
    """Host memory of saves."""

    def at(self, kind: str, place: str) -> list[SaveRow]:
        """Give the rows of a contest."""
        return [row for row in self.rows if (row.kind, row.place) == (kind, place)]

    def ours(self, kind: str, place: str, part: str | None = None) -> SaveRow | None:
        """Find headrace's default call, or headrace's row whose name begins or ends so."""
        for row in self.at(kind, place):
            if part is None and row.role is Role.OURS:
                return row
            if part and _is_ours(row) and (row.name.startswith(part) or row.name.endswith(part)):
                return row
        return None

    def fastest_peer(self, kind: str, place: str, figure: Figure, name: str) -> SaveRow | None:
        """Find the fastest valid peer of those whose name begins so."""
        peers = [row for row in self.at(kind, place) if not _is_ours(row) and row.is_valid]
        rows = [row for row in peers if row.name.startswith(name)]
        return max(rows, key=lambda row: figure(row) or 0.0, default=None)


def save_targets(findings: SaveFindings) -> list[Target]:
    """Give the targets of a machine with a GPU."""
    return [
        *(_over_same_threads(findings, threads) for threads in THREADS),
        *(
            _over_kvikio(findings, place, until, figure)
            for place in (DISK, ZRAM)
            for until, figure in (("fsync", _synced), ("the call", _returned))
        ),
        _over(
            "model to tmpfs, one file",
            f"at least {OVER_SAFETENSORS:g} times safetensors save_file",
            OVER_SAFETENSORS,
            findings.ours("model", TMPFS),
            findings.fastest_peer("model", TMPFS, _returned, "safetensors"),
            _returned,
        ),
        _host_target(findings),
        _free_target("model saved in the background, until the caller is free",
                     findings.ours("async", TMPFS), ASYNC_FREE_S),
        *(
            _free_target(f"{part}, {state} stream, until the call returns",
                         findings.ours("stream", state, part), STREAM_FREE_S)
            for part in (KEPT, SUBMITTED)
            for state in (IDLE, DELAYED)
        ),
    ]  # fmt: skip


def _over_same_threads(findings: SaveFindings, threads: int) -> Target:
    title = f"KvikIO, {threads} thread"
    peer = findings.fastest_peer("raw", TMPFS, _returned, title)
    return _over(
        f"GPU to tmpfs, threads: {threads}",
        f"at least {OVER_KVIKIO:g} times KvikIO with as many threads",
        OVER_KVIKIO,
        findings.ours("raw", TMPFS, workers_title(threads)),
        peer,
        _returned,
    )


def _over_kvikio(findings: SaveFindings, place: str, until: str, figure: Figure) -> Target:
    return _over(
        f"GPU to {place}, until {until} returned",
        "at least the fastest KvikIO",
        1.0,
        findings.ours("raw", place),
        findings.fastest_peer("raw", place, figure, "KvikIO"),
        figure,
    )


def _over(
    name: str, asked: str, factor: float, ours: SaveRow | None, peer: SaveRow | None, figure: Figure
) -> Target:
    """Compare a speed of headrace with a multiple of a peer's."""
    measured = figure(ours) if ours and ours.is_valid else None
    bound = figure(peer) if peer else None
    evidence = f"{_tell(ours, figure)}; {_tell(peer, figure) if peer else f'peer: {ABSENT}'}"
    return at_least(name, asked, measured, None if bound is None else factor * bound, evidence)


def _host_target(findings: SaveFindings) -> Target:
    """Compare the host memory that headrace's default save takes with the bound."""
    ours = [found for found in findings.host_memory if found.name.startswith("headrace")]
    growth = ours[0].growth_nbytes if ours else None
    return at_most(
        "peak host memory of saving the model",
        None if growth is None else float(growth),
        float(HOST_NBYTES),
        "B",
        "; ".join(_tell_memory(found) for found in findings.host_memory) or ABSENT,
    )


def _free_target(name: str, row: SaveRow | None, bound_s: float) -> Target:
    """Compare the time until a call returned with the bound."""
    valid = row if row and row.is_valid else None
    evidence = f"median of {len(valid.readings)} calls" if valid else tell_speed(row)
    return at_most(name, valid.free_s if valid else None, bound_s, "s", evidence)


def _tell_memory(found: HostMemory) -> str:
    if found.growth_nbytes is None:
        return f"{found.name}: {found.error}"
    return f"{found.name} {found.growth_nbytes / 1e9:.3g} GB"


def _tell(row: SaveRow | None, figure: Figure) -> str:
    speed = figure(row) if row and row.is_valid else None
    return tell_speed(row) if row is None or speed is None else f"{row.name} {speed:.2f} GB/s"


def _returned(row: SaveRow) -> float | None:
    return row.gb_per_s


def _synced(row: SaveRow) -> float | None:
    return row.synced_gb_per_s


def _is_ours(row: SaveRow) -> bool:
    return row.role in (Role.OURS, Role.OURS_EXTRA)

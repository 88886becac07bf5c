"""What the demo's rows say, in sentences; every number and name in them comes from the rows."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cli.demo_bench import COLD, RESIDENT, Row

_NOISE = 1.1  # runs of one method differ by 5 to 15 % (FACTS.md); less than this is a draw

_STATES = {RESIDENT: "In the page cache", COLD: "Not in the page cache"}


def conclude(rows: Sequence[Row]) -> tuple[str, ...]:
    """Say what is best here and why: one sentence for each state of the file."""
    sentences = (_conclude_state(state, [r for r in rows if r.state == state]) for state in _STATES)
    return tuple(sentence for sentence in sentences if sentence)


def _conclude_state(state: str, rows: Sequence[Row]) -> str:
    """Write the sentence for one state; "" when there is nothing to say."""
    auto = next((row for row in rows if row.route == "auto"), None)
    if auto is None:
        return ""
    if auto.gb_per_s is None:
        return f"{_STATES[state]}: {auto.why}."
    taken = " + ".join(auto.observed) or "no route"
    head = f"{_STATES[state]}: headrace took {taken} ({auto.why}) at {auto.gb_per_s:.2f} GB/s"
    return f"{head}, {_against_others(auto, rows)}."


def _against_others(auto: Row, rows: Sequence[Row]) -> str:
    """How the automatic choice stands beside the forced routes and beside other software."""
    mine = auto.gb_per_s or 0.0
    parts = []
    if usual := _fastest([row for row in rows if not row.route]):
        parts.append(_compare(mine, usual, "other software"))
    if forced := _fastest([row for row in rows if row.route not in ("", "auto")]):
        parts.append(_compare(mine, forced, "forced routes"))
    return " and ".join(parts) or "with nothing to compare"


def _compare(mine: float, other: Row, kind: str) -> str:
    """One comparison, honest about a draw and a defeat."""
    theirs = other.gb_per_s or 0.0
    named = f"{other.method}, the best of the {kind} ({theirs:.2f} GB/s)"
    if kind == "other software":
        named = f"{other.method}, the best {kind} ({theirs:.2f} GB/s)"
    if mine > theirs * _NOISE:
        return f"{mine / theirs:.1f} times {named}"
    if theirs > mine * _NOISE:
        return f"slower than {named}"
    return f"level with {named}"


def _fastest(rows: Sequence[Row]) -> Row | None:
    """Find the row with the highest rate, of those that have one."""
    measured = [row for row in rows if row.gb_per_s is not None]
    return max(measured, key=lambda row: row.gb_per_s or 0.0, default=None)

"""What the demo's rows say, in sentences; every number and name in them comes from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from headrace.cli.demo_bench import COLD, RESIDENT, Row

_NOISE = 1.1  # runs of one method differ by 5 to 15 % (FACTS.md); less than this is a draw

_STATES = MappingProxyType({RESIDENT: "In the page cache", COLD: "Not in the page cache"})


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
    routes = " + ".join(auto.observed) or "nothing to move"
    taken = auto.why if len(auto.observed) > 1 else f"{routes}: {auto.why}"
    head = f"{_STATES[state]}: headrace ({taken}) reaches {auto.gb_per_s:.2f} GB/s"
    return head + _beside_others(auto.gb_per_s, rows) + _beside_forced(routes, rows) + "."


def _beside_others(mine: float, rows: Sequence[Row]) -> str:
    """Compare with the best of the other software, honest about a draw and a defeat."""
    measured = [(row.gb_per_s, row.method) for row in rows if not row.route and row.gb_per_s]
    if not measured:
        return ""
    theirs, method = max(measured)
    if mine > theirs * _NOISE:
        return f", {mine / theirs:.1f} times the best of today's ways, {method} ({theirs:.2f})"
    if theirs > mine * _NOISE:
        return f"; the best here is {method} ({theirs:.2f}, {theirs / mine:.1f} times that)"
    return f", level with the best of today's ways, {method} ({theirs:.2f})"


def _beside_forced(taken: str, rows: Sequence[Row]) -> str:
    """Say what the other routes would give, so that the choice can be judged."""
    forced = [
        f"{row.gb_per_s:.2f} by {row.route}"
        for row in rows
        if row.gb_per_s and row.route not in ("", "auto", taken)
    ]
    return f"; forced, it would be {', '.join(forced)}" if forced else ""

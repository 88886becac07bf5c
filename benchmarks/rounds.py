"""The method: every contestant once a round, in a rotating order, every result compared."""

from __future__ import annotations

import faulthandler
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from benchmarks.contestants import Contestant, Participant
from benchmarks.memory import Arrays, Memory
from benchmarks.places import Place, Residency
from benchmarks.result import ONCE_NOTE, Reading, Role, Row

ONCE_S = 20.0
"""A contestant whose first reading took longer is not run again."""

SLOW_S = 1.57
"""A contestant whose last reading took longer (under 5 GB/s for 7.85 GB) has `SLOW_ROUNDS`."""

SLOW_ROUNDS = 2
"""Measured rounds of slow contestants; headrace's default call has all."""

FAMILY_FINALISTS = 3
"""Settings of one family that go on after the first measured round."""

HANG_S = 120.0
"""A call that takes longer ends the whole run, with a traceback of every thread."""

_EXTRA_SHARE = 0.5  # of the budget, for rows that only illustrate

P = TypeVar("P", bound=Participant)

Trial = Callable[[P, int], tuple[Reading, str | None]]
"""One timed call of a participant in the round of that number, and where its bytes were wrong."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Time that a run has left."""

    stop: float
    """End on the clock of `time.perf_counter`."""

    @classmethod
    def after(cls, seconds: float) -> Clock:
        """Start a clock that is over in so many seconds."""
        return cls(time.perf_counter() + seconds)

    def is_over(self) -> bool:
        """Whether no new round should start."""
        return time.perf_counter() >= self.stop


@dataclass(frozen=True, slots=True)
class Limits:
    """When a participant leaves."""

    repeats: int
    """Measured rounds."""
    budget_s: float
    """Seconds of readings after which a participant leaves."""
    slow_s: float
    """A participant whose last reading took longer has `SLOW_ROUNDS`."""


@dataclass(frozen=True, slots=True)
class Contest:
    """Contestants that load one source to one memory."""

    kind: str
    """As `Row.kind`."""
    place: Place
    """Where the source lies."""
    memory: Memory
    """Destination."""
    reference: Arrays
    """What every result must equal."""
    target: Any
    """Array that some contestants read into, poisoned before each reading; None for none."""
    nbytes: int
    """Payload of one load."""
    repeats: int
    """Measured rounds."""
    budget_s: float
    """Seconds of readings after which a contestant leaves."""
    residency: Residency
    """Puts the source into the page cache or out of it."""


@dataclass(slots=True)
class Entry(Generic[P]):
    """A participant's score so far."""

    contestant: P
    """Who."""
    readings: list[Reading] = field(default_factory=list)
    """What was timed, the warm-up included."""
    absent: str | None = None
    """As `Row.absent`."""
    error: str | None = None
    """As `Row.error`."""
    note: str | None = None
    """As `Row.note`."""
    reports: tuple[Mapping[str, Any], ...] = ()
    """As `Row.reports`."""

    @property
    def is_running(self) -> bool:
        """Whether it takes part in the next round."""
        return self.absent is None and self.error is None and self.note is None

    @property
    def spent_s(self) -> float:
        """Seconds of all readings."""
        return sum(reading.seconds for reading in self.readings)

    def is_slow(self, slow_s: float) -> bool:
        """Whether the last reading took longer, and it is not headrace's default call."""
        return self.contestant.role is not Role.OURS and self.readings[-1].seconds > slow_s


def run_contest(
    contest: Contest,
    contestants: Sequence[Contestant],
    clock: Clock,
    tell: Callable[[str], object],
) -> list[Row]:
    """Run all rounds of loads; see `run_rounds`."""
    limits = Limits(contest.repeats, contest.budget_s, SLOW_S)
    entries = run_rounds(limits, contestants, partial(_try_load, contest), clock, tell)
    kind, place = contest.kind, contest.place.key
    return [_make_row(entry, kind, place, contest.nbytes) for entry in entries]


def run_rounds(
    limits: Limits,
    contestants: Sequence[P],
    trial: Trial[P],
    clock: Clock,
    tell: Callable[[str], object],
) -> list[Entry[P]]:
    """Run all rounds until the clock is over, and close the participants.

    Returns
    -------
    list of Entry
        One for each participant, in their order, absent and failed ones too. `tell` has received
        a line for each that left early.
    """
    entries = [Entry(c, absent=c.why_absent()) for c in contestants]
    try:
        for number in range(limits.repeats + 1):
            for entry in _order_of_round(entries, number):
                _retire_by_time(entry, limits, clock, number)
                if entry.is_running:
                    _take_reading(entry, trial, number)
                if not entry.is_running:
                    tell(f"{entry.contestant.name}: {entry.error or entry.note}")
            if number == 1:
                _keep_finalists(entries)
    finally:
        for contestant in contestants:
            contestant.close()
    return entries


def absent_row(contestant: Contestant, kind: str, place: str, why: str) -> Row:
    """Give the row of a contestant whose contest cannot be held."""
    return _make_row(Entry(contestant, absent=why), kind, place, 0)


def _order_of_round(entries: Sequence[Entry[P]], number: int) -> list[Entry[P]]:
    """Rotate, and turn every other round around, so that neighbours change as well."""
    running = [entry for entry in entries if entry.is_running]
    shift = number % max(len(running), 1)
    rotated = running[shift:] + running[:shift]
    return rotated[::-1] if number % 2 else rotated


def _retire_by_time(entry: Entry[P], limits: Limits, clock: Clock, number: int) -> None:
    done = f"stopped after {max(number - 1, 0)} of {limits.repeats} rounds"
    extra = entry.contestant.role is Role.OURS_EXTRA
    budget_s = limits.budget_s * (_EXTRA_SHARE if extra else 1.0)
    if clock.is_over():
        entry.note = f"{done}: the time for the whole run was over"
    elif number == 1 and entry.spent_s > ONCE_S:
        entry.note = f"{ONCE_NOTE}: it took {entry.spent_s:.1f} s"
    elif number > 1 and entry.spent_s > budget_s:
        entry.note = f"{done}: its readings took {entry.spent_s:.1f} s"
    elif number > SLOW_ROUNDS and entry.is_slow(limits.slow_s):
        entry.note = f"{done}: the last took {entry.readings[-1].seconds:.1f} s"


def _keep_finalists(entries: Sequence[Entry[P]]) -> None:
    """Let only the fastest settings of each family go on."""
    families = {e.contestant.family for e in entries if e.contestant.family and e.is_running}
    for family in families:
        members = [e for e in entries if e.contestant.family == family and e.is_running]
        members.sort(key=lambda entry: entry.readings[-1].seconds)
        for entry in members[FAMILY_FINALISTS:]:
            entry.note = f"not among the {FAMILY_FINALISTS} fastest settings after one round"


def _take_reading(entry: Entry[P], trial: Trial[P], number: int) -> None:
    """Take one reading; what a participant raises becomes its row's error."""
    try:
        with hang_guard():
            reading, entry.error = trial(entry.contestant, number)
        entry.readings.append(reading)
        entry.reports = entry.contestant.take_reports()
    except Exception as error:  # noqa: BLE001  foreign code may raise anything: it is shown
        entry.error = f"{type(error).__name__}: {error}"


@contextmanager
def hang_guard() -> Iterator[None]:
    """End the process, with a traceback of every thread, if the block takes over `HANG_S`."""
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _try_load(contest: Contest, contestant: Contestant, number: int) -> tuple[Reading, str | None]:
    """Time one load and compare its result."""
    reading, arrays = _time_load(contestant, contest, number)
    fault = contest.memory.find_difference(arrays, contest.reference)
    _discard(arrays, contest)
    return reading, fault


def _time_load(contestant: Contestant, contest: Contest, number: int) -> tuple[Reading, Arrays]:
    memory, source = contest.memory, contest.place.source(contest.kind)
    with contestant.session(source):
        resident = contest.residency.prepare(source, cold=contest.place.cold)
        if contest.target is not None:
            memory.poison(contest.target)
        memory.synchronize()
        memory.reset_peak()
        cpu = cpu_seconds()
        start = time.perf_counter()
        arrays = contestant.load(source)
        memory.synchronize()
        seconds = time.perf_counter() - start
        cpu = cpu_seconds() - cpu
        return Reading(number, seconds, cpu, resident, memory.peak_nbytes()), arrays


def _discard(arrays: Arrays, contest: Contest) -> None:
    """Poison memory that an allocator will hand to the next contestant."""
    for array in arrays.values():
        contest.memory.poison(array)


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _make_row(entry: Entry[Contestant], kind: str, place: str, nbytes: int) -> Row:
    return Row(
        **row_values(entry, kind, place, nbytes),
        first=next((reading for reading in entry.readings if reading.round == 0), None),
    )


def row_values(entry: Entry[P], kind: str, place: str, nbytes: int) -> dict[str, Any]:
    """Give the fields of a row that any kind of contest fills the same: all but ``first``."""
    contestant = entry.contestant
    return {
        "kind": kind,
        "place": place,
        "name": contestant.name,
        "package": contestant.package,
        "role": contestant.role,
        "family": contestant.family,
        "nbytes": nbytes,
        "readings": tuple(reading for reading in entry.readings if reading.round > 0),
        "compared": bool(entry.readings) and entry.error is None,
        "absent": entry.absent,
        "error": entry.error,
        "note": entry.note,
        "reports": entry.reports,
    }

"""What loads take away from a neighbour that keeps every core busy."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.busy import SLOT_WORDS
from benchmarks.contestants import Contestant, headrace_neighbour
from benchmarks.memory import Arrays, Memory
from benchmarks.places import Residency
from benchmarks.processes import child_environment
from benchmarks.result import Beside, BesideRow
from benchmarks.rounds import Clock, cpu_seconds, hang_guard
from headrace.bindings.posix import PosixFiles

BUDGET_S = 11.0
"""Seconds after which no new round starts."""

_START_S = 10.0  # for the neighbours to begin
_IDLE_S = 0.05  # shortest interval without a load


@dataclass(frozen=True, slots=True)
class Progress:
    """How far all neighbours together have come."""

    loops: float
    """Iterations."""
    cpu_seconds: float
    """CPU time."""

    def __sub__(self, before: Progress) -> Progress:
        return Progress(self.loops - before.loops, self.cpu_seconds - before.cpu_seconds)

    def as_pair(self) -> tuple[float, float]:
        """Both figures."""
        return self.loops, self.cpu_seconds


class Neighbours:
    """Busy processes, one for each core.

    Parameters
    ----------
    path
        File that they count in; made here.
    count
        Processes.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.count = count
        path.write_bytes(bytes((count + 1) * SLOT_WORDS * 8))
        with path.open("r+b") as file:
            self._board = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        command = [sys.executable, "-m", "benchmarks.busy", str(path)]
        parent, variables = str(os.getpid()), child_environment()
        self._processes = [
            subprocess.Popen([*command, str(slot), parent], env=variables)
            for slot in range(1, count + 1)
        ]

    def wait(self) -> None:
        """Wait until all of them count.

        Raises
        ------
        RuntimeError
            They do not.
        """
        stop = time.perf_counter() + _START_S
        while not all(loops for loops, _ in self._slots()):
            if time.perf_counter() > stop:
                raise RuntimeError(f"the neighbours did not start within {_START_S:g} s")
            time.sleep(0.01)

    def progress(self) -> Progress:
        """Add up what they have counted so far."""
        slots = list(self._slots())
        return Progress(sum(loops for loops, _ in slots), sum(ns for _, ns in slots) / 1e9)

    def stop(self) -> None:
        """Raise the flag, and wait for them to end."""
        self._board[0] = 1
        for process in self._processes:
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._board.release()

    def _slots(self) -> Iterator[tuple[int, int]]:
        for place in range(SLOT_WORDS, len(self._board), SLOT_WORDS):
            yield self._board[place], self._board[place + 1]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Loads of one raw file, each followed by as long an interval without one."""

    source: Path
    """The file; resident."""
    memory: Memory
    """Destination."""
    reference: Arrays
    """What every result must equal."""
    target: Any
    """Array that is read into."""
    nbytes: int
    """Bytes of one load."""
    rounds: int
    """Measured loads of each contestant, after one for warming up."""


@dataclass(slots=True)
class _Entry:
    contestant: Contestant
    loads: list[Beside] = field(default_factory=list)
    error: str | None = None


def measure_beside(
    experiment: Experiment, work: Path, clock: Clock, contestants: Sequence[Contestant] = ()
) -> list[BesideRow]:
    """Load in turns beside a busy process on each usable core.

    Parameters
    ----------
    experiment
        What to load, and how often.
    work
        Directory for the neighbours' counts.
    clock
        Time that the run has left.
    contestants
        Who loads; by default headrace with each policy.
    """
    own = contestants or headrace_neighbour(experiment.memory, experiment.target)
    entries = [_Entry(contestant) for contestant in own]
    with _beside(work / "neighbours", entries) as neighbours:
        until = Clock.after(BUDGET_S)
        for number in range(experiment.rounds + 1):
            for entry in entries[:: -1 if number % 2 else 1]:
                if entry.error is None and not (clock.is_over() or until.is_over()):
                    _load_beside(entry, experiment, neighbours, number)
    return [_to_row(entry, experiment, neighbours.count) for entry in entries]


@contextmanager
def _beside(path: Path, entries: Sequence[_Entry]) -> Iterator[Neighbours]:
    with ExitStack() as stack:
        for entry in entries:
            stack.callback(entry.contestant.close)
        neighbours = Neighbours(path, len(os.sched_getaffinity(0)))
        stack.callback(neighbours.stop)
        neighbours.wait()
        yield neighbours


def _load_beside(
    entry: _Entry, experiment: Experiment, neighbours: Neighbours, number: int
) -> None:
    """Time one load, compare its result, and let the neighbours alone for as long."""
    memory, contestant = experiment.memory, entry.contestant
    try:
        with hang_guard(), contestant.session(experiment.source):
            Residency(PosixFiles()).prepare(experiment.source, cold=False)
            memory.poison(experiment.target)
            memory.synchronize()
            before, cpu, start = neighbours.progress(), cpu_seconds(), time.perf_counter()
            arrays = contestant.load(experiment.source)
            memory.synchronize()
            seconds = time.perf_counter() - start
            cpu, with_load = cpu_seconds() - cpu, neighbours.progress() - before
            entry.error = memory.find_difference(arrays, experiment.reference)
    except Exception as error:  # noqa: BLE001  it is shown, as a loader's is in a contest
        entry.error = f"{type(error).__name__}: {error}"
        return
    alone = _watch_alone(neighbours, seconds)
    entry.loads.append(Beside(number, seconds, cpu, *with_load.as_pair(), *alone.as_pair()))


def _watch_alone(neighbours: Neighbours, seconds: float) -> Progress:
    """Find how far they come in so many seconds when nothing loads."""
    before, start = neighbours.progress(), time.perf_counter()
    time.sleep(max(seconds, _IDLE_S))
    elapsed, done = time.perf_counter() - start, neighbours.progress() - before
    return Progress(done.loops * seconds / elapsed, done.cpu_seconds * seconds / elapsed)


def _to_row(entry: _Entry, experiment: Experiment, processes: int) -> BesideRow:
    return BesideRow(
        name=entry.contestant.name,
        processes=processes,
        nbytes=experiment.nbytes,
        loads=tuple(load for load in entry.loads if load.round > 0),
        compared=bool(entry.loads) and entry.error is None,
        error=entry.error,
        reports=entry.contestant.take_reports(),
    )

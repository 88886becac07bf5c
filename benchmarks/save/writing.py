"""The method of writing: every write makes a new file, which is read back and compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.memory import Arrays, Memory
from benchmarks.places import Place
from benchmarks.result import Reading
from benchmarks.rounds import Clock, Entry, Limits, P, cpu_seconds, row_values, run_rounds
from benchmarks.save.comparison import empty_folder, find_file_difference, sync_path
from benchmarks.save.result import SaveRow, Timing
from benchmarks.save.writers import AsyncSaver, Writer

SLOW_S = 3.0
"""A contestant whose last write took longer has fewer rounds; headrace's default call has all."""

TIMEOUT_S = 60.0
"""Seconds that a save in the background may take."""

_FILE_NAMES = {"raw": "raw.bin", "model": "model.safetensors", "async": "model.safetensors"}


@dataclass(frozen=True, slots=True)
class WriteContest:
    """Contestants that write the same arrays to one place."""

    kind: str
    """``"raw"``, ``"model"`` or ``"async"``."""
    place: Place
    """Where the file is written."""
    memory: Memory
    """Where the arrays are."""
    arrays: Arrays
    """What is written."""
    warm: Arrays
    """The first of it, written in the round that warms up."""
    reference: Path
    """File that begins with the bytes that the written file must have."""
    nbytes: int
    """Bytes of the arrays."""
    file_nbytes: int
    """Bytes that the written file must have."""
    repeats: int
    """Measured rounds."""
    budget_s: float
    """Seconds of writes after which a contestant leaves."""

    @property
    def path(self) -> Path:
        """The file that is written, alone in its folder."""
        return self.place.directory / "written" / _FILE_NAMES[self.kind]

    @property
    def warm_path(self) -> Path:
        """A file beside it, for a session that has to write one; it is deleted before the write."""
        return self.path.with_name("warm-up")


def run_writes(
    contest: WriteContest, writers: Sequence[Writer], clock: Clock, tell: Callable[[str], object]
) -> list[SaveRow]:
    """Run all rounds of writes; see `rounds.run_rounds`."""
    return _run(contest, writers, partial(_try_write, contest), clock, tell)


def run_async_saves(
    contest: WriteContest, savers: Sequence[AsyncSaver], clock: Clock, tell: Callable[[str], object]
) -> list[SaveRow]:
    """Run all rounds of saves whose arrays are overwritten as soon as the call returns."""
    # A copy of their own, which is poisoned: others need the arrays as they are.
    scratch = deepcopy(dict(contest.arrays))
    return _run(contest, savers, partial(_try_async_save, contest, scratch), clock, tell)


def _run(
    contest: WriteContest,
    participants: Sequence[P],
    trial: Callable[[P, int], tuple[Reading, str | None]],
    clock: Clock,
    tell: Callable[[str], object],
) -> list[SaveRow]:
    contest.path.parent.mkdir(exist_ok=True)
    limits = Limits(contest.repeats, contest.budget_s, SLOW_S)
    entries = run_rounds(limits, participants, trial, clock, tell)
    empty_folder(contest.path.parent)
    contest.path.parent.rmdir()
    return [make_row(entry, contest.kind, contest.place.key, contest.nbytes) for entry in entries]


def make_row(entry: Entry[P], kind: str, place: str, nbytes: int) -> SaveRow:
    """Give the row of a participant; its warm-up, which may be shorter, is no reading of it."""
    values = row_values(entry, kind, place, nbytes)
    compared = values["compared"] and bool(values["readings"])
    return SaveRow(**{**values, "compared": compared}, first=None)


def _try_write(contest: WriteContest, writer: Writer, number: int) -> tuple[Reading, str | None]:
    """Time one write and compare the file."""
    memory, path = contest.memory, contest.path
    arrays = contest.arrays if number else contest.warm
    with writer.session(contest.warm_path):
        empty_folder(path.parent)
        memory.synchronize()
        memory.reset_peak()
        cpu, start = cpu_seconds(), time.perf_counter()
        writer.write(arrays, path)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        peak = memory.peak_nbytes()
        sync_path(path)
        synced = time.perf_counter() - start
    fault = _find_leftover(path) or _find_fault(contest, writer, arrays)
    empty_folder(path.parent)
    return Timing(number, seconds, cpu, 0, peak, seconds, synced), fault


def _find_fault(contest: WriteContest, writer: Writer, arrays: Arrays) -> str | None:
    """Compare the file with the reference, or its tensors with the arrays."""
    path = contest.path
    if contest.kind == "raw":
        return find_file_difference(path, contest.reference, arrays[""].nbytes)
    if writer.is_exact and arrays is contest.arrays:
        return find_file_difference(path, contest.reference, contest.file_nbytes)
    found = contest.memory.load_reference(path.parent)
    return contest.memory.find_difference(found, arrays)


def _find_leftover(path: Path) -> str | None:
    strangers = sorted(other.name for other in path.parent.iterdir() if other != path)
    return f"{', '.join(strangers)} was left beside the file" if strangers else None


def _try_async_save(
    contest: WriteContest, scratch: Arrays, saver: AsyncSaver, number: int
) -> tuple[Reading, str | None]:
    """Time one save, overwrite its arrays when it returns, and compare the file with before."""
    memory, path = contest.memory, contest.path
    with saver.session(contest.warm_path):
        empty_folder(path.parent)
        for name, array in scratch.items():
            array[...] = contest.arrays[name]
        memory.synchronize()
        memory.reset_peak()
        cpu, start = cpu_seconds(), time.perf_counter()
        wait = saver.start(scratch, path)
        free = time.perf_counter() - start
        for array in scratch.values():
            memory.poison(array)
        wait(TIMEOUT_S)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        peak = memory.peak_nbytes()
    fault = _find_leftover(path) or find_file_difference(
        path, contest.reference, contest.file_nbytes
    )
    empty_folder(path.parent)
    return Timing(number, seconds, cpu, 0, peak, free, None), fault

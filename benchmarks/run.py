"""One run: make the inputs, hold the contests, look at fresh processes, clean up."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, headrace_model, headrace_raw
from benchmarks.files import MODEL_NAME, RAW_NAME, write_model, write_raw
from benchmarks.machine import describe_machine
from benchmarks.memory import Arrays, Memory
from benchmarks.peers import SafetensorsPrefetch, model_peers
from benchmarks.places import (
    COLD,
    RESIDENT,
    TMPFS,
    AbsentPlace,
    Place,
    PlaceError,
    Residency,
    disk_place,
    remove_tree,
    same_files_cold,
    sync_tree,
    tmpfs_place,
    tree_nbytes,
    zram_place,
)
from benchmarks.processes import measure_first_call, measure_import
from benchmarks.raw_peers import raw_peers
from benchmarks.result import FirstCall, ImportTime, Row
from benchmarks.rounds import Clock, Contest, run_contest
from benchmarks.settings import Settings
from headrace.bindings.posix import PosixFiles

Contestants = Callable[[str, Memory, Any], Sequence[Contestant]]
"""Gives the contestants of a kind: ``(kind, memory, target)``."""


@dataclass(slots=True)
class Run:
    """A run in progress: what it was asked, and what it found so far."""

    settings: Settings
    """What was asked."""
    memory: Memory
    """Destination."""
    contestants: Contestants
    """Who takes part."""
    say: Callable[[str], None]
    """Receives progress, a line at a time."""
    save: Callable[[Run], None]
    """Called after each part, so that a crash loses no figures."""
    start: float = field(default_factory=time.perf_counter)
    """Start on the clock of `time.perf_counter`."""
    work: Path = field(default_factory=Path)
    """Directory of the run's files."""
    machine: dict[str, Any] = field(default_factory=dict)
    """What the run runs on; known once the places are."""
    model_nbytes: int = 0
    """Bytes of the model's tensors."""
    places: dict[str, Place] = field(default_factory=dict)
    """Places that could be made, by key."""
    absent_places: list[AbsentPlace] = field(default_factory=list)
    """Places that could not."""
    references: dict[str, Arrays] = field(default_factory=dict)
    """What results must equal, by kind."""
    rows: list[Row] = field(default_factory=list)
    """Contestants at every place so far."""
    first_calls: list[FirstCall] = field(default_factory=list)
    """First calls so far."""
    imports: list[ImportTime] = field(default_factory=list)
    """Imports so far."""
    took_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each part."""
    finished: bool = False
    """Whether every part was run."""

    @property
    def clock(self) -> Clock:
        """Time left."""
        return Clock(self.start + self.settings.deadline_s)

    def wants(self, section: str) -> bool:
        """Whether a section was asked for."""
        return section in self.settings.sections


def all_contestants(kind: str, memory: Memory, target: Any) -> Sequence[Contestant]:
    """Give headrace's contestants and every peer."""
    if kind == "raw":
        return [*headrace_raw(memory, target), *raw_peers(memory, target)]
    return [*headrace_model(memory), *model_peers(memory)]


def run_all(run: Run) -> None:
    """Make the inputs, run every part that was asked for, and clean up."""
    with ExitStack() as stack:
        for title, do in _parts(run, stack):
            start = time.perf_counter()
            run.say(f"[{start - run.start:5.0f} s] {title}")
            do()
            run.took_s[title] = time.perf_counter() - start
            run.save(run)
        run.finished = True
        run.save(run)
        run.references.clear()


def _parts(run: Run, stack: ExitStack) -> list[tuple[str, Callable[[], None]]]:
    """Every part, what the targets speak of first, should the time run out."""

    def contest(kind: str, place: str) -> tuple[str, str, Callable[[], None]]:
        return kind, f"{kind}, {place}", partial(_contest, run, kind, place)

    parts = (
        contest("raw", RESIDENT),
        contest("model", RESIDENT),
        contest("model", TMPFS),
        contest("model", COLD),
        ("first-call", "first call", partial(_first_calls, run)),
        ("imports", "imports", partial(_imports, run)),
        contest("raw", TMPFS),
        contest("raw", COLD),
    )
    wanted = [(title, do) for section, title, do in parts if run.wants(section)]
    return [("set-up", partial(_set_up, run, stack)), *wanted]


def _set_up(run: Run, stack: ExitStack) -> None:
    """Write the inputs once, copy them within the machine, and load the references."""
    settings = run.settings
    parent = settings.directory or tempfile.gettempdir()
    run.work = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=parent)).resolve()
    stack.callback(remove_tree, run.work)
    disk = run.work / "disk"
    disk.mkdir()
    if run.wants("raw"):
        write_raw(disk / RAW_NAME, settings.raw_nbytes)
    if run.wants("model") or run.wants("first-call"):
        run.model_nbytes = write_model(disk / MODEL_NAME, settings.model_nbytes)
    run.say("inputs written")
    with ThreadPoolExecutor(1) as background:
        synced = background.submit(sync_tree, disk)
        _make_places(run, stack, disk)
        synced.result()
    run.say(f"places: {', '.join(place.title for place in run.places.values())}")
    run.machine = describe_machine(list(run.places.values()))
    for kind in ("raw", "model"):
        if run.wants(kind):
            run.references[kind] = run.memory.load_reference(run.places[RESIDENT].source(kind))


def _make_places(run: Run, stack: ExitStack, disk: Path) -> None:
    resident = disk_place(disk)
    run.places[RESIDENT] = resident
    nbytes = tree_nbytes(disk)
    if run.memory.framework != "numpy":
        _try_place(run, TMPFS, stack, lambda: tmpfs_place(resident, run.work, nbytes))
    zram = run.settings.zram
    if zram is not None:
        _try_place(run, COLD, stack, lambda: zram_place(resident, run.work, nbytes, zram))
    elif run.memory.framework == "numpy":
        _try_place(run, COLD, stack, lambda: same_files_cold(resident))
    else:
        run.absent_places.append(AbsentPlace(COLD, "no zram device was named"))


def _try_place(
    run: Run, key: str, stack: ExitStack, make: Callable[[], AbstractContextManager[Place]]
) -> None:
    try:
        run.places[key] = stack.enter_context(make())
    except (PlaceError, OSError) as error:
        run.absent_places.append(AbsentPlace(key, str(error)))
        run.say(f"{key}: {error}")


def _contest(run: Run, kind: str, key: str) -> None:
    place = run.places.get(key)
    if place is None:
        return
    memory, settings = run.memory, run.settings
    target = memory.empty(settings.raw_nbytes) if kind == "raw" else None
    contest = Contest(
        kind=kind,
        place=place,
        memory=memory,
        reference=run.references[kind],
        target=target,
        nbytes=settings.raw_nbytes if kind == "raw" else run.model_nbytes,
        repeats=settings.repeats,
        budget_s=settings.budget_s,
        residency=Residency(PosixFiles()),
    )
    contestants = run.contestants(kind, memory, target)
    run.rows += run_contest(contest, contestants, run.clock, run.say)


def _first_calls(run: Run) -> None:
    """Time first calls of headrace, and of the peer that pins memory as well."""
    memory, quick = run.memory, run.settings.quick
    source = run.places[RESIDENT].source("model")
    Residency(PosixFiles()).prepare(source, cold=False)
    names = [(headrace_model(memory)[0].name, 1 if quick else 5)]
    prefetch = SafetensorsPrefetch(memory.device, together=True)
    if memory.framework == "torch" and prefetch.is_available():
        names.append((prefetch.name, 1 if quick else 3))
    for name, processes in names:
        found = measure_first_call(name, memory, source, processes, run.clock)
        run.first_calls.append(found)


def _imports(run: Run) -> None:
    pairs = [("headrace", "numpy"), ("headrace.torch", "torch")]
    for name, after in pairs:
        if find_spec(after) is not None:
            processes = 1 if run.settings.quick else 9
            run.imports.append(measure_import(name, after, processes, run.clock))

"""One run: make the inputs, hold the contests, look at fresh processes, clean up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, headrace_kept, headrace_model, headrace_raw
from benchmarks.doctor import ask_doctor
from benchmarks.files import MODEL_NAME, RAW_NAME, write_model, write_raw
from benchmarks.gds import ROUNDS, GdsOrder, absent_gds_rows, measure_gds
from benchmarks.machine import describe_machine
from benchmarks.memory import Arrays, Memory
from benchmarks.neighbour import Experiment, measure_beside
from benchmarks.peers import SafetensorsPrefetch, model_peers
from benchmarks.places import (
    AbsentPlace,
    Place,
    Residency,
    disk_place,
    filesystem_of,
    same_files_cold,
    sync_tree,
    tmpfs_place,
    tree_nbytes,
    zram_place,
)
from benchmarks.processes import measure_first_call, measure_import
from benchmarks.raw_peers import raw_peers
from benchmarks.result import COLD, RESIDENT, TMPFS, BesideRow, FirstCall, ImportTime, Row
from benchmarks.rounds import Clock, Contest, absent_row, run_contest
from benchmarks.settings import Settings
from benchmarks.state import Part, RunState, clock_of, make_work, run_parts, try_place
from headrace.bindings.posix import PosixFiles

Contestants = Callable[[str, Memory, Any], Sequence[Contestant]]
"""Gives the contestants of a kind: ``(kind, memory, target)``."""


@dataclass(slots=True, kw_only=True)
class Run(RunState):
    """A run of loads in progress: what it was asked, and what it found so far."""

    settings: Settings
    """What was asked."""
    contestants: Contestants
    """Who takes part."""
    model_nbytes: int = 0
    """Bytes of the model's tensors."""
    references: dict[str, Arrays] = field(default_factory=dict)
    """What results must equal, by kind."""
    rows: list[Row] = field(default_factory=list)
    """Contestants at every place so far."""
    first_calls: list[FirstCall] = field(default_factory=list)
    """First calls so far."""
    imports: list[ImportTime] = field(default_factory=list)
    """Imports so far."""
    beside: list[BesideRow] = field(default_factory=list)
    """Loads beside busy neighbours so far."""
    doctor: dict[str, Any] | None = None
    """What the doctor said; None before."""

    @property
    def clock(self) -> Clock:
        """Time left."""
        return clock_of(self, self.settings.deadline_s)

    def wants(self, section: str) -> bool:
        """Whether a section was asked for."""
        return section in self.settings.sections

    def needs(self, kind: str) -> bool:
        """Whether a section was asked for that loads the raw file, or the model."""
        of_kind = {"raw": ("raw", "neighbour", "gds"), "model": ("model", "kept", "first-call")}
        return any(self.wants(section) for section in of_kind[kind])


def all_contestants(kind: str, memory: Memory, target: Any) -> Sequence[Contestant]:
    """Give headrace's contestants and every peer."""
    if kind == "raw":
        return [*headrace_raw(memory, target), *raw_peers(memory, target)]
    return [*headrace_model(memory), *model_peers(memory)]


def run_all(run: Run) -> None:
    """Make the inputs, run every part that was asked for, and clean up."""
    with ExitStack() as stack:
        run_parts(run, _parts(run, stack))
        run.references.clear()


def _parts(run: Run, stack: ExitStack) -> list[Part]:
    """Every part, what the targets speak of first, should the time run out."""

    def contest(kind: str, place: str) -> tuple[str, str, Callable[[], None]]:
        return kind, f"{kind}, {place}", partial(_contest, run, kind, place)

    parts = (
        contest("raw", RESIDENT),
        contest("model", RESIDENT),
        ("kept", "kept", partial(_kept, run)),
        ("neighbour", "neighbour", partial(_neighbour, run)),
        ("gds", "gds", partial(_gds, run)),
        ("first-call", "first call", partial(_first_calls, run)),
        ("imports", "imports", partial(_imports, run)),
        ("doctor", "doctor", partial(_doctor, run)),
        contest("model", TMPFS),
        contest("model", COLD),
        contest("raw", TMPFS),
        contest("raw", COLD),
    )
    wanted = [(title, do) for section, title, do in parts if run.wants(section)]
    return [("set-up", partial(_set_up, run, stack)), *wanted]


def _set_up(run: Run, stack: ExitStack) -> None:
    """Write the inputs once, copy them within the machine, and load the references."""
    settings = run.settings
    disk = make_work(run, settings.directory, stack)
    if run.needs("raw"):
        write_raw(disk / RAW_NAME, settings.raw_nbytes)
    if run.needs("model"):
        run.model_nbytes = write_model(disk / MODEL_NAME, settings.model_nbytes)
    run.say("inputs written")
    with ThreadPoolExecutor(1) as background:
        synced = background.submit(sync_tree, disk)
        _make_places(run, stack, disk)
        synced.result()
    run.say(f"places: {', '.join(place.title for place in run.places.values())}")
    run.machine = describe_machine(list(run.places.values()))
    for kind in ("raw", "model"):
        if run.needs(kind):
            run.references[kind] = run.memory.load_reference(run.places[RESIDENT].source(kind))


def _make_places(run: Run, stack: ExitStack, disk: Path) -> None:
    resident = disk_place(disk)
    run.places[RESIDENT] = resident
    nbytes = tree_nbytes(disk)
    if run.memory.framework != "numpy":
        try_place(run, TMPFS, stack, lambda: tmpfs_place(resident, run.work, nbytes))
    zram = run.settings.zram
    if zram is not None:
        try_place(run, COLD, stack, lambda: zram_place(resident, run.work, nbytes, zram))
    elif run.memory.framework == "numpy":
        try_place(run, COLD, stack, lambda: same_files_cold(resident))
    else:
        run.absent_places.append(AbsentPlace(COLD, "no zram device was named"))


def _contest(run: Run, kind: str, key: str) -> None:
    place = run.places.get(key)
    if place is None:
        return
    target = run.memory.empty(run.settings.raw_nbytes) if kind == "raw" else None
    contestants = run.contestants(kind, run.memory, target)
    here = [c for c in contestants if c.places is None or key in c.places]
    run.rows += run_contest(_make_contest(run, kind, place, target), here, run.clock, run.say)


def _make_contest(run: Run, kind: str, place: Place, target: Any) -> Contest:
    settings = run.settings
    return Contest(
        kind=kind,
        place=place,
        memory=run.memory,
        reference=run.references["raw" if kind == "raw" else "model"],
        target=target,
        nbytes=settings.raw_nbytes if kind == "raw" else run.model_nbytes,
        repeats=settings.repeats,
        budget_s=settings.budget_s,
        residency=Residency(PosixFiles()),
    )


def _kept(run: Run) -> None:
    """Load the resident model again and again from pages that stay registered."""
    contestant = headrace_kept(run.memory)
    if run.memory.device == "cpu":
        why = "a GPU registers the pages, and there is none"
        run.rows.append(absent_row(contestant, "kept", RESIDENT, why))
        return
    contest = _make_contest(run, "kept", run.places[RESIDENT], None)
    run.rows += run_contest(contest, [contestant], run.clock, run.say)


def _neighbour(run: Run) -> None:
    """Load the resident raw file beside a busy process on each core."""
    settings = run.settings
    experiment = Experiment(
        source=run.places[RESIDENT].source("raw"),
        memory=run.memory,
        reference=run.references["raw"],
        target=run.memory.empty(settings.raw_nbytes),
        nbytes=settings.raw_nbytes,
        rounds=settings.repeats,
    )
    run.beside += measure_beside(experiment, run.work, run.clock)


def _gds(run: Run) -> None:
    """Read the first bytes of the raw file through cuFile, on the cold place."""
    place, settings = run.places.get(COLD), run.settings
    if place is None:
        why = next((p.why for p in run.absent_places if p.key == COLD), "no cold place")
        run.rows += absent_gds_rows(run.memory, why)
        return
    order = GdsOrder(
        framework=run.memory.framework,
        device=run.memory.device,
        directory=str(place.directory),
        filesystem=filesystem_of(place.directory)[0],
        nbytes=settings.gds_nbytes,
        repeats=min(ROUNDS, settings.repeats),
        budget_s=settings.budget_s,
    )
    run.rows += measure_gds(order, run.memory, run.work / "cufile.log")


def _doctor(run: Run) -> None:
    run.doctor = ask_doctor(run.places[RESIDENT].directory)


def _first_calls(run: Run) -> None:
    """Time first calls of headrace, and of the peer that pins memory as well."""
    memory, quick = run.memory, run.settings.quick
    source = run.places[RESIDENT].source("model")
    Residency(PosixFiles()).prepare(source, cold=False)
    names = [(headrace_model(memory)[0].name, 1 if quick else 5)]
    prefetch = SafetensorsPrefetch(memory.device, together=True)
    if memory.framework == "torch" and prefetch.is_available():
        names.append((prefetch.name, 1 if quick else 2))
    for name, processes in names:
        found = measure_first_call(name, memory, source, processes, run.clock)
        run.first_calls.append(found)


def _imports(run: Run) -> None:
    pairs = [("headrace", "numpy"), ("headrace.torch", "torch")]
    for name, after in pairs:
        if find_spec(after) is not None:
            processes = 1 if run.settings.quick else 5
            run.imports.append(measure_import(name, after, processes, run.clock))

"""One run of saves: make the arrays, hold the contests, clean up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.files import RAW_NAME, write_model, write_raw
from benchmarks.machine import describe_machine
from benchmarks.memory import Arrays, Memory
from benchmarks.places import (
    AbsentPlace,
    Place,
    disk_place,
    remove_tree,
    sync_tree,
    tmpfs_place,
    zram_place,
)
from benchmarks.result import TMPFS
from benchmarks.rounds import Clock, Entry
from benchmarks.save.host_memory import SaveOrder, measure_host_memory
from benchmarks.save.result import DELAYED, DISK, IDLE, ZRAM, HostMemory, SaveRow
from benchmarks.save.settings import SaveSettings
from benchmarks.save.streams import (
    KIND,
    Lane,
    StreamContest,
    StreamReader,
    TorchLane,
    run_streams,
    stream_readers,
)
from benchmarks.save.writers import (
    AsyncSaver,
    HeadraceAsyncSaver,
    SafetensorsSaveFile,
    Writer,
    model_writers,
    raw_writers,
)
from benchmarks.save.writing import WriteContest, make_row, run_async_saves, run_writes
from benchmarks.state import Part, RunState, clock_of, make_work, run_parts, try_place

SLOW_PLACE_ROUNDS = 3
"""Measured rounds on the disk and on zram, which are slow."""

STREAM_ROUNDS = 20
"""Measured reads in stream order."""

WARM_NBYTES = 256 << 20
"""Bytes, or about so many of a model, that a contestant writes before its first round."""

PART_SHARES = {
    "raw, tmpfs": 0.36,
    "model": 0.22,
    "async": 0.07,
    "stream": 0.04,
    "host memory": 0.11,
    "raw, zram": 0.1,
    "raw, disk": 0.1,
}
"""Shares of the time of the run that parts may take before they start no new round."""


@dataclass(frozen=True, slots=True)
class Contestants:
    """Who takes part; tests bring their own."""

    raw: Callable[[Memory, Any], Sequence[Writer]] = raw_writers
    """Writers of raw bytes."""
    model: Callable[[Memory], Sequence[Writer]] = model_writers
    """Writers of a model: headrace's default call first, the official library last."""
    background: Callable[[Memory], Sequence[AsyncSaver]] = lambda memory: (
        HeadraceAsyncSaver(memory),
    )
    """Savers in the background."""
    stream: Callable[[Memory, int], Sequence[StreamReader]] = stream_readers
    """Readers in stream order."""
    lane: Callable[[str], Lane] = TorchLane
    """Makes the stream of a device."""


@dataclass(slots=True, kw_only=True)
class SaveRun(RunState):
    """A run of saves in progress: what it was asked, and what it found so far."""

    settings: SaveSettings
    """What was asked."""
    contestants: Contestants
    """Who takes part."""
    arrays: dict[str, Arrays] = field(default_factory=dict)
    """What is written, by kind."""
    references: dict[str, Path] = field(default_factory=dict)
    """Files with the bytes that files must have, by kind."""
    rows: list[SaveRow] = field(default_factory=list)
    """Contestants at every place so far."""
    host_memory: list[HostMemory] = field(default_factory=list)
    """Host memory of saves so far."""

    def clock(self, part: str) -> Clock:
        """Time left for a part."""
        end = clock_of(self, self.settings.deadline_s).stop
        share = PART_SHARES[part] * self.settings.deadline_s
        return Clock(min(end, time.perf_counter() + share))

    def wants(self, section: str) -> bool:
        """Whether a section was asked for."""
        return section in self.settings.sections


def run_all(run: SaveRun) -> None:
    """Make the arrays, run every part that was asked for, and clean up."""
    with ExitStack() as stack:
        run_parts(run, _parts(run, stack))
        run.arrays.clear()


def _parts(run: SaveRun, stack: ExitStack) -> list[Part]:
    """Every part, what the targets speak of first, should the time run out."""
    parts = (
        ("raw", "raw, tmpfs", partial(_raw, run, TMPFS)),
        ("model", "model", partial(_model, run)),
        ("async", "async", partial(_background, run)),
        ("stream", "stream", partial(_stream, run)),
        ("model", "host memory", partial(_host_memory, run)),
        ("raw", "raw, zram", partial(_raw, run, ZRAM)),
        ("raw", "raw, disk", partial(_raw, run, DISK)),
    )
    wanted = [(title, do) for section, title, do in parts if run.wants(section)]
    return [("set-up", partial(_set_up, run, stack)), *wanted]


def _set_up(run: SaveRun, stack: ExitStack) -> None:
    disk = make_work(run, run.settings.directory, stack)
    _make_places(run, stack, disk)
    run.say(f"places: {', '.join(place.title for place in run.places.values())}")
    run.machine = describe_machine(list(run.places.values()))
    folder = run.places.get(TMPFS, run.places[DISK]).directory / "reference"
    folder.mkdir()
    if run.wants("raw"):
        run.references["raw"] = folder / RAW_NAME
        write_raw(folder / RAW_NAME, run.settings.raw_nbytes)
        run.arrays["raw"] = run.memory.load_reference(folder / RAW_NAME)
    if run.wants("model") or run.wants("async"):
        run.references["model"] = folder / "model" / "model.safetensors"
        run.arrays["model"] = _make_model(run, folder / "shards", run.references["model"])


def _make_model(run: SaveRun, shards: Path, path: Path) -> Arrays:
    """Give the arrays of a model, and write them by the official library for the comparison."""
    write_model(shards, run.settings.model_nbytes)
    arrays = run.memory.load_reference(shards)
    remove_tree(shards)
    path.parent.mkdir()
    SafetensorsSaveFile(run.memory).write(arrays, path)
    return arrays


def _make_places(run: SaveRun, stack: ExitStack, disk: Path) -> None:
    settings = run.settings
    made = disk_place(disk)
    run.places[DISK] = replace(made, key=DISK, title=f"{made.filesystem} disk")
    room = 2 * settings.raw_nbytes + 3 * settings.model_nbytes
    making = tmpfs_place(made, run.work, room)
    try_place(run, TMPFS, stack, lambda: _renamed(making, TMPFS, "tmpfs"))
    if settings.zram is None:
        run.absent_places.append(AbsentPlace(ZRAM, "no zram device was named"))
        return
    # Blocks that were freed a moment ago may not be used again yet.
    making = zram_place(made, run.work, settings.zram_nbytes * 5 // 4, settings.zram)
    try_place(run, ZRAM, stack, lambda: _renamed(making, ZRAM, "ext4 on zram"))


@contextmanager
def _renamed(making: AbstractContextManager[Place], key: str, title: str) -> Iterator[Place]:
    with making as place:
        yield replace(place, key=key, title=title, cold=False)


def _raw(run: SaveRun, key: str) -> None:
    """Write raw bytes to one place."""
    place, settings = run.places.get(key), run.settings
    if place is None:
        return
    sizes = {TMPFS: settings.raw_nbytes, ZRAM: settings.zram_nbytes, DISK: settings.disk_nbytes}
    source = run.arrays["raw"][""][: sizes[key]]
    contest = _contest(run, "raw", place, {"": source}, {"": source[:WARM_NBYTES]})
    if key != TMPFS:
        contest = replace(contest, repeats=min(SLOW_PLACE_ROUNDS, settings.repeats))
    every = run.contestants.raw(run.memory, source)
    writers = [each for each in every if each.places is None or key in each.places]
    run.rows += run_writes(contest, writers, run.clock(f"raw, {key}"), run.say)


def _model(run: SaveRun) -> None:
    """Save the model as one file on tmpfs."""
    if place := run.places.get(TMPFS):
        contest = _model_contest(run, "model", place)
        writers = run.contestants.model(run.memory)
        run.rows += run_writes(contest, writers, run.clock("model"), run.say)


def _background(run: SaveRun) -> None:
    """Save the model on tmpfs in the background."""
    if place := run.places.get(TMPFS):
        contest = _model_contest(run, "async", place)
        savers = run.contestants.background(run.memory)
        run.rows += run_async_saves(contest, savers, run.clock("async"), run.say)


def _host_memory(run: SaveRun) -> None:
    """Save the model in fresh processes: by headrace's default call, and by the official one."""
    place = run.places.get(TMPFS)
    clock = run.clock("host memory")
    ours, *_, official = run.contestants.model(run.memory)
    for writer in (ours, official):
        if place is None or writer.why_absent() or clock.is_over():
            continue
        order = SaveOrder(
            device=run.settings.device,
            name=writer.name,
            source=str(run.references["model"].parent),
            path=str(place.directory / "child.safetensors"),
        )
        run.host_memory.append(measure_host_memory(order))


def _model_contest(run: SaveRun, kind: str, place: Place) -> WriteContest:
    arrays = run.arrays["model"]
    return _contest(run, kind, place, arrays, _first_arrays(arrays, WARM_NBYTES))


def _contest(run: SaveRun, kind: str, place: Place, arrays: Arrays, warm: Arrays) -> WriteContest:
    nbytes = sum(int(array.nbytes) for array in arrays.values())
    reference = run.references["raw" if kind == "raw" else "model"]
    return WriteContest(
        kind=kind,
        place=place,
        memory=run.memory,
        arrays=arrays,
        warm=warm,
        reference=reference,
        nbytes=nbytes,
        file_nbytes=nbytes if kind == "raw" else reference.stat().st_size,
        repeats=run.settings.repeats,
        budget_s=run.settings.budget_s,
    )


def _first_arrays(arrays: Arrays, nbytes: int) -> Arrays:
    """Give the first arrays, at least one, up to about so many bytes."""
    chosen: dict[str, Any] = {}
    for name, array in arrays.items():
        if nbytes <= 0:
            break
        chosen[name] = array
        nbytes -= int(array.nbytes)
    return chosen


def _stream(run: SaveRun) -> None:
    """Read a resident file of the disk in the order of a stream, idle and delayed."""
    settings, memory = run.settings, run.memory
    readers = run.contestants.stream(memory, settings.stream_nbytes)
    if memory.device == "cpu":
        why = "a stream is a GPU's, and there is none"
        run.rows += [make_row(Entry(r, absent=why), KIND, IDLE, 0) for r in readers]
        return
    folder = run.places[DISK].directory / "stream"
    folder.mkdir()
    write_raw(folder / RAW_NAME, settings.stream_nbytes)
    sync_tree(folder)
    clock, lane = run.clock("stream"), run.contestants.lane(memory.device)
    reference = memory.load_reference(folder / RAW_NAME)
    for state in (IDLE, DELAYED):
        contest = StreamContest(
            state=state,
            source=folder / RAW_NAME,
            memory=memory,
            lane=lane,
            reference=reference,
            target=memory.empty(settings.stream_nbytes),
            seen=memory.empty(settings.stream_nbytes),
            repeats=settings.repeats if settings.quick else STREAM_ROUNDS,
            budget_s=settings.budget_s,
        )
        readers = run.contestants.stream(memory, settings.stream_nbytes)
        run.rows += run_streams(contest, readers, clock, run.say)
    remove_tree(folder)

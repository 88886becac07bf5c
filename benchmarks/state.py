"""A benchmark in progress: what every kind of run knows, and its parts in order."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.memory import Memory
from benchmarks.places import AbsentPlace, Place, PlaceError, remove_tree
from benchmarks.rounds import Clock

Part = tuple[str, Callable[[], None]]
"""A part of a run: its title, and what it does."""


@dataclass(slots=True, kw_only=True)
class RunState:
    """A run in progress, and what it found out about the machine."""

    memory: Memory
    """Where the arrays are."""
    say: Callable[[str], None]
    """Receives progress, a line at a time."""
    save: Callable[[], None]
    """Called after each part, so that a crash loses no figures."""
    start: float = field(default_factory=time.perf_counter)
    """Start on the clock of `time.perf_counter`."""
    work: Path = field(default_factory=Path)
    """Directory of the run's files."""
    machine: dict[str, Any] = field(default_factory=dict)
    """What the run runs on; known once the places are."""
    places: dict[str, Place] = field(default_factory=dict)
    """Places that could be made, by key."""
    absent_places: list[AbsentPlace] = field(default_factory=list)
    """Places that could not."""
    took_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each part."""
    finished: bool = False
    """Whether every part was run."""


def run_parts(run: RunState, parts: Sequence[Part]) -> None:
    """Run parts in order; each is timed, and followed by a save."""
    for title, do in parts:
        start = time.perf_counter()
        run.say(f"[{start - run.start:5.0f} s] {title}")
        do()
        run.took_s[title] = time.perf_counter() - start
        run.save()
    run.finished = True
    run.save()


def make_work(run: RunState, parent: Path | None, stack: ExitStack) -> Path:
    """Make the run's directory, removed at the end, and in it one for files on the disk."""
    made = tempfile.mkdtemp(prefix="headrace-bench-", dir=parent or tempfile.gettempdir())
    run.work = Path(made).resolve()
    stack.callback(remove_tree, run.work)
    disk = run.work / "disk"
    disk.mkdir()
    return disk


def try_place(
    run: RunState, key: str, stack: ExitStack, make: Callable[[], AbstractContextManager[Place]]
) -> None:
    """Make a place until the end of the run, or keep why it cannot be made."""
    try:
        run.places[key] = stack.enter_context(make())
    except (PlaceError, OSError) as error:
        run.absent_places.append(AbsentPlace(key, str(error)))
        run.say(f"{key}: {error}")


def clock_of(run: RunState, deadline_s: float) -> Clock:
    """Time left of a run that has so many seconds."""
    return Clock(run.start + deadline_s)

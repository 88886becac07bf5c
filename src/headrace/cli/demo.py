"""``headrace demo``: every route of this machine beside what people do today, in one table."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import headrace
from headrace.bindings.sysfs import Linux, read_mounts
from headrace.cli.demo_bench import COLD, RESIDENT, Bench, Row
from headrace.cli.demo_cache import CachedFile
from headrace.cli.demo_methods import find_memory, find_methods
from headrace.cli.demo_model import Model, make_model
from headrace.cli.demo_verdict import conclude
from headrace.cli.progress import Meter, quiet
from headrace.cli.target import Target, find_target
from headrace.context import read_cufile_environment
from headrace.errors import HeadraceError
from headrace.probing.fact import Fact
from headrace.probing.machine import MachineFacts
from headrace.probing.volume import find_mount
from headrace.report import format_nbytes
from headrace.storage.residency import ALWAYS_RESIDENT

SCHEMA = 1
"""Version of the keys of `DemoResult.to_dict`."""

_HEADER_NBYTES = 1 << 20  # generous: a safetensors header of some hundred tensors is 20 kB
_COPIES = 3  # in memory at once: the reference, the loaded bytes, the file's pages


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """What to show."""

    nbytes: int = 256 << 20
    """Bytes of the file."""
    folder: Path | None = None
    """Where its temporary folder goes; None takes the system's."""
    device: str | None = None
    """Where to load to; None chooses as ``headrace load`` does."""
    repeat: int = 3
    """Timed runs of each method in each state."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the demo's temporary folder goes."""

    folder: str
    """The folder above it."""
    file_system: str
    """Type, as in ``/proc/self/mountinfo``."""

    @property
    def is_memory(self) -> bool:
        """Whether the file system keeps its files in memory."""
        return self.file_system in ALWAYS_RESIDENT


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What was seen."""

    target: Target
    """Device and framework that the file was loaded to."""
    gpu: Fact
    """Whether a GPU can be used here."""
    place: Place
    """Where the file was, for the time of the demo."""
    nbytes: int
    """Bytes of the file's tensors."""
    tensors: int
    """How many they are."""
    repeat: int
    """Timed runs behind each row."""
    rows: tuple[Row, ...]
    """One per method and state."""
    unavailable: tuple[tuple[str, str], ...]
    """Routes that cannot serve here, with the reason."""
    notes: tuple[str, ...]
    """What one should know about this machine to read the rows."""
    verdict: tuple[str, ...]
    """What is best here, and why."""

    @property
    def matches(self) -> bool:
        """Whether every run of every method gave the right bytes."""
        return all(row.matches for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; ``schema`` tells the version of the keys."""
        return {
            "schema": SCHEMA,
            "device": self.target.device,
            "framework": self.target.framework,
            "gpu": self.gpu.to_dict(),
            "folder": self.place.folder,
            "file_system": self.place.file_system,
            "nbytes": self.nbytes,
            "tensors": self.tensors,
            "repeat": self.repeat,
            "rows": [row.to_dict() for row in self.rows],
            "unavailable": [{"route": route, "why": why} for route, why in self.unavailable],
            "notes": list(self.notes),
            "verdict": list(self.verdict),
            "matches": self.matches,
        }


def collect(request: DemoRequest, meter: Meter = quiet) -> DemoResult:
    """Make a file, load it in every way, compare the bytes, remove the file.

    Raises
    ------
    OSError
        The folder, its free space or the machine's free memory does not suffice.
    HeadraceError
        The device cannot be used, or a load failed.
    """
    folder = request.folder or Path(tempfile.gettempdir())
    place = Place(str(folder), find_mount(str(folder), read_mounts(Linux())).file_system)
    check_room(request.nbytes, place, MachineFacts(Linux()).available_nbytes)
    with (
        headrace.Context(cufile_environment=read_cufile_environment()) as context,
        _unwinding_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="headrace-demo-", dir=folder) as inner,
    ):
        target = find_target(request.device, None, context)
        meter(f"writing {format_nbytes(request.nbytes)}", 0, request.nbytes)
        model = make_model(request.nbytes, Path(inner))
        file = CachedFile(model.path, place.file_system)
        bench = Bench(file, model.nbytes, request.repeat, meter)
        return _compare(bench, model, place, target, context)


def _compare(
    bench: Bench, model: Model, place: Place, target: Target, context: headrace.Context
) -> DemoResult:
    """Run every method in both states."""
    methods = find_methods(model, target, context, find_memory(target))
    able, unavailable = bench.drop_unavailable(methods)
    rows = bench.compare(able, RESIDENT) + bench.compare(able, COLD)
    return DemoResult(
        target=target,
        gpu=context.gpu_fact(),
        place=place,
        nbytes=model.nbytes,
        tensors=len(model.tensors),
        repeat=bench.repeat,
        rows=rows,
        unavailable=tuple(unavailable.items()),
        notes=_notes(target, place),
        verdict=conclude(rows),
    )


def _notes(target: Target, place: Place) -> tuple[str, ...]:
    """Explain the rows before anybody asks."""
    notes = []
    if target.is_host and target.why:
        notes.append(f"No GPU can be used here, so all went into host memory: {target.why}.")
    if place.is_memory:
        notes.append(
            f"{place.folder} is on {place.file_system}, which keeps its files in memory, so "
            "nothing can be cold there; --dir chooses a folder on a disk."
        )
    return tuple(notes)


def check_room(nbytes: int, place: Place, available_nbytes: int | None) -> None:
    """Check that the file and the copies of it will fit.

    Raises
    ------
    OSError
        They will not.
    """
    free = shutil.disk_usage(place.folder).free
    wanted = nbytes + _HEADER_NBYTES
    if free < wanted:
        raise OSError(
            f"{place.folder}: the demo writes {format_nbytes(wanted)}, and {format_nbytes(free)} "
            "are free: choose another folder with --dir or a smaller file with --size"
        )
    wanted = nbytes * (_COPIES + place.is_memory)
    if available_nbytes is not None and available_nbytes < wanted:
        raise OSError(
            f"the demo needs {format_nbytes(wanted)} of memory, and "
            f"{format_nbytes(available_nbytes)} are available: choose a smaller file with --size"
        )


@contextmanager
def _unwinding_on_sigterm() -> Iterator[None]:
    """Let a terminated demo remove its file too, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    ends = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in ends]
    try:
        yield
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)


def require_right_bytes(result: DemoResult) -> None:
    """Raise `HeadraceError` when a method gave wrong bytes: the figures are then worth nothing."""
    wrong = sorted({row.method for row in result.rows if not row.matches})
    if wrong:
        raise HeadraceError(f"demo: wrong bytes from {', '.join(wrong)}; please report this")

"""The raw file through cuFile, by headrace and by KvikIO, in a process of its own.

cuFile can crash or hang, and what it and KvikIO find at their first call they keep for the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestants import Contestant, headrace_gds
from benchmarks.memory import Arrays, Memory, NumpyMemory, TorchMemory
from benchmarks.places import Place, PlaceError, Residency
from benchmarks.processes import ChildError, run_child
from benchmarks.raw_peers import Kvikio
from benchmarks.result import COLD, Row
from benchmarks.rounds import Clock, Contest, absent_row, run_contest
from benchmarks.udev import udev_record
from headrace.bindings.posix import PosixFiles

KIND = "gds"
"""`Row.kind` of these rows."""

ROUNDS = 2
"""Measured rounds, after one for warming up."""

_KVIKIO_SETTINGS = (8, 16)  # threads, MiB of a task
_TIMEOUT_S = 50.0
_ROUNDS_S = 30.0  # no new round in the child after this, so that it answers in time


@dataclass(frozen=True, slots=True)
class GdsOrder:
    """What the child is asked, ready for JSON."""

    framework: str
    """As `Memory.framework`."""
    device: str
    """As `Memory.device`."""
    directory: str
    """Where the raw file lies, on a file system that cuFile takes."""
    filesystem: str
    """Its type."""
    nbytes: int
    """First bytes of the file that are read."""
    repeats: int
    """Measured rounds."""
    budget_s: float
    """Seconds of readings after which a contestant leaves."""
    alone: bool = False
    """Whether headrace reads without KvikIO beside it."""


def gds_contestants(memory: Memory, target: Any) -> Sequence[Contestant]:
    """Give headrace, which opens the driver first so that it counts, and KvikIO."""
    return (headrace_gds(memory, target), Kvikio(target, _KVIKIO_SETTINGS, compat="OFF"))


def absent_gds_rows(memory: Memory, why: str) -> list[Row]:
    """Give the rows of a contest that cannot be held here."""
    return [absent_row(c, KIND, COLD, why) for c in gds_contestants(memory, None)]


def measure_gds(order: GdsOrder, memory: Memory, log: Path) -> list[Row]:
    """Let udev know the device, and hold the contest in a child process.

    Parameters
    ----------
    order
        What to read.
    memory
        The parent's memory, for the names of contestants that could not take part.
    log
        Where cuFile writes its log.
    """
    if order.device == "cpu":
        return absent_gds_rows(memory, "cuFile reads into a GPU, and there is none")
    try:
        with udev_record(Path(order.directory), order.filesystem):
            return _ask_child(order, memory, log)
    except (PlaceError, ChildError) as error:
        return absent_gds_rows(memory, str(error))


def _ask_child(order: GdsOrder, memory: Memory, log: Path) -> list[Row]:
    """Ask a child, and where KvikIO may have ended it, another one for headrace alone."""

    def ask(order: GdsOrder) -> list[Row]:
        words = ("gds", json.dumps(asdict(order)))
        found = run_child(*words, timeout_s=_TIMEOUT_S, CUFILE_LOGFILE_PATH=str(log))
        return [Row.from_dict(row) for row in found]

    try:
        return ask(order)
    except ChildError as error:
        why = f"beside headrace, the process failed: {error}"
        return [*ask(replace(order, alone=True)), *absent_gds_rows(memory, why)[1:]]


def hold_gds_contest(order: GdsOrder) -> list[Row]:
    """Hold the contest in this process; what the child does."""
    memory: Memory = NumpyMemory() if order.framework == "numpy" else TorchMemory(order.device)
    place = Place(COLD, Path(order.directory), order.filesystem, order.filesystem, cold=True)
    target = memory.empty(order.nbytes)
    contest = Contest(
        kind=KIND,
        place=place,
        memory=memory,
        reference=_first_bytes(memory, place.source(KIND), order.nbytes),
        target=target,
        nbytes=order.nbytes,
        repeats=order.repeats,
        budget_s=order.budget_s,
        residency=Residency(PosixFiles()),
    )
    contestants = gds_contestants(memory, target)[: 1 if order.alone else None]
    return run_contest(contest, contestants, Clock.after(_ROUNDS_S), _tell)


def _first_bytes(memory: Memory, source: Path, nbytes: int) -> Arrays:
    host = np.fromfile(source, np.uint8, nbytes)
    if memory.framework == "numpy":
        return {"": host}
    import torch

    return {"": torch.from_numpy(host).to(memory.device)}


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")

"""The most host memory that a save takes, in a process where it is the first."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.memory import memory_of
from benchmarks.processes import ChildError, run_child
from benchmarks.save.result import HostMemory
from benchmarks.save.watch import MemoryWatch
from benchmarks.save.writers import Writer, model_writers


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What the child is asked, ready for JSON."""

    device: str
    """``"cuda"`` or ``"cpu"``."""
    name: str
    """The contestant."""
    source: str
    """Directory with the model to save."""
    path: str
    """File to write; it does not exist, and is removed."""


def measure_host_memory(order: SaveOrder) -> HostMemory:
    """Save once in a child process that has the model on its device."""
    try:
        found = run_child("save-memory", json.dumps(asdict(order)))
    except ChildError as error:
        return HostMemory(order.name, 0, None, None, str(error), ())
    return HostMemory(**{**found, "reports": tuple(found["reports"])}, error=None)


def save_once(order: SaveOrder) -> dict[str, object]:
    """Save once in this process; what the child does."""
    memory = memory_of(order.device)
    writer = _find(model_writers(memory), order.name)
    if why := writer.why_absent():
        raise RuntimeError(why)
    arrays, path = memory.load_reference(Path(order.source)), Path(order.path)
    memory.synchronize()
    gc.collect()
    try:
        with writer.session(path), MemoryWatch() as watch:
            start = time.perf_counter()
            writer.write(arrays, path)
            seconds = time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)
        writer.close()
    return {
        "name": order.name,
        "nbytes": sum(int(array.nbytes) for array in arrays.values()),
        "growth_nbytes": watch.growth_nbytes,
        "seconds": seconds,
        "reports": writer.take_reports(),
    }


def _find(writers: Sequence[Writer], name: str) -> Writer:
    by_name = {writer.name: writer for writer in writers}
    if name not in by_name:
        raise ValueError(f"{name!r} is not one of {', '.join(by_name)}")
    return by_name[name]

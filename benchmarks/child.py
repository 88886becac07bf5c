"""What runs in a fresh process: ``python -m benchmarks.child``; prints one JSON document.

It imports no headrace before its work, and little else: an import is what it may have to time.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, headrace_model
from benchmarks.memory import Memory, NumpyMemory, TorchMemory
from benchmarks.peers import model_peers

ANSWER = "answer: "
"""What the line of the answer begins with; foreign libraries may print as well."""


def main(arguments: list[str]) -> None:
    """Do what the first word says: ``import``, ``first-call``, ``gds`` or ``save-memory``."""
    action, *given = arguments
    actions: dict[str, Callable[..., Any]] = {
        "import": time_import,
        "first-call": time_first_calls,
        "gds": read_through_cufile,
        "save-memory": save_and_watch,
    }
    found = actions[action](*given)
    sys.stdout.write(f"{ANSWER}{json.dumps(found)}\n")
    sys.stdout.flush()


def time_import(after: str, name: str) -> float:
    """Seconds that importing `name` takes when `after` has been imported."""
    importlib.import_module(after)
    start = time.perf_counter()
    importlib.import_module(name)
    return time.perf_counter() - start


def time_first_calls(framework: str, device: str, name: str, source: str) -> list[float]:
    """Seconds of the first two loads; the device's context exists before."""
    memory: Memory = NumpyMemory() if framework == "numpy" else TorchMemory(device)
    contestant = _find(memory, name)
    memory.poison(memory.empty(1))  # makes the context, and runs a first kernel
    memory.synchronize()
    if why := contestant.why_absent():
        raise RuntimeError(why)
    return [_time_load(contestant, memory, Path(source)) for _ in range(2)]


def read_through_cufile(order: str) -> list[dict[str, Any]]:
    """Rows of the contest that a `GdsOrder` in JSON asks for."""
    from benchmarks.gds import GdsOrder, hold_gds_contest

    return [row.to_dict() for row in hold_gds_contest(GdsOrder(**json.loads(order)))]


def save_and_watch(order: str) -> dict[str, Any]:
    """Host memory of the save that a `SaveOrder` in JSON asks for."""
    from benchmarks.save.host_memory import SaveOrder, save_once

    return save_once(SaveOrder(**json.loads(order)))


def _time_load(contestant: Contestant, memory: Memory, source: Path) -> float:
    with contestant.session(source):
        start = time.perf_counter()
        arrays: Any = contestant.load(source)
        memory.synchronize()
        seconds = time.perf_counter() - start
        del arrays
        return seconds


def _find(memory: Memory, name: str) -> Contestant:
    contestants = [*headrace_model(memory), *model_peers(memory)]
    by_name = {contestant.name: contestant for contestant in contestants}
    if name not in by_name:
        raise ValueError(f"{name!r} is not one of {', '.join(by_name)}")
    return by_name[name]


if __name__ == "__main__":
    main(sys.argv[1:])

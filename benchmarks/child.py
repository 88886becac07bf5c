"""What runs in a fresh process: ``python -m benchmarks.child``; prints one JSON document."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, headrace_model
from benchmarks.memory import Memory, NumpyMemory, TorchMemory
from benchmarks.peers import model_peers


def main(arguments: list[str]) -> None:
    """Do what the first word says: ``import`` or ``first-call``."""
    action, *given = arguments
    found = time_import(*given) if action == "import" else time_first_calls(*given)
    sys.stdout.write(json.dumps(found) + "\n")


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

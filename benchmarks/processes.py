"""What only a fresh process can show: the price of the first call, and of the import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.memory import Memory
from benchmarks.result import FirstCall, ImportTime
from benchmarks.rounds import Clock

_ROOT = Path(__file__).parent.parent
_TIMEOUT_S = 60.0


class ChildError(Exception):
    """A child process failed; the message is its last line."""


def measure_first_call(
    name: str, memory: Memory, source: Path, processes: int, clock: Clock
) -> FirstCall:
    """Time the first and the second load in fresh processes, one after the other."""
    where = (memory.framework, memory.device)
    pairs: list[tuple[float, float]] = []
    error = None
    try:
        for _ in range(processes):
            if clock.is_over():
                error = f"only {len(pairs)} of {processes} processes: the time was over"
                break
            first, second = _run_child("first-call", *where, name, str(source))
            pairs.append((first, second))
    except ChildError as failure:
        error = str(failure)
    return FirstCall(name, tuple(a for a, _ in pairs), tuple(b for _, b in pairs), error)


def measure_import(name: str, after: str, processes: int, clock: Clock) -> ImportTime:
    """Time an import in fresh processes; one more before warms the file cache and the bytecode."""
    seconds: list[float] = []
    error = None
    try:
        for _ in range(processes + 1):
            if clock.is_over():
                error = f"only {len(seconds)} processes: the time was over"
                break
            seconds.append(_run_child("import", after, name))
    except ChildError as failure:
        error = str(failure)
    return ImportTime(name, after, tuple(seconds[1:]), error)


def _run_child(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.child", *arguments]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"took longer than {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildError(lines[-1])
    return json.loads(done.stdout.splitlines()[-1])

"""What only a fresh process can show: the price of the first call, and of the import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.child import ANSWER
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
    """Time the first and the second load in fresh processes, one process after the other.

    One more before them leaves the bytecode, and the pages of every library, where they are found.
    """
    where = (memory.framework, memory.device)
    pairs: list[tuple[float, float]] = []
    error = None
    try:
        for _ in range(processes + 1):
            if clock.is_over():
                error = f"only {len(pairs[1:])} of {processes} processes: the time was over"
                break
            first, second = run_child("first-call", *where, name, str(source))
            pairs.append((first, second))
    except ChildError as failure:
        error = str(failure)
    counted = pairs[1:]
    return FirstCall(name, tuple(a for a, _ in counted), tuple(b for _, b in counted), error)


def measure_import(name: str, after: str, processes: int, clock: Clock) -> ImportTime:
    """Time an import in fresh processes; one more before warms the file cache and the bytecode."""
    seconds: list[float] = []
    error = None
    try:
        for _ in range(processes + 1):
            if clock.is_over():
                error = f"only {len(seconds[1:])} processes: the time was over"
                break
            seconds.append(run_child("import", after, name))
    except ChildError as failure:
        error = str(failure)
    return ImportTime(name, after, tuple(seconds[1:]), error)


def child_environment() -> dict[str, str]:
    """Give the variables of a child process, which finds what this one finds.

    It may keep bytecode, as every installed package has it: to compile headrace takes as long as
    to import it.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    kept = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": path}


def run_child(*arguments: str, timeout_s: float = _TIMEOUT_S, **variables: str) -> Any:
    """Run ``benchmarks.child`` and take its answer, even if it fails to end well after that.

    Raises
    ------
    ChildError
        There is no answer.
    """
    command = [sys.executable, "-m", "benchmarks.child", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**child_environment(), **variables},
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"took longer than {timeout_s:.0f} s") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not answers:
        lines = done.stderr.strip().splitlines() or ["no answer"]
        raise ChildError(f"exit status {done.returncode}: {lines[-1]}")
    return json.loads(answers[-1].removeprefix(ANSWER))

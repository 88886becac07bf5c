"""Watches the memory of another process: ``python -m benchmarks.save.watch PID``.

A process of its own, because a library that holds the interpreter's lock would stop a thread.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from types import TracebackType

from benchmarks.processes import child_environment

_INTERVAL_S = 0.002


class MemoryWatch:
    """Context manager that watches this process while the block runs."""

    growth_nbytes: int = 0
    """Most anonymous resident memory during the block, above the level before; known after it."""

    def __enter__(self) -> MemoryWatch:
        """Start watching."""
        command = [sys.executable, "-m", "benchmarks.save.watch", str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        if self._process.stdout is None or not self._process.stdout.readline():
            raise RuntimeError("the process that watches memory did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop watching."""
        answer, _ = self._process.communicate(timeout=10.0)
        self.growth_nbytes = int(answer)


def main(arguments: list[str]) -> None:
    """Print a line when the watch has begun, and the growth once stdin is closed."""
    status = os.open(f"/proc/{int(arguments[0])}/status", os.O_RDONLY)
    level = peak = _anonymous_nbytes(status)
    sys.stdout.write("watching\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], _INTERVAL_S)[0]:
        peak = max(peak, _anonymous_nbytes(status))
    peak = max(peak, _anonymous_nbytes(status))
    sys.stdout.write(f"{peak - level}\n")


def _anonymous_nbytes(status: int) -> int:
    """Resident anonymous memory: neither files nor tmpfs count."""
    match = re.search(rb"^RssAnon:\s+(\d+) kB$", os.pread(status, 8192, 0), re.MULTILINE)
    if match is None:
        raise RuntimeError("the kernel does not tell RssAnon")
    return int(match[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1:])

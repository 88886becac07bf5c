"""What ``headrace doctor`` says of the machine and of the directory of the inputs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import child_environment

_TIMEOUT_S = 60.0


def ask_doctor(directory: Path) -> dict[str, Any]:
    """Call the command once, in a process of its own.

    Returns
    -------
    dict
        ``seconds``, ``exit_status``, ``routes`` and ``error``: what went wrong, None if nothing
        did. Exit status 1 with an answer means that no route to the GPU serves.
    """
    command = [sys.executable, "-m", "headrace", "doctor", "--json", str(directory)]
    found: dict[str, Any] = {"exit_status": None, "routes": [], "error": None}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        found["error"] = f"took longer than {_TIMEOUT_S:.0f} s"
    else:
        found["exit_status"] = done.returncode
        try:
            found["routes"] = json.loads(done.stdout)["routes"]
        except (ValueError, KeyError):
            found["error"] = _last_line(done.stderr) or f"exit status {done.returncode}, no answer"
    return {"seconds": time.perf_counter() - start, **found}


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]

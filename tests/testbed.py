"""The file system of ``scripts/zram-testbed``, on which the real cuFile serves files."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[1] / "scripts" / "zram-testbed"


def run_testbed(*arguments: str) -> None:
    """Run the script, or skip: even root may lack the rights or the module inside a container."""
    done = subprocess.run(
        [str(_SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        pytest.skip(f"zram-testbed {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted_testbed(folder: Path) -> Iterator[Path]:
    """Mount the testbed on a directory inside `folder`, and remove it afterwards."""
    mount = folder / "zram"
    run_testbed("up", "1G", str(mount))
    try:
        yield mount
    finally:
        run_testbed("down", str(mount))

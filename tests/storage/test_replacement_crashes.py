"""What a save leaves where it is killed or interrupted, at every one of its calls."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.bindings.posix import Files, PosixFiles
from headrace.storage.replacement import Replacement
from headrace.testing import FaultyFiles, Killed
from tests.support import TIMEOUT_S

OLD, NEW, NEXT = b"old" * 1000, b"new!" * 5000, b"next" * 10
MOST_CALLS = 100


def save(path: Path, content: bytes, files: Files) -> None:
    """Save in the manner of a large file: space first, several writes, an end cut off."""
    with Replacement(str(path), files) as replacement:
        sink = replacement.sink
        sink.allocate(0, len(content) + 100)
        half = len(content) // 2
        sink.write([memoryview(content)[half:]], half)
        sink.write([memoryview(content)[:half]], 0)
        sink.resize(len(content))
        replacement.commit(fsync=True)


@pytest.mark.parametrize("old", [OLD, None])
@pytest.mark.parametrize("mode", [0o644, 0o400])
def test_killed_at_any_call_the_file_is_old_or_new_and_the_next_save_cleans_up(
    tmp_path: Path, old: bytes | None, mode: int
) -> None:
    seen = []
    for number in range(1, MOST_CALLS):
        target = tmp_path / str(number) / "file"
        target.parent.mkdir()
        if old is not None:
            target.write_bytes(old)
            target.chmod(mode)
        # What an earlier dead writer left, so that its removal is a step as well.
        target.with_name(".file.0123456789abcdef.headrace").touch()
        files = FaultyFiles(die_at=number)
        try:
            save(target, NEW, files)
        except Killed:
            pass
        else:
            break
        found = target.read_bytes() if target.exists() else None
        seen.append(found)
        assert files.open_descriptors == ()
        save(target, NEXT, PosixFiles())
        assert os.listdir(target.parent) == ["file"]
        assert target.read_bytes() == NEXT
    assert len(seen) > 10
    renamed = seen.index(NEW)
    assert seen == [old] * renamed + [NEW] * (len(seen) - renamed)
    assert target.read_bytes() == NEW


class Interrupting:
    """Files of which one call, of any kind, meets Ctrl-C just before or just after its effect."""

    def __init__(self, at: int, after: bool) -> None:
        self.inner = FaultyFiles()
        self._left, self._after = at, after

    @property
    def happened(self) -> bool:
        return self._left <= 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.inner, name)

        def interrupted(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise KeyboardInterrupt
            result = call(*arguments, **named)
            if self._left == 0:
                raise KeyboardInterrupt
            return result

        return interrupted


@pytest.mark.parametrize("after", [False, True])
def test_interrupted_at_any_call_the_file_is_old_or_new_and_the_next_save_cleans_up(
    tmp_path: Path, after: bool
) -> None:
    seen = []
    for number in range(1, MOST_CALLS):
        target = tmp_path / str(number) / "file"
        target.parent.mkdir()
        target.write_bytes(OLD)
        target.chmod(0o640)
        target.with_name(".file.0123456789abcdef.headrace").touch()
        files = Interrupting(number, after)
        try:
            save(target, NEW, cast(Files, files))
        except KeyboardInterrupt as interrupt:
            kept = interrupt  # as an interactive interpreter keeps it, with all its frames
        if not files.happened:
            break
        seen.append(target.read_bytes())
        save(target, NEXT, PosixFiles())
        assert os.listdir(target.parent) == ["file"]
        for fd in files.inner.open_descriptors:  # opened, but never handed to anybody
            files.inner.close(fd)
        del kept
    assert len(seen) > 20
    renamed = seen.index(NEW)
    assert seen == [OLD] * renamed + [NEW] * (len(seen) - renamed)


HALF_WAY = """
import sys, time
from headrace.bindings.posix import PosixFiles
from headrace.storage.replacement import Replacement
with Replacement(sys.argv[1], PosixFiles()) as replacement:
    replacement.sink.write([memoryview(b"half")], 0)
    print("half-way", flush=True)
    sys.stdin.readline()
    replacement.commit(fsync=False)
"""
AGAIN_AND_AGAIN = """
import sys
from headrace.bindings.posix import PosixFiles
from headrace.storage.replacement import Replacement
number = 0
while True:
    number += 1
    with Replacement(sys.argv[1], PosixFiles()) as replacement:
        for part in range(8):
            replacement.sink.write([memoryview(bytes([number % 256]) * 1000)], part * 1000)
        replacement.commit(fsync=number % 2 == 0)
    print(number, flush=True)
"""


def start(code: str, path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() in ("half-way\n", "1\n")
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate(timeout=TIMEOUT_S)


def test_temporary_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    target = tmp_path / "file"
    target.write_bytes(OLD)
    child = start(HALF_WAY, target)
    try:
        (temporary,) = set(os.listdir(tmp_path)) - {"file"}
        save(target, NEW, PosixFiles())
        assert sorted(os.listdir(tmp_path)) == sorted([temporary, "file"])
    finally:
        end(child)
    assert temporary in os.listdir(tmp_path)
    assert target.read_bytes() == NEW
    save(target, NEXT, PosixFiles())
    assert os.listdir(tmp_path) == ["file"]


def test_two_processes_that_save_at_once_both_succeed(tmp_path: Path) -> None:
    target = tmp_path / "file"
    child = start(HALF_WAY, target)
    try:
        save(target, NEW, PosixFiles())
        assert target.read_bytes() == NEW
        child.communicate("go on\n", timeout=TIMEOUT_S)
    finally:
        end(child)
    assert child.returncode == 0
    assert target.read_bytes() == b"half"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("attempt", range(5))
def test_process_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path, attempt: int) -> None:
    target = tmp_path / "file"
    child = start(AGAIN_AND_AGAIN, target)
    try:
        time.sleep(random.Random(attempt).uniform(0, 0.05))
    finally:
        end(child)
    content = target.read_bytes()
    assert len(content) == 8000
    assert len(set(content)) == 1
    save(target, NEXT, PosixFiles())
    assert os.listdir(tmp_path) == ["file"]

"""Fresh processes: what they find, and which of them count."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from benchmarks import processes
from benchmarks.memory import NumpyMemory
from benchmarks.processes import (
    ChildError,
    child_environment,
    measure_first_call,
    measure_import,
)
from benchmarks.rounds import Clock

FOREVER, OVER = Clock(float("inf")), Clock(float("-inf"))


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that take as many seconds as there were children before."""
    numbers = itertools.count()

    def run_child(what: str, *arguments: str) -> Any:
        number = float(next(numbers))
        return (number + 10, number) if what == "first-call" else number

    monkeypatch.setattr(processes, "run_child", run_child)


@pytest.mark.usefixtures("numbered")
def test_process_that_warms_up_does_not_count() -> None:
    found = measure_first_call("any", NumpyMemory(), Path("file"), 3, FOREVER)
    assert (found.first_s, found.second_s, found.error) == ((11, 12, 13), (1, 2, 3), None)
    assert measure_import("any", "numpy", 2, FOREVER).seconds == (5, 6)


@pytest.mark.usefixtures("numbered")
def test_time_that_is_over_leaves_nothing_to_count_and_says_so() -> None:
    found = measure_first_call("any", NumpyMemory(), Path("file"), 3, OVER)
    assert (found.first_s, found.error) == ((), "only 0 of 3 processes: the time was over")
    imported = measure_import("any", "numpy", 3, OVER)
    assert (imported.seconds, imported.error) == ((), "only 0 processes: the time was over")


def test_child_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: str) -> Any:
        raise ChildError("exit status 1: ImportError")

    monkeypatch.setattr(processes, "run_child", fail)
    found = measure_first_call("any", NumpyMemory(), Path("file"), 3, FOREVER)
    assert (found.first_s, found.error) == ((), "exit status 1: ImportError")


def test_child_may_keep_bytecode_as_installed_packages_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = child_environment()
    assert "PYTHONDONTWRITEBYTECODE" not in found
    assert found["PYTHONPATH"].endswith(":/elsewhere")

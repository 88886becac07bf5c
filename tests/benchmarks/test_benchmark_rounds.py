"""The method: who runs when, and who leaves."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rounds
from benchmarks.contestants import Contestant
from benchmarks.memory import Arrays, NumpyMemory
from benchmarks.places import Residency, disk_place
from benchmarks.raw_peers import DirectThreads, NumpyFromfile, NumpyMemmap
from benchmarks.result import Role, Row
from benchmarks.rounds import Clock, Contest, run_contest
from headrace.bindings.posix import PosixFiles

NBYTES = 70_001
FOREVER = Clock(float("inf"))


class Recorder(Contestant):
    """Loads the file, and takes a given time over it."""

    def __init__(self, name: str, log: list[str], pause_s: float = 0.0, **given: Any) -> None:
        super().__init__(name, (), **given)
        self._log = log
        self._pause_s = pause_s

    def load(self, source: Path) -> Arrays:
        self._log.append(self.name)
        time.sleep(self._pause_s)
        return {"": np.fromfile(source, np.uint8)}


@pytest.fixture
def contest(tmp_path: Path) -> Contest:
    data = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
    data.tofile(tmp_path / "raw.bin")
    return Contest(
        kind="raw",
        place=disk_place(tmp_path),
        memory=NumpyMemory(),
        reference={"": data},
        target=None,
        nbytes=NBYTES,
        repeats=3,
        budget_s=60.0,
        residency=Residency(PosixFiles()),
    )


def hold(contest: Contest, *contestants: Contestant, clock: Clock = FOREVER) -> list[Row]:
    told: list[str] = []
    return run_contest(contest, contestants, clock, told.append)


def test_each_contestant_runs_once_a_round_in_changing_order(contest: Contest) -> None:
    log: list[str] = []
    hold(contest, *(Recorder(name, log) for name in "abc"))
    by_round = ["".join(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert [sorted(order) for order in by_round] == [["a", "b", "c"]] * 4
    assert len(set(by_round)) > 2


def test_first_round_is_kept_apart(contest: Contest) -> None:
    (row,) = hold(contest, Recorder("a", []))
    assert row.first is not None
    assert row.first.round == 0
    assert [reading.round for reading in row.readings] == [1, 2, 3]
    assert row.is_valid


def test_contestant_that_used_up_its_budget_leaves_with_a_note(contest: Contest) -> None:
    log: list[str] = []
    slow, fast = Recorder("slow", log, 0.02), Recorder("fast", log)
    slow_row, fast_row = hold(replace(contest, budget_s=0.03), slow, fast)
    assert len(slow_row.readings) == 1
    assert slow_row.note is not None
    assert slow_row.note.startswith("stopped after 1 of 3 rounds")
    assert slow_row.is_valid
    assert len(fast_row.readings) == 3


@pytest.mark.parametrize(("role", "loads"), [(Role.PEER, 2), (Role.OURS, 3)])
def test_slow_contestant_has_fewer_rounds_unless_it_is_the_default_call(
    contest: Contest, monkeypatch: pytest.MonkeyPatch, role: Role, loads: int
) -> None:
    monkeypatch.setattr(rounds, "SLOW_S", 0.005)
    (row,) = hold(contest, Recorder("a", [], 0.01, role=role))
    assert len(row.readings) == loads
    assert row.is_valid
    assert (row.note is None) is (loads == 3)


def test_contestant_with_a_very_slow_first_reading_runs_once(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ONCE_S", 0.01)
    (row,) = hold(contest, Recorder("a", [], 0.02))
    assert row.readings == ()
    assert row.measured == (row.first,)
    assert row.note is not None
    assert row.note.startswith("run once only")


def test_only_the_fastest_settings_of_a_family_go_on(contest: Contest) -> None:
    settings = [
        Recorder(f"s{i}", [], 0.01 * i, role=Role.PEER_TUNED, family="tuned") for i in range(5)
    ]
    rows = hold(contest, *settings)
    assert [len(row.readings) for row in rows] == [3, 3, 3, 1, 1]
    assert rows[4].note is not None
    assert "fastest settings" in rows[4].note


def test_no_round_starts_when_the_time_is_over(contest: Contest) -> None:
    (row,) = hold(contest, Recorder("a", []), clock=Clock(0.0))
    assert row.measured == ()
    assert row.note is not None
    assert "the time for the whole run was over" in row.note
    assert not row.is_valid


def test_result_of_another_shape_is_told_apart(contest: Contest) -> None:
    class Short(Contestant):
        def load(self, source: Path) -> Arrays:
            return {"": np.fromfile(source, np.uint8)[:-1]}

    (row,) = hold(contest, Short("short", ()))
    assert row.error is not None
    assert f"({NBYTES},)" in row.error


def test_contestants_are_closed_even_if_one_fails(contest: Contest) -> None:
    closed: list[str] = []

    class Closing(Recorder):
        def load(self, source: Path) -> Arrays:
            raise ValueError

        def close(self) -> None:
            closed.append(self.name)

    hold(contest, Closing("a", []), Closing("b", []))
    assert closed == ["a", "b"]


@pytest.mark.parametrize("peer", ["fromfile", "memmap", "direct"])
def test_hand_written_readers_get_every_byte_of_an_unaligned_file(
    contest: Contest, peer: str
) -> None:
    peers: dict[str, Contestant] = {
        "fromfile": NumpyFromfile(contest.memory),
        "memmap": NumpyMemmap(contest.memory),
        "direct": DirectThreads(2),
    }
    (row,) = hold(contest, peers[peer])
    if row.error and "Invalid argument" in row.error:
        pytest.skip("this file system refuses O_DIRECT")
    assert row.error is None
    assert row.compared


def test_warm_up_alone_is_no_measurement_where_only_the_time_was_over(contest: Contest) -> None:
    class Ends(Recorder):
        def load(self, source: Path) -> Any:
            ends.append(0.0)
            return super().load(source)

    class EndingClock(Clock):
        def is_over(self) -> bool:
            return bool(ends)

    ends: list[float] = []
    (row,) = hold(contest, Ends("a", []), clock=EndingClock(0.0))
    assert row.first is not None
    assert (row.measured, row.gb_per_s, row.is_valid) == ((), None, False)

"""The parts on registrations that are kept, on cuFile, on neighbours, and the doctor's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import doctor, gds
from benchmarks.contestants import Contestant, headrace_model, headrace_raw
from benchmarks.gds import GdsOrder, gds_contestants, hold_gds_contest, measure_gds
from benchmarks.load import find_failures, main
from benchmarks.memory import Arrays, NumpyMemory
from benchmarks.neighbour import Experiment, Neighbours, measure_beside
from benchmarks.places import PlaceError
from benchmarks.processes import ChildError, run_child
from benchmarks.result import Row
from benchmarks.rounds import Clock
from benchmarks.table import render_document
from benchmarks.udev import udev_record

ROOT = Path(__file__).parents[2]
NBYTES = (1 << 20) + 3

Main = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Main:
    def run(*sections: str) -> dict[str, Any]:
        words = ["--quick", "--device", "cpu", "--dir", str(tmp_path), "--nbytes", "1MiB"]
        only = [word for section in sections for word in ("--only", section)]
        return main([*words, "--model-nbytes", "700KB", *only])

    return run


@pytest.fixture
def order(tmp_path: Path) -> GdsOrder:
    data = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
    data.tofile(tmp_path / "raw.bin")
    return GdsOrder("numpy", "cpu", str(tmp_path), "ext4", NBYTES - 3, 1, 5.0)


@pytest.fixture
def experiment(order: GdsOrder) -> Experiment:
    source = Path(order.directory) / "raw.bin"
    reference = {"": np.fromfile(source, np.uint8)}
    return Experiment(source, NumpyMemory(), reference, np.zeros(NBYTES, np.uint8), NBYTES, 2)


def test_parts_that_need_a_gpu_are_absent_with_a_reason(run: Main) -> None:
    document = run("kept", "gds")
    rows = {(row["kind"], row["place"], row["name"]): row["absent"] for row in document["rows"]}
    assert {kind for kind, _, _ in rows} == {"kept", "gds"}
    assert len(rows) == 3
    assert all(rows.values())
    assert find_failures(document) == []
    assert "absent" in render_document(document)


def test_neighbours_lose_time_to_loads_of_the_right_bytes(run: Main) -> None:
    document = run("neighbour")
    rows = document["neighbour"]
    assert ['policy="cpu"' in row["name"] for row in rows] == [True, False]
    assert all(row["error"] is None and row["compared"] for row in rows)
    assert all(row["cpu_s_per_gb"] > 0 and row["routes"] == ["host"] for row in rows)
    assert all(len(row["loads"]) == 2 for row in rows)
    loads = [load for row in rows for load in row["loads"]]
    assert all(load["alone_loops"] > 0 and load["alone_cpu_seconds"] > 0 for load in loads)
    assert "### Neighbours" in render_document(document)


def test_neighbours_count_until_they_are_stopped(tmp_path: Path) -> None:
    neighbours = Neighbours(tmp_path / "board", 2)
    processes = neighbours._processes
    neighbours.wait()
    before = neighbours.progress()
    time.sleep(0.05)
    after = neighbours.progress()
    assert after.loops > before.loops
    assert after.cpu_seconds > before.cpu_seconds
    neighbours.stop()
    assert [process.returncode for process in processes] == [0, 0]


def test_neighbour_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "board").write_bytes(bytes(128))
    command = [sys.executable, "-m", "benchmarks.busy", str(tmp_path / "board"), "1", "1"]
    assert subprocess.run(command, timeout=30, cwd=ROOT, check=False).returncode == 0


def test_wrong_bytes_and_errors_beside_neighbours_are_told(
    experiment: Experiment, tmp_path: Path
) -> None:
    class Liar(Contestant):
        def load(self, source: Path) -> Arrays:
            return {"": np.zeros(NBYTES, np.uint8)}

    class Raiser(Contestant):
        def load(self, source: Path) -> Arrays:
            raise OSError("gone")

    contestants = [Liar("liar", ()), Raiser("raiser", ())]
    forever = Clock(float("inf"))
    liar, raiser = measure_beside(experiment, tmp_path, forever, contestants)
    assert liar.error is not None
    assert "wrong bytes" in liar.error
    assert raiser.error == "OSError: gone"
    assert (liar.cpu_s_per_gb, raiser.cpu_s_per_gb) == (None, None)


def test_no_load_beside_neighbours_starts_when_the_time_is_over(
    experiment: Experiment, tmp_path: Path
) -> None:
    rows = measure_beside(experiment, tmp_path, Clock(0.0))
    assert [(row.loads, row.compared) for row in rows] == [((), False)] * 2
    assert [row.to_dict()["lost_share"] for row in rows] == [None, None]


def test_doctor_answers_with_a_verdict_for_each_route(run: Main) -> None:
    document = run("doctor")
    found = document["doctor"]
    assert found["error"] is None
    assert found["exit_status"] in (0, 1)
    assert {verdict["route"] for verdict in found["routes"]} >= {"host", "cached", "mapped", "gds"}
    assert "### Doctor" in render_document(document)


def test_doctor_that_fails_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.ask_doctor(tmp_path / "no-such-directory")
    assert found["routes"] == []
    assert found["error"]
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.01)
    assert doctor.ask_doctor(tmp_path)["error"] == "took longer than 0 s"


def test_cufile_contest_reads_the_first_bytes_and_tells_why_it_cannot(order: GdsOrder) -> None:
    ours, peer = hold_gds_contest(order)
    assert (ours.kind, ours.place, ours.nbytes) == ("gds", "cold", NBYTES - 3)
    assert ours.error is not None
    assert "gds" in ours.error
    assert peer.absent is not None or peer.error is not None


def test_cufile_contest_is_held_in_a_process_of_its_own(order: GdsOrder) -> None:
    found = run_child("gds", json.dumps(asdict(order)))
    rows = [Row.from_dict(row) for row in found]
    assert [row.name for row in rows] == [c.name for c in gds_contestants(NumpyMemory(), None)]
    assert json.loads(json.dumps([row.to_dict() for row in rows])) == found


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_cufile_contest_compares_the_first_bytes(
    order: GdsOrder, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    pytest.importorskip(framework)

    class Reader(Contestant):
        def __init__(self, target: Any, first: int) -> None:
            super().__init__(f"from {first}", ())
            self._target, self._first = target, first

        def load(self, source: Path) -> Arrays:
            found = np.fromfile(source, np.uint8, len(self._target), offset=self._first)
            np.asarray(self._target)[:] = found
            return {"": self._target}

    monkeypatch.setattr(gds, "gds_contestants", lambda _, t: [Reader(t, 0), Reader(t, 1)])
    right, wrong = hold_gds_contest(replace(order, framework=framework))
    if right.error and "are resident" in right.error:
        pytest.skip("the page cache of this file system cannot be emptied")
    assert right.error is None
    assert right.is_valid
    assert wrong.error == "'' has wrong bytes"


def test_row_survives_json() -> None:
    found = {
        "kind": "gds", "place": "cold", "name": "a", "package": "", "role": "peer-tuned",
        "family": None, "nbytes": 8, "compared": True, "absent": None, "error": None, "note": None,
        "reports": [{"observed": [{"route": "gds"}]}], "first": None,
        "readings": [{"round": 1, "seconds": 1.0, "cpu_seconds": 0.5, "resident_nbytes": 0,
                      "peak_device_nbytes": None}],
    }  # fmt: skip
    row = Row.from_dict(found)
    assert json.loads(json.dumps(row.to_dict())).items() >= found.items()
    assert row.routes == ("gds",)


def test_crash_of_the_child_is_a_row_with_its_reason(
    order: GdsOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: str, **given: Any) -> Any:
        raise ChildError("exit status -11: no answer")

    monkeypatch.setattr(gds, "run_child", crash)
    monkeypatch.setattr(
        gds, "udev_record", lambda where, kind: udev_record(where, kind, tmp_path / "udev")
    )
    rows = measure_gds(replace(order, device="cuda:0"), NumpyMemory(), tmp_path / "log")
    assert [row.absent for row in rows] == ["exit status -11: no answer"] * 2
    assert not (tmp_path / "udev").exists()


def test_headrace_is_measured_alone_where_the_peer_ends_the_process(
    order: GdsOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_beside_the_peer(*words: str, **given: Any) -> Any:
        asked = GdsOrder(**json.loads(words[1]))
        if not asked.alone:
            raise ChildError("took longer than 50 s")
        return [row.to_dict() for row in hold_gds_contest(asked)]

    monkeypatch.setattr(gds, "run_child", fail_beside_the_peer)
    monkeypatch.setattr(
        gds, "udev_record", lambda where, kind: udev_record(where, kind, tmp_path / "udev")
    )
    monkeypatch.setattr(gds, "TorchMemory", lambda _: NumpyMemory())
    ours, peer = measure_gds(replace(order, device="cuda:0"), NumpyMemory(), tmp_path / "log")
    assert "gds" in ours.name
    assert ours.absent is None
    assert peer.absent == "beside headrace, the process failed: took longer than 50 s"


def test_child_without_an_answer_is_an_error() -> None:
    with pytest.raises(ChildError, match=r"exit status 1: .*no_such_module"):
        run_child("import", "json", "no_such_module")


@pytest.mark.parametrize("there", [False, True])
def test_udev_record_exists_only_meanwhile(tmp_path: Path, there: bool) -> None:
    number = tmp_path.stat().st_dev
    name = f"b{os.major(number)}:{os.minor(number)}"
    udev = tmp_path / "run" / "udev"
    udev.parent.mkdir()
    if there:
        (udev / "data").mkdir(parents=True)
        (udev / "control").write_text("")
        (udev / "data" / name).write_text("E:ITS_OWN=1\n")
    before = sorted(tmp_path.rglob("*"))
    with udev_record(tmp_path, "ext4", udev) as record:
        assert record == udev / "data" / name
        assert (udev / "control").exists()
        text = "E:ITS_OWN=1\n" if there else "I:1\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n"
        assert record.read_text() == text
    assert sorted(tmp_path.rglob("*")) == before


def test_udev_record_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "udev").write_text("")
    with (
        pytest.raises(PlaceError, match="no udev record can be written"),
        udev_record(tmp_path, "ext4", tmp_path / "udev"),
    ):
        pass


def test_mapped_takes_part_only_where_the_files_are_resident() -> None:
    memory = NumpyMemory()
    memory.device = "cuda:0"
    for contestants in (headrace_model(memory), headrace_raw(memory, np.zeros(1, np.uint8))):
        places = {c.name: c.places for c in contestants}
        (mapped,) = [where for name, where in places.items() if 'route="mapped"' in name]
        assert mapped == ("resident",)
        assert sum(where is not None for where in places.values()) == 1


def test_child_that_times_imports_has_not_imported_headrace() -> None:
    code = "import sys, benchmarks.child; print([m for m in sys.modules if 'headrace' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"

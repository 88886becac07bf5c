"""The whole benchmark, a few MiB large, into host memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.contestants import Contestant, headrace_model, headrace_raw
from benchmarks.load import find_failures, main
from benchmarks.memory import Arrays, Memory
from benchmarks.peers import model_peers
from benchmarks.raw_peers import raw_peers
from benchmarks.result import Role
from benchmarks.table import main as print_tables
from benchmarks.table import render_document

Main = Callable[..., dict[str, Any]]


class Liar(Contestant):
    """Loads what the official loader loads, but for one bit."""

    def __init__(self, memory: Memory) -> None:
        super().__init__("liar", ("numpy",))
        self._memory = memory

    def load(self, source: Path) -> Arrays:
        arrays = dict(self._memory.load_reference(source))
        name = sorted(arrays)[-1]
        arrays[name] = arrays[name].copy()
        arrays[name].reshape(-1).view(np.uint8)[-1] ^= 1
        return arrays


class Raiser(Contestant):
    def load(self, source: Path) -> Arrays:
        raise RuntimeError(f"cannot load {source}")


def with_impostors(kind: str, memory: Memory, target: Any) -> Sequence[Contestant]:
    ours = headrace_raw(memory, target) if kind == "raw" else headrace_model(memory)
    peers = raw_peers(memory, target) if kind == "raw" else model_peers(memory)
    impostors = [Liar(memory), Raiser("raiser", ("numpy",)), Raiser("ghost", ("no_such_module",))]
    return [*ours[:1], *peers[:1], *impostors]


@pytest.fixture
def run(tmp_path: Path) -> Main:
    def run(*arguments: str, **given: Any) -> dict[str, Any]:
        words = ["--quick", "--device", "cpu", "--dir", str(tmp_path), *arguments]
        return main(words, **given)

    return run


@pytest.fixture
def document(run: Main) -> dict[str, Any]:
    sections = ("--only", "raw", "--only", "model", "--only", "first-call")
    return run(*sections, "--nbytes", "1MiB", "--model-nbytes", "700KB", contestants=with_impostors)


def rows_named(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["name"] == name]


def test_every_contestant_of_a_quick_run_loads_the_right_bytes(run: Main, tmp_path: Path) -> None:
    document = run("--only", "raw", "--only", "model", "--json", str(tmp_path / "out" / "r.json"))
    taking_part = [row for row in document["rows"] if row["absent"] is None]
    assert taking_part
    assert [row["error"] for row in taking_part] == [None] * len(taking_part)
    assert all(row["compared"] and row["gb_per_s"] > 0 for row in taking_part)
    assert all(len(row["readings"]) == document["parameters"]["repeats"] for row in taking_part)
    assert find_failures(document) == []


def test_json_file_holds_the_document(run: Main, tmp_path: Path) -> None:
    path = tmp_path / "out" / "result.json"
    document = run("--only", "raw", "--nbytes", "1MiB", "--json", str(path))
    written = json.loads(path.read_text())
    assert written["rows"] == document["rows"]
    assert written["finished"] is True


def test_document_tells_machine_versions_and_parameters(document: dict[str, Any]) -> None:
    assert document["schema"] == 1
    assert document["versions"]["numpy"] == np.__version__
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["filesystems"]["resident"]
    assert document["parameters"]["raw_nbytes"] == 1 << 20
    assert document["parameters"]["model_nbytes"] == pytest.approx(700_000, rel=0.01)


def test_document_names_no_directory_of_this_machine(
    document: dict[str, Any], tmp_path: Path
) -> None:
    assert str(tmp_path) not in json.dumps(document)


def test_inputs_are_removed(run: Main, tmp_path: Path) -> None:
    run("--only", "raw", "--nbytes", "1MiB")
    assert list(tmp_path.iterdir()) == []


def test_contestant_with_wrong_bytes_is_caught(document: dict[str, Any]) -> None:
    rows = rows_named(document, "liar")
    assert {row["kind"] for row in rows} == {"raw", "model"}
    assert all("wrong bytes" in row["error"] and not row["compared"] for row in rows)


def test_contestant_with_wrong_bytes_is_no_bound_for_a_target(document: dict[str, Any]) -> None:
    assert not any("liar" in target["evidence"] for target in document["targets"])


def test_contestant_that_raises_is_a_row_with_its_error(document: dict[str, Any]) -> None:
    rows = rows_named(document, "raiser")
    assert rows
    assert all(row["error"].startswith("RuntimeError: cannot load <dir>") for row in rows)


def test_absent_contestant_is_a_row_with_the_reason(document: dict[str, Any]) -> None:
    rows = rows_named(document, "ghost")
    assert rows
    assert all("no_such_module" in row["absent"] and not row["readings"] for row in rows)


def test_others_go_on_after_a_failure(document: dict[str, Any]) -> None:
    ours = [row for row in document["rows"] if row["role"] == Role.OURS]
    assert all(len(row["readings"]) == 2 for row in ours)


def test_headrace_rows_tell_their_routes(document: dict[str, Any]) -> None:
    ours = [row for row in document["rows"] if row["role"] == Role.OURS]
    assert all(row["routes"] and row["reports"] for row in ours)


def test_resident_and_cold_places_are_what_they_say(document: dict[str, Any]) -> None:
    readings = {
        place: [r for row in document["rows"] if row["place"] == place for r in row["readings"]]
        for place in ("resident", "cold")
    }
    assert readings["resident"]
    assert all(reading["resident_nbytes"] > 0 for reading in readings["resident"])
    if readings["cold"]:
        assert all(reading["resident_nbytes"] == 0 for reading in readings["cold"])
    else:
        assert document["absent_places"]


def test_first_call_is_timed_in_a_process_of_its_own(document: dict[str, Any]) -> None:
    (found,) = document["first_calls"]
    assert found["error"] is None
    assert found["difference_s"] == pytest.approx(found["first_s"][0] - found["second_s"][0])


@pytest.mark.slow
def test_import_is_timed_in_a_process_of_its_own(run: Main) -> None:
    document = run("--only", "imports")
    found = {entry["name"]: entry for entry in document["imports"]}["headrace"]
    assert found["error"] is None
    assert found["median_s"] > 0


def test_tables_render_every_state_of_a_row(document: dict[str, Any]) -> None:
    text = render_document(document)
    assert "| liar | failed |" in text
    assert "| ghost | absent |" in text
    assert "ghost: absent: cannot import no_such_module" in text
    assert "raiser: RuntimeError" in text
    assert "### Targets" in text


def test_tables_are_printed_from_the_file(
    run: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    document = run("--only", "raw", "--nbytes", "1MiB", "--json", str(path))
    capsys.readouterr()
    print_tables([str(path)])
    assert capsys.readouterr().out == render_document(document) + "\n"


def test_zram_device_that_does_not_exist_is_an_absent_place(run: Main) -> None:
    document = run("--only", "raw", "--nbytes", "1MiB", "--zram", "/dev/no-such-device")
    (absent,) = document["absent_places"]
    assert absent["key"] == "cold"
    assert {row["place"] for row in document["rows"]} == {"resident"}


@pytest.mark.gpu
@pytest.mark.slow
def test_quick_run_to_the_gpu_ends_well(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.load", "--quick", "--device", "cuda"]
    parts = ("raw", "model", "kept", "neighbour", "gds", "first-call", "doctor")
    sections = [word for part in parts for word in ("--only", part)]
    done = subprocess.run(
        [*command, *sections, "--dir", str(tmp_path), "--json", str(path)],
        capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    ours = [row for row in document["rows"] if row["role"] == Role.OURS]
    assert {(row["kind"], row["compared"]) for row in ours} == {("raw", True), ("model", True)}
    assert all(call["error"] is None for call in document["first_calls"])
    others = [row for row in document["rows"] if row["role"] == Role.OURS_EXTRA]
    assert [row["compared"] for row in others if row["kind"] == "kept"] == [True]
    assert all(row["absent"] for row in others if row["kind"] == "gds")  # --quick has no zram
    assert [row["compared"] for row in document["neighbour"]] == [True, True]
    assert document["doctor"]["error"] is None


def test_failure_of_the_default_call_is_a_failure_of_the_run(run: Main) -> None:
    def broken(kind: str, memory: Memory, target: Any) -> Sequence[Contestant]:
        return [Raiser("headrace", ("numpy",), Role.OURS)]

    document = run("--only", "raw", "--nbytes", "1MiB", contestants=broken)
    assert len(find_failures(document)) == 2 - len(document["absent_places"])

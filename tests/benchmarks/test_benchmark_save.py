"""The whole benchmark of writing, a few MiB large, from host memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.load import find_failures
from benchmarks.memory import Arrays, Memory
from benchmarks.needs import Need
from benchmarks.result import Role
from benchmarks.save.command import main
from benchmarks.save.run import Contestants
from benchmarks.save.settings import parse_settings
from benchmarks.save.writers import (
    AsyncSaver,
    NumpyTofile,
    SafetensorsSaveFile,
    Writer,
    model_writers,
    raw_writers,
)
from benchmarks.table import main as print_tables
from benchmarks.table import render_document

Main = Callable[..., dict[str, Any]]


class Own(Writer):
    """Stands for headrace's default call: writes as the peer that it wraps."""

    def __init__(self, peer: Writer) -> None:
        super().__init__("own", (), Role.OURS)
        self._peer = peer

    def write(self, arrays: Arrays, path: Path) -> None:
        self._peer.write(arrays, path)


class Liar(Own):
    """Writes all but the last bit."""

    def __init__(self, peer: Writer) -> None:
        super().__init__(peer)
        self.name, self.role = "liar", Role.PEER

    def write(self, arrays: Arrays, path: Path) -> None:
        super().write(arrays, path)
        with path.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))


class Litterer(Own):
    """Leaves a temporary file."""

    def __init__(self, peer: Writer) -> None:
        super().__init__(peer)
        self.name, self.role = "litterer", Role.PEER

    def write(self, arrays: Arrays, path: Path) -> None:
        super().write(arrays, path)
        path.with_name("left.tmp").write_bytes(b"")


class Raiser(Writer):
    def write(self, arrays: Arrays, path: Path) -> None:
        raise OSError(f"cannot write {path}")


class Shuffler(Writer):
    """Saves the right tensors under a header of its own."""

    def __init__(self, name: str, *, is_exact: bool) -> None:
        super().__init__(name, ())
        self.is_exact = is_exact

    def write(self, arrays: Arrays, path: Path) -> None:
        save_file(dict(arrays), path, metadata={"layout": "another"})


def impostors(peer: Writer) -> Sequence[Writer]:
    ghost = Raiser("ghost", ("json",), needs=(Need("json", "JSONDecoder.no_such"),))
    return [Own(peer), Liar(peer), Litterer(peer), Raiser("raiser", ()), ghost, peer]


class Copier(AsyncSaver):
    """Takes a snapshot, and writes in a thread; a hasty one writes what it finds at the end."""

    def __init__(self, name: str, *, hasty: bool = False) -> None:
        super().__init__(name, (), Role.PEER if hasty else Role.OURS)
        self._hasty = hasty

    def start(self, arrays: Arrays, path: Path) -> Callable[[float], None]:
        snapshot = dict(arrays) if self._hasty else deepcopy(dict(arrays))
        thread = Thread(target=save_file, args=(snapshot, path))
        if not self._hasty:
            thread.start()

        def wait(timeout_s: float) -> None:
            if self._hasty:
                thread.start()
            thread.join(timeout_s)

        return wait

    def take_reports(self) -> tuple[dict[str, Any], ...]:
        return ({"snapshot": {"device": "cpu", "seconds": 0.0123}},)


def raw_impostors(memory: Memory, source: Any) -> Sequence[Writer]:
    return impostors(NumpyTofile(memory))


def model_impostors(memory: Memory) -> Sequence[Writer]:
    own, *others, official = impostors(SafetensorsSaveFile(memory))
    shufflers = [Shuffler("shuffler", is_exact=False), Shuffler("strict", is_exact=True)]
    return [own, *others, *shufflers, official]


STAND_INS = Contestants(
    raw=raw_impostors,
    model=model_impostors,
    background=lambda memory: [Copier("copier"), Copier("hasty", hasty=True)],
)


@pytest.fixture
def run(tmp_path: Path) -> Main:
    def run(*arguments: str, **given: Any) -> dict[str, Any]:
        sizes = ("--nbytes", "1MiB", "--model-nbytes", "700KB")
        words = ["--quick", "--device", "cpu", "--dir", str(tmp_path), *sizes, *arguments]
        return main(words, **given)

    return run


@pytest.fixture
def document(run: Main) -> dict[str, Any]:
    return run(contestants=STAND_INS)


def rows_named(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["name"] == name]


def test_real_contestants_write_the_right_bytes_or_say_what_they_lack(run: Main) -> None:
    document = run("--only", "raw", "--only", "model", "--only", "async")
    rows = document["rows"]
    assert {row["kind"] for row in rows} == {"raw", "model", "async"}
    taking_part = [row for row in rows if row["absent"] is None and "direct" not in row["name"]]
    assert [row["error"] for row in taking_part] == [None] * len(taking_part)
    assert all(row["compared"] for row in taking_part)
    assert all("KvikIO" in r["name"] or "has no" in r["absent"] for r in rows if r["absent"])
    assert {"ndarray.tofile", "safetensors save_file"} <= {row["name"] for row in taking_part}


def test_every_write_is_compared_and_timed_until_the_call_and_until_fsync(
    document: dict[str, Any],
) -> None:
    rows = rows_named(document, "own")
    assert {(row["kind"], row["place"]) for row in rows} == {
        ("raw", "tmpfs"), ("raw", "disk"), ("model", "tmpfs"),
    }  # fmt: skip
    assert all(row["compared"] and len(row["readings"]) == 2 for row in rows)
    readings = [reading for row in rows for reading in row["readings"]]
    assert all(0 < r["seconds"] <= r["synced_seconds"] for r in readings)
    assert all(0 < row["synced_gb_per_s"] <= row["gb_per_s_max"] for row in rows)


def test_places_have_sizes_of_their_own(document: dict[str, Any]) -> None:
    sizes = {row["place"]: row["nbytes"] for row in document["rows"] if row["kind"] == "raw"}
    assert sizes == {"tmpfs": 1 << 20, "disk": 1 << 18}


@pytest.mark.parametrize(
    ("name", "fault"),
    [("liar", "wrong bytes"), ("litterer", "left.tmp was left"), ("raiser", "cannot write <dir>")],
)
def test_contestant_at_fault_is_a_row_that_says_so(
    document: dict[str, Any], name: str, fault: str
) -> None:
    rows = rows_named(document, name)
    assert {row["kind"] for row in rows} == {"raw", "model"}
    assert all(
        fault in row["error"] and not row["compared"] for row in rows if row["place"] == "disk"
    )
    assert all(row["error"] and not row["compared"] for row in rows)


def test_contestant_whose_function_is_missing_is_absent_with_the_reason(
    document: dict[str, Any],
) -> None:
    rows = rows_named(document, "ghost")
    assert len(rows) == 3
    assert {row["absent"] for row in rows} == {"json has no JSONDecoder.no_such"}


def test_file_of_another_layout_is_compared_tensor_by_tensor(document: dict[str, Any]) -> None:
    (shuffler,), (strict,) = rows_named(document, "shuffler"), rows_named(document, "strict")
    assert shuffler["compared"]
    assert "the file has" in strict["error"]


def test_save_that_takes_no_snapshot_is_caught(document: dict[str, Any]) -> None:
    (copier,), (hasty,) = rows_named(document, "copier"), rows_named(document, "hasty")
    assert copier["compared"]
    assert 0 < copier["free_s"] <= max(copier["seconds"])
    assert "wrong bytes" in hasty["error"]


def test_json_file_holds_the_document_and_prints_its_tables(
    run: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "result.json"
    document = run("--json", str(path), contestants=STAND_INS)
    written = json.loads(path.read_text())
    assert written["rows"] == document["rows"]
    assert written["finished"] is True
    assert str(tmp_path) not in path.read_text()
    capsys.readouterr()
    print_tables([str(path)])
    assert capsys.readouterr().out == render_document(document) + "\n"


def test_tables_show_every_state_of_a_row(document: dict[str, Any]) -> None:
    text = render_document(document)
    assert "| liar | failed | failed |" in text
    assert "| ghost | absent | absent |" in text
    assert "ghost: absent: json has no JSONDecoder.no_such (tmpfs, disk)" in text
    assert "snapshot: cpu, 12.3 ms" in text
    assert "until fsync returned" in text


def test_nothing_is_left(run: Main, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("headrace-bench-*"))
    run("--only", "raw", contestants=STAND_INS)
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/dev/shm").glob("headrace-bench-*")) <= before


def test_failure_of_the_default_call_is_a_failure_of_the_run(run: Main) -> None:
    def broken(memory: Memory, source: Any) -> Sequence[Writer]:
        return [Raiser("broken", (), Role.OURS)]

    failures = find_failures(run("--only", "raw", contestants=Contestants(raw=broken)))
    assert len(failures) == 2
    assert "cannot write" in failures[0]


def test_no_round_starts_when_the_time_is_over(run: Main) -> None:
    document = run("--only", "raw", "--deadline-s", "0", contestants=STAND_INS)
    own = rows_named(document, "own")
    assert all("the time for the whole run was over" in row["note"] for row in own)
    assert not any(row["compared"] or row["readings"] for row in own)


def test_reads_in_stream_order_are_absent_without_a_gpu(run: Main) -> None:
    rows = run("--only", "stream")["rows"]
    assert len(rows) == 2
    assert all("a stream is a GPU's" in row["absent"] for row in rows)


def test_gpu_run_defaults_to_the_sizes_of_the_targets() -> None:
    settings = parse_settings(["--device", "cuda"])
    assert (settings.raw_nbytes, settings.model_nbytes) == (4 << 30, 7_850_000_000)
    assert settings.stream_nbytes == 1 << 30
    assert settings.zram == "/dev/zram0"
    assert settings.sections == ("raw", "model", "async", "stream")
    assert settings.deadline_s < 300
    assert "stream" not in parse_settings(["--device", "cpu"]).sections


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_names_of_contestants_are_unique(framework: str) -> None:
    from benchmarks.memory import NumpyMemory

    memory = NumpyMemory()
    memory.framework = framework
    for contestants in (raw_writers(memory, np.zeros(1, np.uint8)), model_writers(memory)):
        names = [contestant.name for contestant in contestants]
        assert len(set(names)) == len(names)


@pytest.mark.gpu
@pytest.mark.slow
def test_quick_run_from_the_gpu_ends_well(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.save", "--quick", "--device", "cuda"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--json", str(path)],
        capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    ours = [row for row in document["rows"] if row["role"] == Role.OURS]
    assert {row["kind"] for row in ours} == {"raw", "model", "async", "stream"}
    assert all(row["compared"] for row in ours)
    assert all(found["error"] is None for found in document["host_memory"])
    assert document["targets"]

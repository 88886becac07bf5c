from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import demo as command
from headrace.cli.demo_bench import Row
from headrace.cli.main import app
from headrace.cli.target import Target
from headrace.errors import HeadraceError
from headrace.probing.fact import Fact

METHODS = {"headrace auto", "headrace host", "safetensors load_file", "np.fromfile"}


def demo(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["demo", "--size", "8MiB", "--repeat", "1", "--dir", str(folder), *arguments]
    )


def assert_fails_in_one_line(result: Result, *expected: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert all(text in result.stderr for text in expected), result.stderr


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = demo(tmp_path_factory.mktemp("demo"), "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_json_has_every_method_in_both_states(document: dict[str, Any]) -> None:
    assert document["schema"] == 1
    assert document["device"] == "cpu"
    for state in ("resident", "cold"):
        assert {r["method"] for r in document["rows"] if r["state"] == state} >= METHODS
    refused = {each["route"] for each in document["unavailable"]}
    served = {row["route"] for row in document["rows"]}
    assert served | refused == {None, "auto", "host", "direct"}


def test_every_row_was_right_and_has_a_figure_or_a_reason(document: dict[str, Any]) -> None:
    assert document["matches"]
    for row in document["rows"]:
        assert row["matches"]
        assert row["why"]
        assert row["gb_per_s"] or row["why"].startswith("no cold figure")
        if row["state"] == "resident":
            assert row["gb_per_s"] > 0
            assert row["cpu_s_per_gb"] > 0


def test_the_routes_of_headrace_come_from_its_reports(document: dict[str, Any]) -> None:
    rows = [row for row in document["rows"] if row["gb_per_s"]]
    forced = [row for row in rows if row["route"] not in (None, "auto")]
    assert forced
    assert all(row["observed"] == [row["route"]] for row in forced)
    assert all(row["observed"] for row in rows if row["route"] == "auto")
    assert all(not row["observed"] for row in rows if row["route"] is None)


def test_the_verdict_is_a_sentence_for_each_state(document: dict[str, Any]) -> None:
    assert len(document["verdict"]) == 2
    auto = next(row for row in document["rows"] if row["route"] == "auto")
    assert f"{auto['gb_per_s']:.2f} GB/s" in document["verdict"][0]


def test_the_gpu_fact_is_told(document: dict[str, Any]) -> None:
    assert document["gpu"]["name"] == "CUDA device"
    assert document["gpu"]["why"]


def test_the_table_is_one_with_its_headings_and_the_folder_is_empty_again(tmp_path: Path) -> None:
    result = demo(tmp_path, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for heading in ("method", "state", "GB/s", "CPU s/GB", "route", "why"):
        assert result.stdout.count(heading) >= 1
    assert all(result.stdout.count(method) >= 2 for method in METHODS)
    assert "In the page cache: headrace (host: " in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_the_demo_says_so_and_why(tmp_path: Path) -> None:
    result = demo(tmp_path, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    if found["device"] != "cpu":
        pytest.skip("there is a GPU here")
    assert found["notes"][0].startswith("No GPU can be used here")
    assert found["gpu"]["why"] in found["notes"][0] or "is not installed" in found["notes"][0]


def test_tmpfs_is_told_and_has_no_cold_figure() -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    result = demo(shm, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    if found["file_system"] != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")
    assert "on tmpfs, which keeps its files in memory" in found["notes"][-1]
    cold = [row for row in found["rows"] if row["state"] == "cold"]
    assert cold
    assert all(row["gb_per_s"] is None and "no cold figure" in row["why"] for row in cold)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "absent"
    assert_fails_in_one_line(demo(folder, "--device", "cpu"), str(folder), "No such file")


def test_too_little_disk_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    result = demo(tmp_path, "--device", "cpu", "--size", "900T")
    assert_fails_in_one_line(result, "are free", "--dir", "--size")
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    place = command.Place(str(tmp_path), "ext4")
    command.check_room(1000, place, 3000)
    with pytest.raises(OSError, match=r"needs 3 kB of memory, and 3 kB are available.*--size"):
        command.check_room(1000, place, 2999)
    with pytest.raises(OSError, match="needs 4 kB of memory"):
        command.check_room(1000, replace(place, file_system="tmpfs"), 3999)
    command.check_room(1000, place, None)


def test_a_gpu_that_does_not_exist_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    assert_fails_in_one_line(demo(tmp_path, "--device", "cuda:99"), "cuda:99")
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_are_a_failure(document: dict[str, Any]) -> None:
    row = Row("fake load", "", "resident", 1.0, 1.0, (), None, "how", matches=False)
    result = command.DemoResult(
        target=Target("cpu", "numpy", ""),
        gpu=Fact("CUDA device", False, "none", "why"),
        place=command.Place("/tmp", "ext4"),
        nbytes=1,
        tensors=1,
        repeat=1,
        rows=(row,),
        unavailable=(),
        notes=(),
        verdict=(),
    )
    assert not result.to_dict()["matches"]
    with pytest.raises(HeadraceError, match="wrong bytes from fake load"):
        command.require_right_bytes(result)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_an_interrupted_demo_cleans_up_without_a_traceback(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "demo", "--size", "8MiB", "--dir", str(tmp_path),
         "--device", "cpu", "--repeat", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell in the background starts its children with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        wait_for_file(tmp_path, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def wait_for_file(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the demo is in the middle of its loads."""
    deadline = time.monotonic() + 60
    while not list(folder.glob("headrace-demo-*/*.safetensors")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)


@pytest.mark.gpu
def test_the_demo_loads_to_a_gpu(tmp_path: Path) -> None:
    result = demo(tmp_path, "--device", "cuda:0", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["device"] == "cuda:0"
    assert {"auto", "cached"} <= {row["route"] for row in found["rows"]}
    assert list(tmp_path.iterdir()) == []

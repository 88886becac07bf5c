from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import doctor as command
from headrace.cli.main import app
from headrace.diagnosis import Diagnosis
from headrace.probing.fact import Fact
from headrace.probing.verdict import RouteVerdict
from headrace.types import Route


def doctor(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def fake(monkeypatch: pytest.MonkeyPatch, available: dict[Route, bool | None], gpu: bool) -> None:
    facts = (Fact("CUDA device", gpu, "made up", "made up"),)
    routes = tuple(RouteVerdict(route, available.get(route, False), "made up") for route in Route)
    monkeypatch.setattr(command, "collect", lambda request: Diagnosis(facts, routes))


@pytest.mark.parametrize(
    ("available", "gpu", "status"),
    [
        ({Route.HOST: True}, False, 0),
        ({Route.HOST: True, Route.DIRECT: True}, True, 1),
        ({Route.HOST: True, Route.CACHED: True}, True, 0),
        ({Route.HOST: True, Route.GDS: None}, True, 1),
        ({Route.HOST: True, Route.MAPPED: True}, True, 0),
        ({}, False, 1),
        ({Route.HOST: None}, False, 1),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_status_is_0_when_a_route_to_the_gpu_works_or_host_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
    available: dict[Route, bool | None],
    gpu: bool,
    status: int,
    as_json: bool,
) -> None:
    fake(monkeypatch, available, gpu)
    result = doctor("--json") if as_json else doctor()
    assert result.exit_code == status
    assert result.stderr == ""
    assert "made up" in result.stdout


def test_json_is_one_document(tmp_path: Path) -> None:
    document = json.loads(doctor(tmp_path, "--json").stdout)
    assert set(document) == {"facts", "routes"}
    assert [route["route"] for route in document["routes"]] == [str(route) for route in Route]


def test_tables_name_routes_and_facts(tmp_path: Path) -> None:
    output = doctor(tmp_path).stdout
    for text in ("host", "gds", "nvidia-fs", "libcufile", "udev", "P2PDMA: kernel version"):
        assert text in output


def test_missing_path_is_one_line_and_status_1(tmp_path: Path) -> None:
    result = doctor(tmp_path / "absent")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "No such file" in result.stderr


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = doctor(tmp_path / "pipe")
    assert result.exit_code == 1
    assert "not a regular file" in result.stderr


def test_named_cufile_json_is_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cufile.json"
    path.write_text('{\n"properties": {,}\n}')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(path))
    facts = json.loads(doctor("--json").stdout)["facts"]
    (fact,) = (each for each in facts if each["name"] == "cufile.json")
    assert fact["holds"] is False
    assert "line 2" in fact["found"]
    assert str(path) in fact["remedy"]


def test_it_answers_in_five_seconds_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    folder.chmod(0o555)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "headrace", "doctor", ".", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    seconds = time.perf_counter() - began
    document = json.loads(done.stdout)
    assert done.stderr == ""
    assert list(folder.iterdir()) == []
    (gpu,) = (fact for fact in document["facts"] if fact["name"] == "CUDA device")
    assert gpu["holds"] or seconds < 5


@pytest.mark.root
def test_without_root_it_works_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_mode & 0o5 != 0o5:
            pytest.skip(f"{folder} is closed to others")
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "doctor", "/", "--json"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        user=65_534,
        group=65_534,
        extra_groups=[],
    )
    if "Permission denied" in done.stderr or "No module named" in done.stderr:
        pytest.skip(f"the interpreter is closed to others: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["routes"]

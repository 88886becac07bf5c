from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from headrace.cli.main import app


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"weight": np.ones((3, 4), np.float32), "bias[red]": np.ones(3, np.float16)}, path)
    return path


def explain(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def explain_json(*arguments: str | Path) -> dict[str, Any]:
    result = explain(*arguments, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def assert_fails_in_one_line(result: Result, *expected: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert all(text in result.stderr for text in expected), result.stderr


def test_json_is_one_document_with_every_key(model: Path) -> None:
    document = explain_json(model)
    assert set(document) == {"source", "device", "tensors", "planned", "rejected", "facts"}
    assert {tensor["name"] for tensor in document["tensors"]} == {"weight", "bias[red]"}
    assert sum(part["nbytes"] for part in document["planned"]) == 54
    assert {"cached", "mapped", "gds"} <= {each["route"] for each in document["rejected"]}
    assert all(fact["why"] for fact in document["facts"])


def test_the_tables_have_the_plan_the_rejections_and_the_facts(model: Path) -> None:
    result = explain(model, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{model} -> cpu  2 tensors, 54 B")
    for text in ("planned", "host", "rejected", "direct", "O_DIRECT", "resident"):
        assert text in result.stdout
    assert "bias" not in result.stdout


def test_tensors_are_listed_when_asked_for_with_their_names_as_they_are(model: Path) -> None:
    result = explain(model, "--device", "cpu", "--tensors")
    assert "bias[red]" in result.stdout
    assert "3x4" in result.stdout
    assert "F16" in result.stdout


def test_no_payload_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.npy"
    np.save(path, np.zeros(0, np.uint8))
    header = path.read_bytes().replace(b"(0,)", b"(%d,)" % (1 << 40))
    path.write_bytes(header)
    os.truncate(path, len(header) + (1 << 40))  # a terabyte of hole: reading it would not end
    document = explain_json(path)
    assert document["tensors"][0]["nbytes"] == 1 << 40


def test_a_forced_route_is_the_one_planned(model: Path) -> None:
    document = explain_json(model, "--route", "host")
    assert [part["route"] for part in document["planned"]] == ["host"]


def test_a_forced_route_that_cannot_serve_lists_the_reasons(model: Path) -> None:
    result = explain(model, "--device", "cpu", "--route", "cached")
    assert_fails_in_one_line(result, "route 'cached' cannot serve", "; others: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent.safetensors"
    assert_fails_in_one_line(explain(path, "--device", "cpu"), str(path), "No such file")


def test_a_directory_without_safetensors_is_named(tmp_path: Path) -> None:
    assert_fails_in_one_line(explain(tmp_path, "--device", "cpu"), str(tmp_path))


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\xff" * 64)
    assert_fails_in_one_line(explain(path, "--device", "cpu"), str(path))


def test_without_a_device_the_plan_is_that_of_load(model: Path) -> None:
    runner = CliRunner()
    explained = json.loads(runner.invoke(app, ["explain", str(model), "--json"]).stdout)
    loaded = json.loads(runner.invoke(app, ["load", str(model), "--json"]).stdout)
    assert explained["device"] == loaded["device"]
    routes = [part["route"] for part in explained["planned"]]
    assert routes == [part["route"] for part in loaded["planned"]]


def test_names_choose_tensors_as_they_do_for_a_load(model: Path) -> None:
    document = explain_json(model, "--names", "bias*")
    assert [tensor["name"] for tensor in document["tensors"]] == ["bias[red]"]
    assert sum(part["nbytes"] for part in document["planned"]) == 6


def test_name_that_matches_nothing_is_told_in_one_line(model: Path) -> None:
    assert_fails_in_one_line(explain(model, "--names", "nothing*"), "nothing*", "weight")


def test_names_with_raw_bytes_are_refused_as_by_a_load(model: Path) -> None:
    result = explain(model, "--raw", "--names", "weight")
    assert_fails_in_one_line(result, "safetensors sources only")

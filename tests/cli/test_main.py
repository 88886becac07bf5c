from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from headrace.cli.main import app

COMMANDS = ("demo", "load", "convert", "save", "explain", "doctor")


def run_headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"weight": np.arange(12, dtype=np.float32)}, path)
    return path


def test_help_names_the_commands_and_no_other() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)
    assert not any(stub in result.stdout for stub in ("bench", "advise"))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_that_names_json_and_debug(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "--debug" in result.stdout


def test_no_command_is_wrong_usage() -> None:
    assert CliRunner().invoke(app, []).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["lode", "x"],
        ["load"],
        ["load", "x", "--no-such-option"],
        ["load", "x", "--device", "gpu7"],
        ["load", "x", "--device", "cuda:one"],
        ["load", "x", "--route", "fast"],
        ["load", "x", "--framework", "tensorflow"],
        ["load", "x", "--repeat", "0"],
        ["load", "x", "--workers", "0"],
        ["load", "x", "--block-size", "4KiBs"],
        ["load", "x", "--block-size", "1000"],
        ["load", "x", "--pinned", "1KiB"],
        ["load", "x", "--policy", "thrift"],
        ["load", "x", "--reuse", "never"],
        ["convert", "x"],
        ["convert", "x", "y", "--max-shard", "0"],
        ["convert", "x", "y", "--max-shard", "5 apples"],
        ["convert", "x", "y.safetensors", "--max-shard", "5GB"],
        ["convert", "x", "y", "--route", "fast"],
        ["save", "x", "y", "--block-size", "1000"],
        ["explain"],
        ["explain", "x", "y"],
        ["demo", "--size", "much"],
        ["demo", "--size", "1KiB"],
        ["demo", "--repeat", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_with_nothing_on_stdout(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_version_is_one_line() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("headrace ")
    assert len(result.stdout.splitlines()) == 1


def test_the_module_runs_as_the_command() -> None:
    done = run_headrace("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("headrace ")


def test_importing_the_command_line_brings_neither_rich_nor_a_framework() -> None:
    code = (
        "import sys, headrace.cli.main\n"
        "raise SystemExit(' '.join({'rich', 'torch', 'cupy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback_wherever_it_stands(before: bool, tmp_path: Path) -> None:
    command = ["load", str(tmp_path / "absent.safetensors")]
    arguments = ["--debug", *command] if before else [*command, "--debug"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "absent.safetensors" in result.stderr.splitlines()[-1]


def test_debug_logs_the_line_of_the_report(model: Path) -> None:
    result = CliRunner().invoke(app, ["load", str(model), "--device", "cpu", "--debug", "--json"])
    assert result.exit_code == 0
    assert f"{model} -> cpu" in result.stderr


def test_a_closed_pipe_ends_the_command_without_a_traceback(model: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "explain", str(model), "--device", "cpu"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        restore_signals=False,
        preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN),
    )
    os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_file_name_that_is_not_utf8_can_be_shown(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.safetensors"
    save_file({"weight": np.zeros(2, np.float32)}, tmp_path / "plain.safetensors")
    os.rename(tmp_path / "plain.safetensors", path)
    done = run_headrace("load", os.fsdecode(path), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "-> cpu" in done.stdout


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["tables", "json"])
def test_output_that_finds_no_room_is_not_taken_for_a_failed_command(
    model: Path, options: tuple[str, ...]
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headrace", "load", str(model), "--device", "cpu", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "headrace: standard output: No space left on device\n"

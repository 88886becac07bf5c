from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from headrace.cli import convert as command
from headrace.cli.failure import report_failure
from headrace.cli.main import app
from headrace.formats.safetensors import read_catalog
from tests.cli.test_load import REPORT_KEYS
from tests.support import shard, write_safetensors

KEYS = {
    "schema", "source", "target", "files", "tensors", "nbytes", "seconds", "gb_per_s", "aligned",
    "checksums", "notes", "read", "write",
}  # fmt: skip
TENSORS: dict[str, Any] = {
    "layers.0.weight": np.arange(2048, dtype=np.float32).reshape(4, 512),
    "norm": np.ones(5, np.float16),
}
NBYTES = 8192 + 10
PACKED = {
    "packed": ("F4", (3, 4), bytes(range(6))),
    "eight": ("F8_E4M3", (5,), bytes(range(250, 255))),
    "brain": ("BF16", (2, 2), bytes(range(8))),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    return path


def convert(*arguments: str | Path, name: str = "convert") -> Result:
    return CliRunner().invoke(app, [name, *map(str, arguments)])


def convert_json(*arguments: str | Path) -> Any:
    result = convert(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def assert_fails_in_one_line(result: Result, *expected: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("headrace: ")
    assert all(text in result.stderr for text in expected), result.stderr


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return set(found) == set(wanted) and all(
        found[name].dtype == array.dtype and np.array_equal(found[name], array)
        for name, array in wanted.items()
    )


def load_all(directory: Path) -> dict[str, np.ndarray]:
    return {
        name: array
        for path in sorted(directory.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


@pytest.mark.parametrize("name", ["convert", "save"])
def test_both_names_copy_a_file_aligned(name: str, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "new.safetensors"
    result = convert(model, target, name=name)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{model} -> {target}  2 tensors, 8.2 kB in ")
    assert "1 file, aligned" in result.stdout
    for part in (f"{model} -> cpu", f"cpu -> {target}", "planned", "observed", "stages"):
        assert part in result.stdout
    assert result.stderr == ""
    assert same(load_file(target), TENSORS)
    assert read_catalog(str(target)).tensors[0].file_range.start % 4096 == 0


def test_the_document_has_a_report_of_each_way(model: Path, tmp_path: Path) -> None:
    document = convert_json(model, tmp_path / "new.safetensors", "--verify")
    assert set(document) == KEYS
    assert set(document["read"]) == set(document["write"]) == REPORT_KEYS
    assert (document["schema"], document["tensors"], document["nbytes"]) == (1, 2, NBYTES)
    assert document["files"] == [str(tmp_path / "new.safetensors")]
    assert document["read"]["verified_nbytes"] == 0
    assert document["write"]["durable"] is True
    assert (document["aligned"], document["checksums"], document["notes"]) == (True, False, [])


def test_a_checkpoint_becomes_one_file_and_a_file_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    index = shard(tmp_path / "old", TENSORS, save_file)
    for source in (tmp_path / "old", index):
        assert convert(source, tmp_path / "one.safetensors").exit_code == 0
        assert same(load_file(tmp_path / "one.safetensors"), TENSORS)
    document = convert_json(tmp_path / "one.safetensors", tmp_path / "new", "--max-shard", "8KiB")
    assert len(document["files"]) == 2
    assert same(load_all(tmp_path / "new"), TENSORS)
    assert (tmp_path / "new" / "model.safetensors.index.json").exists()


def test_arrays_of_numpy_come_out_of_an_archive(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "arrays.npz", **TENSORS)
    document = convert_json(tmp_path / "arrays.npz", tmp_path / "new.safetensors")
    assert document["read"] is None
    assert same(load_file(tmp_path / "new.safetensors"), TENSORS)


def test_types_that_numpy_lacks_keep_their_bits(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "packed.safetensors", PACKED)
    assert convert(tmp_path / "packed.safetensors", tmp_path / "new.safetensors").exit_code == 0
    whole = (tmp_path / "new.safetensors").read_bytes()
    found = {
        spec.name: (spec.dtype, spec.shape, whole[spec.file_range.start : spec.file_range.stop])
        for spec in read_catalog(str(tmp_path / "new.safetensors")).tensors
    }
    assert found == PACKED


def test_checksums_that_were_stored_can_be_verified(model: Path, tmp_path: Path) -> None:
    checked, copy = tmp_path / "checked.safetensors", tmp_path / "copy.safetensors"
    assert convert_json(model, checked, "--checksum")["checksums"] is True
    assert convert_json(checked, copy, "--verify")["read"]["verified_nbytes"] == NBYTES
    whole = bytearray(checked.read_bytes())
    whole[-1] ^= 1
    checked.write_bytes(whole)
    before = copy.read_bytes()
    for option in ("--verify", "--checksum"):
        assert_fails_in_one_line(convert(checked, copy, option), str(checked), "'norm'")
    assert copy.read_bytes() == before


def test_options_reach_the_conversion(model: Path, tmp_path: Path) -> None:
    document = convert_json(
        model, tmp_path / "new.safetensors", "--no-align", "--no-fsync", "--route", "host",
        "--workers", "2", "--block-size", "64KiB", "--policy", "cpu", "--reuse", "many", "--strict",
    )  # fmt: skip
    assert (tmp_path / "new.safetensors").read_bytes() == model.read_bytes()
    assert document["aligned"] is False
    assert document["write"]["durable"] is False
    assert document["read"]["observed"][0]["route"] == "host"


def test_notes_are_printed(model: Path, tmp_path: Path) -> None:
    result = convert(model, tmp_path / "new.safetensors", "--no-fsync")
    assert "Note: not synced to storage" in result.stdout


def test_help_says_that_save_is_convert_and_what_memory_it_takes() -> None:
    texts = {
        name: " ".join(convert("--help", name=name).stdout.split()) for name in ("convert", "save")
    }
    assert "headrace save is the same command" in texts["convert"]
    assert "1 GiB" in texts["convert"]
    assert "headrace convert" in texts["save"]
    commands = getattr(typer.main.get_command(app), "commands", {})
    options = [{p.name for p in commands[name].params} for name in ("convert", "save")]
    assert options[0] == options[1]


# bad input


def test_a_missing_source_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    for source in ("absent.safetensors", "absent.npz", "absent"):
        result = convert(tmp_path / source, tmp_path / "new")
        assert_fails_in_one_line(result, str(tmp_path / source), "No such file")
    assert os.listdir(tmp_path) == []


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "pickled.npz", bad=np.array([{}], dtype=object))
    result = convert(tmp_path / "pickled.npz", tmp_path / "new.safetensors")
    assert_fails_in_one_line(result, "pickled.npz", "'bad.npy'", "Python objects")
    assert os.listdir(tmp_path) == ["pickled.npz"]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.pt", b"PK\x03\x04" + b"\0" * 60, "starts like a zip archive"),
        ("model.gguf", b"GGUF" + b"\0" * 60, "GGUF"),
        ("array.npy", b"\x93NUMPY\x01\x00" + b"\0" * 60, "starts like a .npy file"),
        ("model.safetensors", b"", "0 bytes"),
        ("arrays.npz", b"no zip", "no valid .npz"),
    ],
)
def test_other_sources_are_said_to_be_what_they_are(
    name: str, content: bytes, why: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert_fails_in_one_line(convert(tmp_path / name, tmp_path / "new"), name, why)
    assert os.listdir(tmp_path) == [name]


def test_targets_that_cannot_be_are_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder.safetensors").mkdir()
    for target, named, why in (
        ("missing/new.safetensors", "missing", "No such file or directory"),
        ("file", "file", "is a directory"),
        ("file/new.safetensors", "file", "Not a directory"),
        ("folder.safetensors", "folder.safetensors", "is a directory"),
        ("new.npz", "new.npz", "only safetensors can be written"),
    ):
        assert_fails_in_one_line(convert(model, tmp_path / target), str(tmp_path / named), why)
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o500)
    for target in ("folder/new.safetensors", "folder/new", "folder"):
        result = convert(model, tmp_path / target)
        assert_fails_in_one_line(result, str(tmp_path / "folder"), "Permission denied")


@pytest.mark.parametrize("route", ["cached", "mapped", "gds"])
def test_routes_of_a_gpu_cannot_serve(route: str, model: Path, tmp_path: Path) -> None:
    result = convert(model, tmp_path / "new.safetensors", "--route", route)
    assert_fails_in_one_line(result, f"route '{route}' cannot serve")
    assert os.listdir(tmp_path) == [model.name]


def test_no_tensors_need_a_file(tmp_path: Path) -> None:
    save_file({}, tmp_path / "none.safetensors", {"a": "b"})
    assert_fails_in_one_line(convert(tmp_path / "none.safetensors", tmp_path / "new"), "no tensor")
    document = convert_json(tmp_path / "none.safetensors", tmp_path / "new.safetensors")
    assert (document["tensors"], document["nbytes"]) == (0, 0)
    assert read_catalog(str(tmp_path / "new.safetensors")).metadata == {"a": "b"}


def test_a_shard_does_not_replace_its_checkpoint(tmp_path: Path) -> None:
    shard(tmp_path, TENSORS, save_file)
    source = tmp_path / "model-00001-of-00002.safetensors"
    assert_fails_in_one_line(convert(source, tmp_path), "is a part of what", str(tmp_path))
    assert same(load_all(tmp_path), TENSORS)


# Ctrl-C and the bar


def test_the_meter_is_told_the_bytes_of_the_tensors(model: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    request = command.ConvertRequest(str(model), str(tmp_path / "new"))
    command.collect(request, lambda *numbers: told.append(numbers))
    assert told[0] == (str(model), 0, 0)
    assert told[-1] == (str(model), NBYTES, NBYTES)


def test_ctrl_c_keeps_the_old_target_and_is_status_130(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new.safetensors"
    target.write_bytes(b"what was there")

    def interrupt(text: str, moved_nbytes: int, total_nbytes: int) -> None:
        if moved_nbytes:
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as left, report_failure(debug=False):
        command.collect(command.ConvertRequest(str(model), str(target)), interrupt)
    assert left.value.exit_code == 130
    assert capsys.readouterr().err == "headrace: interrupted\n"
    assert target.read_bytes() == b"what was there"
    assert set(os.listdir(tmp_path)) == {model.name, target.name}


@pytest.mark.slow
def test_a_signal_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    source, target = tmp_path / "large.safetensors", tmp_path / "new"
    nbytes = 1 << 30
    header = json.dumps({"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    source.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    os.truncate(source, 8 + len(header) + nbytes)
    arguments = [str(source), str(target), "--workers", "1", "--block-size", "4KiB"]
    with subprocess.Popen(
        [sys.executable, "-m", "headrace", "convert", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell in the background starts its children with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        until = time.monotonic() + 60
        while not (target.is_dir() and os.listdir(target)) and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "headrace: interrupted\n")
    assert set(os.listdir(tmp_path)) == {source.name}

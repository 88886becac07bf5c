from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

import headrace.numpy as hn
from headrace.cli.load import select_names
from headrace.cli.main import app

REPORT_KEYS = {
    "schema", "source", "device", "nbytes", "seconds", "gb_per_s", "cpu_seconds", "planned",
    "observed", "rejected", "resident_nbytes", "stages", "pinned_nbytes", "mapped_nbytes",
    "operation", "durable", "snapshot", "verified_nbytes",
}  # fmt: skip
LAYER_NBYTES = 4 * 48


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    tensors = {f"layers.{i}.weight": rng.random((4, 12), np.float32) for i in range(3)}
    save_file({**tensors, "norm": np.ones(5, np.float32)}, path)
    return path


@pytest.fixture
def array(tmp_path: Path) -> Path:
    path = tmp_path / "array.npy"
    np.save(path, np.arange(1000, dtype=np.int16))
    return path


def load(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["load", *map(str, arguments)])


def load_json(*arguments: str | Path) -> Any:
    result = load(*arguments, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def assert_fails_in_one_line(result: Result, *expected: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("headrace: ")
    assert all(text in result.stderr for text in expected), result.stderr


def test_one_load_is_one_document_with_every_key_of_a_report(model: Path) -> None:
    document = load_json(model)
    assert set(document) == REPORT_KEYS
    assert document["schema"] == 1
    assert document["source"] == str(model)
    assert document["device"] == "cpu"
    assert document["nbytes"] == 3 * LAYER_NBYTES + 20
    assert sum(part["nbytes"] for part in document["observed"]) == document["nbytes"]


def test_the_default_prints_the_report_line_and_a_table(model: Path) -> None:
    result = load(model, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{model} -> cpu  596 B in ")
    for part in ("planned", "observed", "rejected", "stages", "CPU", "resident", "pinned"):
        assert part in result.stdout
    assert "the page cache holds these bytes" in result.stdout


def test_a_pipe_gets_no_progress_bar(model: Path) -> None:
    assert load(model, "--device", "cpu").stderr == ""


def test_without_a_device_something_usable_is_chosen(model: Path) -> None:
    result = load(model, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["device"] in ("cpu", "cuda", "cuda:0")


def test_repeats_and_several_sources_give_a_list_in_order(model: Path, array: Path) -> None:
    documents = load_json(model, array, "--repeat", "2")
    assert [d["source"] for d in documents] == [str(model)] * 2 + [str(array)] * 2


def test_a_directory_and_its_index_are_each_one_load(model: Path, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    names = [*(f"layers.{i}.weight" for i in range(3)), "norm"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, model.name)}))
    for source in (tmp_path, index):
        assert load_json(source)["nbytes"] == 3 * LAYER_NBYTES + 20


def test_an_npy_file_loads_its_array(array: Path) -> None:
    assert load_json(array)["nbytes"] == 2000


def test_raw_takes_any_file_as_its_bytes(model: Path, array: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.bin"
    plain.write_bytes(b"\x01" * 12345)
    for path in (plain, model, array):
        assert load_json(path, "--raw")["nbytes"] == path.stat().st_size


def test_verify_tells_how_many_bytes_had_a_right_checksum(model: Path, tmp_path: Path) -> None:
    assert load_json(model)["verified_nbytes"] is None
    assert load_json(model, "--verify")["verified_nbytes"] == 0
    checked = tmp_path / "checked.safetensors"
    hn.save_file(hn.load_file(model), checked, checksum=True)
    assert load_json(checked, "--verify")["verified_nbytes"] == 3 * LAYER_NBYTES + 20
    result = load(checked, "--device", "cpu", "--verify")
    assert "checksums right for 596 B" in result.stdout
    assert "verified" in result.stdout


def test_verify_names_the_tensor_whose_bytes_are_damaged(model: Path) -> None:
    hn.save_file(hn.load_file(model), model, checksum=True)
    whole = bytearray(model.read_bytes())
    whole[-1] ^= 1
    model.write_bytes(whole)
    assert load(model, "--device", "cpu").exit_code == 0
    assert_fails_in_one_line(load(model, "--device", "cpu", "--verify"), str(model), "'norm'")


def test_verify_does_not_go_with_plain_bytes(model: Path, array: Path) -> None:
    assert_fails_in_one_line(load(array, "--verify", "--device", "cpu"), "--verify")
    assert_fails_in_one_line(load(model, "--raw", "--verify", "--device", "cpu"), "--verify")


def test_names_choose_exactly_or_by_glob(model: Path) -> None:
    assert load_json(model, "--names", "norm")["nbytes"] == 20
    assert load_json(model, "--names", "layers.[01].*")["nbytes"] == 2 * LAYER_NBYTES
    both = load_json(model, "--names", "layers.2.weight", "--names", "n*")
    assert both["nbytes"] == LAYER_NBYTES + 20


def test_a_name_that_matches_nothing_is_an_error_that_shows_some_names(model: Path) -> None:
    result = load(model, "--names", "embed*", "--device", "cpu")
    assert_fails_in_one_line(result, "no tensor matches embed*", "it has 4", "layers.0.weight")


def test_names_do_not_go_with_arrays(array: Path) -> None:
    result = load(array, "--names", "x", "--device", "cpu")
    assert_fails_in_one_line(result, "--names")


def test_an_exact_name_with_glob_characters_is_found() -> None:
    assert select_names("m", ["a[0]"], ["a[0]", "a0"]) == ["a[0]", "a0"]
    assert select_names("m", ["a?", "*"], ["b", "a1"]) == ["b", "a1"]


@pytest.mark.parametrize("route", ["host", "direct"])
def test_a_forced_route_is_the_one_observed(route: str, model: Path) -> None:
    result = load(model, "--device", "cpu", "--route", route, "--json")
    if result.exit_code:  # a file system without O_DIRECT
        assert_fails_in_one_line(result, "route 'direct' cannot serve")
        return
    assert [part["route"] for part in json.loads(result.stdout)["observed"]] == [route]


@pytest.mark.parametrize("route", ["cached", "mapped", "gds"])
def test_a_forced_route_that_cannot_serve_lists_the_reasons(route: str, model: Path) -> None:
    result = load(model, "--device", "cpu", "--route", route)
    assert_fails_in_one_line(result, f"route '{route}' cannot serve", "; others: ")


def test_transfer_options_are_accepted(model: Path) -> None:
    document = load_json(
        model, "--workers", "2", "--block-size", "64KiB", "--pinned", "1MiB",
        "--policy", "cpu", "--reuse", "once", "--strict",
    )  # fmt: skip
    assert document["nbytes"] == 3 * LAYER_NBYTES + 20


def test_torch_can_hold_the_arrays(model: Path) -> None:
    pytest.importorskip("torch")
    assert load_json(model, "--framework", "torch")["nbytes"] == 3 * LAYER_NBYTES + 20


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent.safetensors"
    assert_fails_in_one_line(load(path, "--device", "cpu"), str(path), "No such file")
    assert_fails_in_one_line(load(path, "--device", "cpu", "--raw"), str(path), "No such file")


def test_a_directory_without_safetensors_is_named(tmp_path: Path) -> None:
    assert_fails_in_one_line(load(tmp_path, "--device", "cpu"), str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"[:9]])
def test_a_malformed_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    assert_fails_in_one_line(load(path, "--device", "cpu"), str(path))


def test_a_truncated_file_is_named(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-7])
    assert_fails_in_one_line(load(model, "--device", "cpu"), str(model))


def test_a_malformed_npy_file_is_named(array: Path) -> None:
    array.write_bytes(array.read_bytes()[:100])
    assert_fails_in_one_line(load(array, "--device", "cpu"), str(array))


def test_numpy_on_a_gpu_is_an_error(model: Path) -> None:
    result = load(model, "--device", "cuda", "--framework", "numpy")
    assert_fails_in_one_line(result, "numpy cannot hold arrays on cuda")


def test_a_gpu_that_does_not_exist_is_an_error(model: Path) -> None:
    assert_fails_in_one_line(load(model, "--device", "cuda:99"), "cuda:99")


@pytest.mark.gpu
def test_a_gpu_receives_the_bytes(model: Path) -> None:
    result = load(model, "--device", "cuda:0", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["device"] == "cuda:0"
    assert document["nbytes"] == 3 * LAYER_NBYTES + 20

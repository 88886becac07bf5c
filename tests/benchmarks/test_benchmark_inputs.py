"""The inputs, the command line, and the comparison of results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from benchmarks.document import scrub
from benchmarks.files import copy_tree, fit_shape, write_model, write_raw
from benchmarks.memory import NumpyMemory
from benchmarks.places import PlaceError, Residency, disk_place, filesystem_of, same_files_cold
from benchmarks.result import Reading, Role, Row
from benchmarks.settings import parse_nbytes, parse_settings
from headrace.bindings.posix import PosixFiles


@pytest.mark.parametrize("nbytes", [700_000, 20_000_000, 7_850_000_000])
def test_model_comes_close_to_the_size_asked_for(nbytes: int) -> None:
    shapes = dict(fit_shape(nbytes).tensors())
    total = 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    assert total == pytest.approx(nbytes, rel=0.01)


def test_large_model_has_the_layers_of_a_decoder() -> None:
    shape = fit_shape(7_850_000_000)
    assert (shape.hidden, shape.intermediate, shape.key_value) == (4096, 14336, 1024)
    assert shape.layers == 17


def test_model_is_two_shards_with_a_full_index(tmp_path: Path) -> None:
    total = write_model(tmp_path / "model", 700_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    found: dict[str, Any] = {}
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "model" / name, framework="np") as shard:
            found |= dict.fromkeys(shard.keys(), name)
    assert found == index["weight_map"]
    assert len(set(found.values())) == 2
    assert index["metadata"]["total_size"] == total


def test_no_two_tensors_of_the_model_are_alike(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 700_000)
    tensors = NumpyMemory().load_reference(tmp_path / "model")
    assert len({tensor.tobytes() for tensor in tensors.values()}) == len(tensors)


def test_raw_file_has_its_size_and_no_repetition(tmp_path: Path) -> None:
    nbytes = (32 << 20) + 5
    write_raw(tmp_path / "raw", nbytes)
    data = np.fromfile(tmp_path / "raw", np.uint8)
    assert len(data) == nbytes
    assert data[: 16 << 20].tobytes() != data[16 << 20 : 32 << 20].tobytes()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("nbytes", [0, 5, 4096, (16 << 20) + 4097])
def test_copy_is_equal(tmp_path: Path, nbytes: int, direct: bool) -> None:
    if direct and filesystem_of(tmp_path)[0] not in ("ext4", "xfs", "btrfs"):
        pytest.skip("O_DIRECT may be refused here")
    write_raw(tmp_path / "a", nbytes)
    copy_tree(tmp_path / "a", tmp_path / "b", direct=direct)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_residency_brings_a_file_into_the_cache_and_out_of_it(tmp_path: Path) -> None:
    if filesystem_of(tmp_path)[0] not in ("ext4", "xfs", "btrfs"):
        pytest.skip("the page cache of this file system cannot be emptied")
    source, other = tmp_path / "a", tmp_path / "b"
    write_raw(other, 1 << 20)
    copy_tree(other, source)
    residency = Residency(PosixFiles())
    assert residency.prepare(source, cold=False) == 1 << 20
    assert residency.prepare(source, cold=True) == 0
    assert residency.prepare(source, cold=False) == 1 << 20


def test_tmpfs_has_no_cold_place(tmp_path: Path) -> None:
    place = disk_place(tmp_path)
    on_tmpfs = place.__class__("resident", tmp_path, "tmpfs", "tmpfs", cold=False)
    with pytest.raises(PlaceError, match="always resident"), same_files_cold(on_tmpfs):
        pass


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 << 30), ("7.85GB", 7_850_000_000), ("64 MiB", 64 << 20), ("4096", 4096)],
)
def test_sizes_are_read_with_their_units(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "8G", "-1", "1e9", "8 TiB"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_nbytes(text)


def test_gpu_run_defaults_to_the_sizes_of_the_targets() -> None:
    settings = parse_settings(["--device", "cuda"])
    assert (settings.raw_nbytes, settings.model_nbytes) == (8 << 30, 7_850_000_000)
    assert settings.zram == "/dev/zram0"
    assert settings.repeats == 5


def test_host_run_touches_no_block_device() -> None:
    assert parse_settings(["--device", "cpu"]).zram is None
    assert parse_settings(["--device", "cuda", "--zram", "none"]).zram is None


def test_directories_are_scrubbed_the_longest_first() -> None:
    text = scrub("/a/b/c and /a/b", {"/a/b": "<x>", "/a/b/c": "<y>"})
    assert text == "<y> and <x>"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"b": None}, "1 arrays are missing, 'b' first"),
        ({"c": np.zeros(1, np.uint8)}, "1 arrays are not in the source, 'c' first"),
        ({"a": np.zeros(3, np.int8)}, "'a' is int8 (3,) on cpu; it should be uint8 (3,) on cpu"),
        ({"a": np.zeros((3, 1), np.uint8)}, "'a' is uint8 (3, 1) on cpu"),
        ({"a": np.array([0, 0, 1], np.uint8)}, "'a' has wrong bytes"),
        ({}, None),
    ],
)
def test_every_difference_is_told(change: dict[str, Any], fault: str | None) -> None:
    wanted = {"a": np.zeros(3, np.uint8), "b": np.full(2, np.nan, np.float32)}
    found = {name: array for name, array in {**wanted, **change}.items() if array is not None}
    told = NumpyMemory().find_difference(found, wanted)
    assert told is None if fault is None else told is not None and told.startswith(fault)


def test_row_gives_median_extremes_and_cpu() -> None:
    readings = tuple(Reading(i, s, 0.5, 0, None) for i, s in enumerate((1.0, 2.0, 4.0), 1))
    row = Row("raw", "resident", "a", "", Role.PEER, None, 10**9, None, readings, True,
              None, None, None, ())  # fmt: skip
    told = row.to_dict()
    assert (told["gb_per_s"], told["gb_per_s_min"], told["gb_per_s_max"]) == (0.5, 0.25, 1.0)
    assert told["spread"] == pytest.approx(1.5)
    assert told["cpu_s_per_gb"] == pytest.approx(0.5)
    assert told["seconds"] == [1.0, 2.0, 4.0]

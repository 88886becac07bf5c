"""Targets: what a path means, and sources that are replaced by their own conversion."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.conversion.convert import convert
from headrace.conversion.outcome import Conversion
from headrace.saving import Manner
from tests.conversion.test_convert import SOME, read, write, write_shards
from tests.support import INDEX


@pytest.fixture
def context() -> Iterator[hr.Context]:
    with hr.Context() as made:
        yield made


def run(source: Path, target: Path, context: hr.Context) -> Conversion:
    return convert(source, target, manner=Manner(align=True), part_nbytes=5000, context=context)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if name.endswith(".safetensors")}


# in place


def test_a_file_can_be_converted_in_place(tmp_path: Path, context: hr.Context) -> None:
    path = tmp_path / "model.safetensors"
    wanted = write(path)
    before = path.read_bytes()
    run(path, path, context)
    assert read(path) == wanted
    assert path.read_bytes() != before
    assert os.listdir(tmp_path) == [path.name]


def test_a_link_to_the_source_is_followed(tmp_path: Path, context: hr.Context) -> None:
    path, link = tmp_path / "model.safetensors", tmp_path / "link.safetensors"
    wanted = write(path)
    link.symlink_to(path)
    done = run(path, link, context)
    assert done.files == (str(path),)
    assert link.is_symlink()
    assert read(path) == wanted


def test_a_directory_with_an_index_can_be_converted_in_place(
    tmp_path: Path, context: hr.Context
) -> None:
    wanted = write_shards(tmp_path / "model")
    old = shards(tmp_path / "model")
    done = run(tmp_path / "model", tmp_path / "model", context)
    assert read(tmp_path / "model") == wanted
    assert not old & shards(tmp_path / "model")
    assert done.notes == ()
    again = run(tmp_path / "model" / INDEX, tmp_path / "model", context)
    assert read(tmp_path / "model") == wanted
    assert shards(tmp_path / "model") == {os.path.basename(path) for path in again.files}


def test_files_without_an_index_stay_in_their_directory_and_are_named(
    tmp_path: Path, context: hr.Context
) -> None:
    wanted = write_shards(tmp_path / "model", index=False)
    old = shards(tmp_path / "model")
    done = run(tmp_path / "model", tmp_path / "model", context)
    assert read(tmp_path / "model") == wanted
    assert old < shards(tmp_path / "model")
    (note,) = done.notes
    assert all(name in note for name in old)


def test_a_single_file_that_stays_beside_the_new_index_is_named(
    tmp_path: Path, context: hr.Context
) -> None:
    wanted = write(tmp_path / "model.safetensors")
    done = run(tmp_path / "model.safetensors", tmp_path, context)
    assert read(tmp_path) == wanted
    (note,) = done.notes
    assert "model.safetensors," in note


def test_one_shard_can_be_converted_in_place(tmp_path: Path, context: hr.Context) -> None:
    wanted = write_shards(tmp_path / "model")
    part = tmp_path / "model" / "part-0.safetensors"
    run(part, part, context)
    assert read(tmp_path / "model") == wanted


def test_the_only_file_of_a_directory_can_be_the_target(
    tmp_path: Path, context: hr.Context
) -> None:
    wanted = write(tmp_path / "model.safetensors")
    run(tmp_path, tmp_path / "model.safetensors", context)
    assert read(tmp_path) == wanted


# what would destroy a part of the source


def refuses(source: Path, target: Path, why: str, folder: Path, context: hr.Context) -> None:
    before = snapshot(folder)
    with pytest.raises(ValueError, match=why):
        run(source, target, context)
    assert snapshot(folder) == before


@pytest.mark.parametrize("index", [True, False])
def test_a_checkpoint_cannot_be_written_into_one_of_its_shards(
    index: bool, tmp_path: Path, context: hr.Context
) -> None:
    write_shards(tmp_path / "model", index=index)
    target = tmp_path / "model" / "part-1.safetensors"
    refuses(tmp_path / "model", target, "one of the 2 files", tmp_path, context)
    (tmp_path / "link.safetensors").symlink_to(target)
    refuses(tmp_path / "model", tmp_path / "link.safetensors", "one of the 2", tmp_path, context)


@pytest.mark.parametrize("index", [True, False])
def test_one_shard_cannot_replace_the_checkpoint_that_it_is_of(
    index: bool, tmp_path: Path, context: hr.Context
) -> None:
    write_shards(tmp_path / "model", index=index)
    source = tmp_path / "model" / "part-0.safetensors"
    refuses(source, tmp_path / "model", "is a part of what", tmp_path, context)


def test_a_checkpoint_cannot_replace_another_one_that_an_index_beside_it_names(
    tmp_path: Path, context: hr.Context
) -> None:
    write_shards(tmp_path / "model")
    write(tmp_path / "model" / "other.safetensors", SOME[:1])
    source = tmp_path / "model" / "other.safetensors"
    refuses(source, tmp_path / "model", "is a part of what", tmp_path, context)


def test_a_new_file_must_not_join_the_files_of_its_source(
    tmp_path: Path, context: hr.Context
) -> None:
    write_shards(tmp_path / "model", index=False)
    target = tmp_path / "model" / "all.safetensors"
    refuses(tmp_path / "model", target, "has no index", tmp_path, context)
    write_shards(tmp_path / "model")
    run(tmp_path / "model", target, context)
    assert read(tmp_path / "model") == read(target)


# what a target is not


def test_another_checkpoint_in_the_target_is_replaced(tmp_path: Path, context: hr.Context) -> None:
    wanted = write(tmp_path / "old.safetensors")
    write_shards(tmp_path / "model", SOME[:2])
    run(tmp_path / "old.safetensors", tmp_path / "model", context)
    assert read(tmp_path / "model") == wanted


@pytest.mark.parametrize("name", ["new.npz", "new.bin", "new.PT", "new.safetensor", "new.json"])
def test_endings_of_other_formats_are_no_directories(
    name: str, tmp_path: Path, context: hr.Context
) -> None:
    write(tmp_path / "old.safetensors")
    refuses(tmp_path / "old.safetensors", tmp_path / name, "only safetensors", tmp_path, context)
    assert os.listdir(tmp_path) == ["old.safetensors"]
    (tmp_path / name).mkdir()
    run(tmp_path / "old.safetensors", tmp_path / name, context)


def test_a_name_with_a_dot_is_a_directory(tmp_path: Path, context: hr.Context) -> None:
    wanted = write(tmp_path / "old.safetensors")
    run(tmp_path / "old.safetensors", tmp_path / "a" / "model-3.1", context)
    assert read(tmp_path / "a" / "model-3.1") == wanted


def test_files_and_directories_are_not_taken_for_each_other(
    tmp_path: Path, context: hr.Context
) -> None:
    source = tmp_path / "old.safetensors"
    write(source)
    shutil.copy(source, tmp_path / "file")
    (tmp_path / "folder.safetensors").mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(NotADirectoryError, match="file"):
        run(source, tmp_path / "file", context)
    with pytest.raises(IsADirectoryError, match="folder"):
        run(source, tmp_path / "folder.safetensors", context)
    assert snapshot(tmp_path) == before


def test_a_file_in_a_missing_folder_is_a_file_not_found_error(
    tmp_path: Path, context: hr.Context
) -> None:
    write(tmp_path / "old.safetensors")
    with pytest.raises(FileNotFoundError, match="missing"):
        run(tmp_path / "old.safetensors", tmp_path / "missing" / "new.safetensors", context)


def test_no_tensor_needs_no_directory(tmp_path: Path, context: hr.Context) -> None:
    write(tmp_path / "old.safetensors", [], {"a": "b"})
    refuses(tmp_path / "old.safetensors", tmp_path / "new", "no tensor", tmp_path, context)
    done = run(tmp_path / "old.safetensors", tmp_path / "new.safetensors", context)
    assert (done.tensors, done.nbytes, read(tmp_path / "new.safetensors")) == (0, 0, {})

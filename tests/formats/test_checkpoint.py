from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.errors import FormatError
from headrace.formats.checkpoint import find_files, read_checkpoint

INDEX = "model.safetensors.index.json"


def save(path: Path, *names: str) -> Path:
    save_file({name: np.arange(3, dtype=np.float32) for name in names}, path)
    return path


def write_index(path: Path, weight_map: object, **more: object) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}))
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A directory with two shards, an index, and what else lies around in such directories."""
    save(tmp_path / "model-00002-of-00002.safetensors", "c")
    save(tmp_path / "model-00001-of-00002.safetensors", "a", "b")
    save(tmp_path / "consolidated.safetensors", "a", "b", "c")
    (tmp_path / "config.json").write_text("{}")
    write_index(
        tmp_path / INDEX,
        {
            "c": "model-00002-of-00002.safetensors",
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
        },
    )
    return tmp_path


def names_of(source: Any) -> list[list[str]]:
    return [[spec.name for spec in catalog.tensors] for catalog in read_checkpoint(source)]


@pytest.mark.parametrize("as_text", [True, False])
def test_single_file_is_a_checkpoint(tmp_path: Path, as_text: bool) -> None:
    path = save(tmp_path / "one.safetensors", "a")
    source = str(path) if as_text else path
    assert find_files(source) == (str(path),)
    assert names_of(source) == [["a"]]


def test_index_and_its_directory_give_the_shards_sorted(sharded: Path) -> None:
    wanted = tuple(str(sharded / f"model-0000{i}-of-00002.safetensors") for i in (1, 2))
    assert find_files(sharded) == wanted
    assert find_files(sharded / INDEX) == wanted
    assert find_files(str(sharded)) == wanted
    assert names_of(sharded) == names_of(sharded / INDEX) == [["a", "b"], ["c"]]


def test_catalogs_of_a_checkpoint_equal_the_official_loader(sharded: Path) -> None:
    for catalog in read_checkpoint(sharded):
        official = load_file(catalog.path)
        content = Path(catalog.path).read_bytes()
        for spec in catalog.tensors:
            stored = content[spec.file_range.start : spec.file_range.stop]
            assert stored == official[spec.name].tobytes()


def test_relative_index_in_the_working_directory_is_found(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sharded)
    assert names_of(INDEX) == [["a", "b"], ["c"]]
    assert names_of(".") == [["a", "b"], ["c"]]


def test_directory_takes_its_only_index_of_another_name(tmp_path: Path) -> None:
    save(tmp_path / "diffusion-1.safetensors", "a")
    save(tmp_path / "unrelated.safetensors", "z")
    write_index(tmp_path / "diffusion.safetensors.index.json", {"a": "diffusion-1.safetensors"})
    assert names_of(tmp_path) == [["a"]]


def test_directory_prefers_the_index_of_the_usual_name(sharded: Path) -> None:
    write_index(sharded / "other.safetensors.index.json", {"a": "consolidated.safetensors"})
    assert names_of(sharded) == [["a", "b"], ["c"]]


def test_several_indexes_are_a_format_error_that_names_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_index(tmp_path / f"{name}.safetensors.index.json", {"a": "x.safetensors"})
    with pytest.raises(FormatError, match=r"one\.safetensors.*two\.safetensors"):
        find_files(tmp_path)


def test_directory_without_index_gives_all_files_sorted(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        save(tmp_path / f"{name}.safetensors", name)
    save(tmp_path / ".hidden.safetensors", "hidden")
    (tmp_path / "directory.safetensors").mkdir()
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    assert [Path(path).name for path in find_files(tmp_path)] == [
        "a.safetensors",
        "b.safetensors",
        "c.safetensors",
    ]
    assert names_of(tmp_path) == [["a"], ["b"], ["c"]]


def test_directory_of_links_as_the_hub_cache_has_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save(tmp_path / "blobs" / "0123", "a")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert names_of(tmp_path / "snapshot") == [["a"]]


def test_broken_link_in_a_directory_is_not_skipped(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", "a")
    (tmp_path / "b.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"):
        read_checkpoint(tmp_path)


def test_directory_without_a_checkpoint_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(FileNotFoundError) as caught:
        find_files(tmp_path)
    for word in (INDEX, "*.safetensors", "1 files", str(tmp_path)):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["missing", "missing.safetensors", "missing.index.json"])
def test_missing_source_is_a_file_not_found_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        read_checkpoint(tmp_path / name)


def test_list_keeps_its_order(tmp_path: Path) -> None:
    b = save(tmp_path / "b.safetensors", "b")
    a = save(tmp_path / "a.safetensors", "a")
    assert find_files([b, str(a)]) == (str(b), str(a))
    assert names_of([b, str(a)]) == [["b"], ["a"]]
    assert names_of((a, b)) == [["a"], ["b"]]


@pytest.mark.parametrize("source", [[], ()])
def test_empty_list_is_a_value_error(source: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        find_files(source)


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"model.safetensors"


@pytest.mark.parametrize(
    "source",
    [b"model.safetensors", bytearray(b"model"), BytesPath(), [b"x"], 3, [3], None, {"a": 1}],
)
def test_path_that_is_no_text_is_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError, match="path"):
        find_files(source)


def test_same_tensor_in_two_files_is_a_format_error_that_names_both(tmp_path: Path) -> None:
    one, two = save(tmp_path / "1.safetensors", "a", "b"), save(tmp_path / "2.safetensors", "b")
    for source in (tmp_path, [one, two]):
        with pytest.raises(FormatError, match=rf"'b'.*{one}.*{two}"):
            read_checkpoint(source)


def test_same_file_twice_in_a_list_is_a_format_error(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", "a")
    with pytest.raises(FormatError, match="two files"):
        read_checkpoint([path, path])


def test_tensor_that_its_shard_lacks_is_a_format_error(sharded: Path) -> None:
    shard = "model-00001-of-00002.safetensors"
    write_index(sharded / INDEX, {"a": shard, "lost": shard})
    with pytest.raises(FormatError, match=f"'lost'.*{shard}.*no shard"):
        read_checkpoint(sharded)


def test_tensor_in_another_shard_than_the_index_says_is_a_format_error(sharded: Path) -> None:
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    write_index(sharded / INDEX, {"a": one, "b": two, "c": two})
    with pytest.raises(FormatError, match=f"'b'.*{two}, which lacks it .*{one}"):
        read_checkpoint(sharded)


def test_tensor_that_the_index_does_not_mention_is_read_all_the_same(sharded: Path) -> None:
    write_index(sharded / INDEX, {"a": "model-00001-of-00002.safetensors"})
    assert names_of(sharded) == [["a", "b"]]


def test_missing_shard_is_a_file_not_found_error_that_names_shard_and_index(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        find_files(sharded)
    assert str(sharded / INDEX) in str(caught.value)
    assert caught.value.filename == str(sharded / "model-00002-of-00002.safetensors")


def test_shard_that_is_cut_short_is_a_format_error_that_names_it(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match=shard.name):
        read_checkpoint(sharded)


@pytest.mark.parametrize(
    "entry",
    [
        "/etc/passwd",
        "../model.safetensors",
        "sub/../../model.safetensors",
        "sub/model.safetensors",
        "./model.safetensors",
        "..",
        ".",
        "",
        "a\0b",
        3,
        None,
        ["model.safetensors"],
    ],
)
def test_index_entry_that_is_no_plain_file_name_is_a_format_error(
    tmp_path: Path, entry: object
) -> None:
    directory = tmp_path / "inner"
    directory.mkdir()
    save(tmp_path / "model.safetensors", "a")
    save(directory / "model.safetensors", "a")
    write_index(directory / INDEX, {"a": entry})
    with pytest.raises(FormatError, match="plain file name"):
        find_files(directory)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"{}",
        b'{"weight_map": null}',
        b'{"weight_map": {}}',
        b'{"weight_map": ["model.safetensors"]}',
        b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        b'{"weight_map": {"a": "\xff"}}',
        b'{"a":' * 100_000,
        b"9" * 5_000,
    ],
)
def test_broken_index_is_a_format_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    index = tmp_path / INDEX
    index.write_bytes(content)
    for source in (index, tmp_path):
        with pytest.raises(FormatError) as caught:
            find_files(source)
        assert str(index) in str(caught.value)


def test_index_that_is_a_git_lfs_pointer_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FormatError, match="git lfs pull"):
        find_files(tmp_path)


def test_index_that_is_a_pipe_is_a_format_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(FormatError, match="no regular file"):
        find_files(tmp_path)

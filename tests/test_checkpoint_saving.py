"""Saving into a directory: names, the index, and a directory that never holds a mixture."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.numpy import save_file as official_save_file

import headrace as hr
import headrace.numpy as hn
from headrace.formats.safetensors import read_catalog
from headrace.saving import prepare
from headrace.testing import FaultyFiles, Killed
from tests.support import INDEX, listing, same, shards_of

OLD = {f"tensor.{n}": np.full(100 + n, n, np.float32) for n in range(4)}
NEW = {f"tensor.{n}": np.full(90 + n, -n, np.float32) for n in range(1, 6)}
MOST_CALLS = 200


# what a save makes


def test_shards_and_their_index_are_named_as_everybody_names_them(tmp_path: Path) -> None:
    report = hn.save(OLD, tmp_path, {"format": "pt"}, max_shard_nbytes=900)
    names = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert listing(tmp_path) == {INDEX, *names}
    index = json.loads((tmp_path / INDEX).read_text())
    total = sum(array.nbytes for array in OLD.values())
    assert index["metadata"] == {"format": "pt", "total_size": total}
    assert set(index["weight_map"]) == set(OLD)
    for name in names:
        assert read_catalog(str(tmp_path / name)).metadata == {"format": "pt"}
    assert same({**load_file(tmp_path / min(names)), **load_file(tmp_path / max(names))}, OLD)
    assert same(hn.load(tmp_path), OLD)
    assert (report.nbytes, report.source, report.durable) == (total, str(tmp_path), True)


def test_small_model_is_one_shard_with_an_index(tmp_path: Path) -> None:
    hn.save(OLD, tmp_path)
    assert listing(tmp_path) == {INDEX, "model-00001-of-00001.safetensors"}
    assert same(hn.load(tmp_path), OLD)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9),
    limit=st.integers(1, 120),
    align=st.booleans(),
)
def test_any_model_comes_back_from_any_number_of_shards(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, align: bool
) -> None:
    directory = tmp_path_factory.mktemp("any")
    tensors = {str(n): np.arange(size, dtype=np.int16) for n, size in enumerate(sizes)}
    hn.save(tensors, directory, max_shard_nbytes=limit, align=align)
    assert same(hn.load(directory), tensors)
    for path in directory.glob("*.safetensors"):
        held = load_file(path)
        assert len(held) == 1 or sum(array.nbytes for array in held.values()) <= limit


def test_missing_directories_are_made_and_synced(tmp_path: Path) -> None:
    files = FaultyFiles()
    with hr.Context(files=files) as context:
        hn.save(OLD, tmp_path / "a" / "b", context=context)
    assert same(hn.load(tmp_path / "a" / "b"), OLD)
    assert files.synced[:2] == ["directory", "directory"]


def test_file_in_place_of_the_directory_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileExistsError, match="file"):
        hn.save(OLD, tmp_path / "file")


def test_no_tensors_are_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tensor to save"):
        hn.save({}, tmp_path / "model")
    with pytest.raises(ValueError, match="max_shard_nbytes is 0"):
        hn.save(OLD, tmp_path / "model", max_shard_nbytes=0)
    assert listing(tmp_path) == set()


# what a save replaces


def test_shards_of_the_replaced_index_go_and_other_files_stay(tmp_path: Path) -> None:
    hn.save(OLD, tmp_path, max_shard_nbytes=500)
    others = {"config.json", "other.safetensors", "model-00001-of-00009.safetensors"}
    for name in others:
        (tmp_path / name).write_text("{}")
    for tensors, limit in ((NEW, 400), (OLD, 900), (NEW, 10_000)):
        hn.save(tensors, tmp_path, max_shard_nbytes=limit)
        assert listing(tmp_path) == {INDEX, *others, *shards_of(tmp_path)}
        assert same(hn.load(tmp_path), tensors)


def test_names_that_exist_are_not_used_again(tmp_path: Path) -> None:
    hn.save(OLD, tmp_path, max_shard_nbytes=500)
    before = shards_of(tmp_path)
    hn.save(NEW, tmp_path, max_shard_nbytes=500)
    after = shards_of(tmp_path)
    assert before.isdisjoint(after)
    (token,) = {name.split("-")[1] for name in after}
    count = len(after)
    assert len(token) == 8
    assert after == {f"model-{token}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": {"a": "../outside.safetensors"}}'], ids=repr
)
def test_index_that_is_none_is_replaced_and_removes_nothing(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (tmp_path / "outside.safetensors").write_text("keep")
    (directory / INDEX).write_text(text)
    hn.save(NEW, directory)
    assert same(hn.load(directory), NEW)
    assert (tmp_path / "outside.safetensors").exists()


def test_index_whose_shards_are_gone_is_replaced(tmp_path: Path) -> None:
    hn.save(OLD, tmp_path)
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    hn.save(NEW, tmp_path)
    assert same(hn.load(tmp_path), NEW)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


def test_shards_without_an_index_stay_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, key in zip(names, OLD, strict=False):
        official_save_file({key: OLD[key]}, tmp_path / name)
    with caplog.at_level(logging.WARNING, "headrace"):
        hn.save(NEW, tmp_path)
    (record,) = caplog.records
    assert f"{', '.join(names)} are still there beside the new index" in record.getMessage()
    assert same(hn.load(tmp_path), NEW)
    assert set(names) <= listing(tmp_path)


def test_file_that_is_no_shard_stays_though_an_index_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"metadata": {}, "weight_map": {"a": "config.json"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    hn.save(NEW, tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert same(hn.load(tmp_path), NEW)


def test_file_without_an_index_stays_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    official_save_file(OLD, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    with caplog.at_level(logging.WARNING, "headrace"):
        hn.save(NEW, tmp_path)
    (record,) = caplog.records
    assert "model.safetensors is still there beside the new index" in record.getMessage()
    assert same(hn.load(tmp_path), NEW)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    hn.save(OLD, tmp_path)
    assert listing(tmp_path) == {INDEX, "model.safetensors", *shards_of(tmp_path)}


def test_old_shard_that_cannot_be_removed_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hn.save(OLD, tmp_path)
    with hr.Context(files=FaultyFiles(fail={"remove": errno.EPERM})) as context:
        hn.save(NEW, tmp_path, context=context)
    assert "model-00001-of-00001.safetensors is of no use any more" in caplog.text
    assert same(hn.load(tmp_path), NEW)


def test_index_of_another_name_stays_with_its_shards(tmp_path: Path) -> None:
    official_save_file(OLD, tmp_path / "part.safetensors")
    other = {"weight_map": dict.fromkeys(OLD, "part.safetensors")}
    (tmp_path / "diffusion.safetensors.index.json").write_text(json.dumps(other))
    hn.save(NEW, tmp_path)
    assert same(hn.load(tmp_path), NEW)
    assert same(hn.load(tmp_path / "diffusion.safetensors.index.json"), OLD)


# what a save leaves where it is killed


def nothing(directory: Path) -> dict[str, np.ndarray] | None:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return None


def first_save(directory: Path) -> dict[str, np.ndarray]:
    directory.mkdir()
    hn.save(OLD, directory, max_shard_nbytes=500)
    return OLD


def second_save(directory: Path) -> dict[str, np.ndarray]:
    first_save(directory)
    hn.save(OLD, directory, max_shard_nbytes=900)
    return OLD


def single_file(directory: Path) -> dict[str, np.ndarray]:
    directory.mkdir()
    official_save_file(OLD, directory / "model.safetensors")
    return OLD


def files_without_an_index(directory: Path) -> dict[str, np.ndarray]:
    directory.mkdir()
    for name, array in OLD.items():
        official_save_file({name: array}, directory / f"{name}.safetensors")
    return OLD


def files_that_disagree(directory: Path) -> dict[str, np.ndarray] | None:
    directory.mkdir()
    for name in ("a", "b"):
        official_save_file(OLD, directory / f"{name}.safetensors")
    return None


Prepare = Callable[[Path], "dict[str, np.ndarray] | None"]
STATES = pytest.mark.parametrize(
    "prepare",
    [nothing, first_save, second_save, single_file, files_without_an_index, files_that_disagree],
    ids=lambda prepare: prepare.__name__,
)


def found(directory: Path) -> dict[str, np.ndarray] | None:
    """What a reader gets; None where it gets an error."""
    try:
        return hn.load(directory)
    except (FileNotFoundError, hr.FormatError):
        return None


def is_whole(got: dict[str, np.ndarray] | None, wanted: dict[str, np.ndarray] | None) -> bool:
    return got is None if wanted is None else got is not None and same(got, wanted)


@STATES
@pytest.mark.parametrize("fsync", [True, False])
def test_killed_at_any_call_the_directory_holds_the_old_or_the_new_checkpoint(
    tmp_path: Path, prepare: Prepare, fsync: bool
) -> None:
    seen = []
    for number in range(1, MOST_CALLS):
        directory = tmp_path / str(number)
        old = prepare(directory)
        strangers = listing(directory) if prepare not in (first_save, second_save) else set()
        files = FaultyFiles(die_at=number)
        try:
            with hr.Context(files=files) as context:
                hn.save(NEW, directory, max_shard_nbytes=500, fsync=fsync, context=context)
        except Killed:
            pass
        else:
            break
        got = found(directory)
        seen.append(is_whole(got, NEW))
        assert seen[-1] or is_whole(got, old), f"killed at {number}: {listing(directory)}"
        assert files.open_descriptors == ()
        hn.save(OLD, directory, max_shard_nbytes=700)
        assert same(hn.load(directory), OLD)
        assert strangers <= listing(directory)
        after = listing(directory) - {INDEX} - strangers - shards_of(directory)
        assert after == set()
    assert len(seen) > 20
    assert seen == sorted(seen)
    assert same(hn.load(directory), NEW)


class Nth(FaultyFiles):
    """Raises an error at the so many-th call that puts a name in place, before or after it."""

    def __init__(self, number: int, error: BaseException, *, after: bool = False) -> None:
        super().__init__()
        self.left, self.error, self.after = number, error, after

    def _count(self, call: Callable[[], None]) -> None:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise self.error
        call()
        if self.left == 0:
            raise self.error

    def rename(self, source: str, target: str) -> None:
        self._count(lambda: super(Nth, self).rename(source, target))

    def sync_directory(self, path: str) -> None:
        self._count(lambda: super(Nth, self).sync_directory(path))


@STATES
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "EIO"), KeyboardInterrupt()], ids=["io", "c"])
def test_failed_at_any_name_the_directory_is_as_it_was_or_has_the_new_checkpoint(
    tmp_path: Path, prepare: Prepare, error: BaseException, after: bool
) -> None:
    ends = []
    for number in range(1, MOST_CALLS):
        directory = tmp_path / str(number)
        old = prepare(directory)
        before = listing(directory) if directory.exists() else None
        with hr.Context(files=Nth(number, error, after=after)) as context:
            try:
                hn.save(NEW, directory, max_shard_nbytes=500, context=context)
            except type(error):
                pass
            else:
                break
        ends.append(is_whole(found(directory), NEW))
        if not ends[-1]:
            assert is_whole(found(directory), old)
            assert (listing(directory) if directory.exists() else None) == before
        hn.save(OLD, directory, max_shard_nbytes=700)
        assert not [name for name in listing(directory) if name.startswith(".")]
    assert ends == sorted(ends)
    assert (ends.count(False) >= 5, len(ends) >= 8) == (True, True)


@STATES
@pytest.mark.parametrize(
    "fault",
    [
        {"enospc_after": 1500},
        {"enospc_after": 1500, "no_allocate": True},
        {"fail": {"sync": errno.EIO}},
        {"fail": {"rename": errno.EIO}},
        {"write_eio_at": 300},
    ],
    ids=str,
)
def test_failed_save_leaves_the_old_checkpoint_and_no_temporary(
    tmp_path: Path, prepare: Prepare, fault: dict[str, Any]
) -> None:
    directory = tmp_path / "model"
    old = prepare(directory)
    before = listing(directory)
    with (
        hr.Context(files=FaultyFiles(**fault)) as context,
        pytest.raises(OSError, match=r"E(NOSPC|IO)|No space|Input/output"),
    ):
        hn.save(NEW, directory, max_shard_nbytes=500, context=context)
    assert is_whole(found(directory), old)
    assert listing(directory) == before


@pytest.mark.parametrize("shared", [False, True])
def test_failed_save_takes_the_directories_along_that_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Unless somebody else has put something there."""
    (tmp_path / "old").mkdir()
    target = tmp_path / "old" / "new" / "newer"
    if shared:
        monkeypatch.setattr("headrace.checkpoint_saving.prepare", _beside(target, prepare))
    with (
        hr.Context(files=FaultyFiles(enospc_after=1200)) as context,
        pytest.raises(OSError, match="No space"),
    ):
        hn.save(OLD, target, context=context)
    assert listing(tmp_path / "old") == ({"new"} if shared else set())
    assert not shared or listing(target) == {"theirs"}


def _beside(target: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, once somebody else has put a file into the directory."""

    def both(*arguments: Any, **given: Any) -> Any:
        (target / "theirs").touch()
        return call(*arguments, **given)

    return both


def test_everything_is_synced_before_the_index_names_it(tmp_path: Path) -> None:
    hn.save(OLD, tmp_path)
    files = FaultyFiles()
    with hr.Context(files=files) as context:
        hn.save(NEW, tmp_path, max_shard_nbytes=500, context=context)
    count = len(shards_of(tmp_path))
    kinds = ["index" if INDEX in path else path.split("/")[-1][:6] for path in files.synced]
    record = ["..head", "direct"]
    assert kinds == [".model"] * count + [*record, "direct", "index", "direct"]


def test_second_save_at_the_same_time_is_refused(tmp_path: Path) -> None:
    hn.save(OLD, tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another save into this directory") as caught:
            hn.save(NEW, tmp_path)
        assert caught.value.errno == errno.EBUSY
    finally:
        os.close(fd)
    assert same(hn.load(tmp_path), OLD)
    hn.save(NEW, tmp_path)
    assert same(hn.load(tmp_path), NEW)


class Lockless(FaultyFiles):
    def lock(self, fd: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_file_system_without_locks_is_saved_to(tmp_path: Path) -> None:
    with hr.Context(files=Lockless()) as context:
        hn.save(OLD, tmp_path, context=context)
        hn.save(NEW, tmp_path, context=context)
    assert same(hn.load(tmp_path), NEW)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


def test_directory_that_a_dangling_link_names_is_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "made" / "deep")
    hn.save(NEW, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert same(hn.load(tmp_path / "made" / "deep"), NEW)

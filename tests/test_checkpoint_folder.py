"""What else may be in the folder of a checkpoint, and what becomes of it when one is saved."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

import headrace as hr
import headrace.numpy as hn
from headrace.bindings.posix import FileStatus
from headrace.cli.main import app
from headrace.testing import FaultyFiles
from headrace.testing.faulty_writing import Killed
from tests.support import INDEX, TIMEOUT_S, listing, run_python, same, shards_of

ONE = {"a": np.ones(3)}
USUAL = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
Tensors = dict[str, np.ndarray]
TWO = {"b": np.full(3, 2.0), "c": np.full(3, 3.0)}


class Held(FaultyFiles):
    """Lets a save wait, once it has locked the folder, until somebody lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.locked, self.go_on = threading.Event(), threading.Event()

    def rename(self, old: str, new: str) -> None:
        self.locked.set()
        assert self.go_on.wait(TIMEOUT_S)
        super().rename(old, new)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_that_was_forked_during_a_save_does_not_keep_the_folder_locked(
    tmp_path: Path,
) -> None:
    files = Held()
    release = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=release.wait, args=(TIMEOUT_S,))
    with hr.Context(files=files) as context:
        saving = threading.Thread(target=hn.save, args=(ONE, tmp_path), kwargs={"context": context})
        saving.start()
        assert files.locked.wait(TIMEOUT_S)
        child.start()
        files.go_on.set()
        saving.join()
    try:
        hn.save(TWO, tmp_path)
        assert same(hn.load(tmp_path), TWO)
    finally:
        release.set()
        child.join()


def test_shards_that_another_index_names_stay(tmp_path: Path) -> None:
    for tensors in (TWO, ONE):
        hn.save(tensors, tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "best.safetensors.index.json")
    for _ in range(3):
        hn.save(TWO, tmp_path)
        assert same(hn.load(tmp_path), TWO)
        assert same(hn.load(tmp_path / "best.safetensors.index.json"), ONE)
    assert len(listing(tmp_path)) == 4


def test_shards_stay_where_another_index_cannot_be_read(tmp_path: Path) -> None:
    hn.save(ONE, tmp_path)
    (tmp_path / "best.safetensors.index.json").write_text("{")
    before = shards_of(tmp_path)
    hn.save(TWO, tmp_path)
    assert before < listing(tmp_path)
    assert same(hn.load(tmp_path / INDEX), TWO)


def test_shards_of_a_killed_save_beside_another_index_go(tmp_path: Path) -> None:
    hn.save(ONE, tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "best.safetensors.index.json")
    for number in range(1, 200):
        with hr.Context(files=FaultyFiles(die_at=number)) as context:
            try:
                hn.save(TWO, tmp_path, max_shard_nbytes=30, context=context)
            except Killed:
                continue
        break
    assert number > 10
    assert same(hn.load(tmp_path / INDEX), TWO)
    expected = {INDEX, "best.safetensors.index.json"}
    expected |= shards_of(tmp_path) | shards_of(tmp_path, "best.safetensors.index.json")
    assert listing(tmp_path) == expected


@pytest.mark.parametrize(
    "record", ["", "{", "[1, null]", '{"a": 1}', '["../x.safetensors", "/x.safetensors", "a"]']
)
def test_record_that_is_not_one_removes_nothing(tmp_path: Path, record: str) -> None:
    folder = tmp_path / "model"
    hn.save(ONE, folder)
    for stranger in (tmp_path / "x.safetensors", folder / "a"):
        stranger.touch()
    (folder / ".headrace-save.json").write_text(record)
    hn.save(TWO, folder)
    assert same(hn.load(folder), TWO)
    assert listing(folder) == {INDEX, "a", *shards_of(folder)}
    assert (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("field", ["index", "new", "old", "left"])
def test_record_with_a_field_of_another_kind_hinders_no_save(tmp_path: Path, field: str) -> None:
    record = {"folder": tmp_path.stat().st_ino, "index": "x", "new": {}, "old": {}, "left": {}}
    hn.save(ONE, tmp_path)
    (tmp_path / ".headrace-save.json").write_text(json.dumps({**record, field: [[]]}))
    hn.save(TWO, tmp_path)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


def test_new_files_are_as_private_as_those_that_they_replace(tmp_path: Path) -> None:
    hn.save(TWO, tmp_path, max_shard_nbytes=30)
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    hn.save(ONE, tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_files_without_an_index_pass_on_their_permissions(tmp_path: Path) -> None:
    hn.save_file(ONE, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").chmod(0o600)
    hn.save(TWO, tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_links_of_a_shared_cache_are_replaced_and_not_what_they_lead_to(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    hn.save(TWO, blobs, max_shard_nbytes=30)
    snapshots = [tmp_path / "snapshots" / name for name in ("a", "b")]
    for snapshot in snapshots:
        snapshot.mkdir(parents=True)
        for name in listing(blobs):
            (snapshot / name).symlink_to(blobs / name)
    hn.save(ONE, snapshots[0])
    assert same(hn.load(snapshots[0]), ONE)
    assert same(hn.load(snapshots[1]), TWO)
    assert same(hn.load(blobs), TWO)


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    text = "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    caplog.clear()
    return text


def test_what_stays_beside_the_new_index_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hn.save_file(ONE, tmp_path / "part.safetensors")
    hn.save(TWO, tmp_path)
    assert "part.safetensors is still there" in warnings_of(caplog)
    hn.save(ONE, tmp_path)  # from now on it may be an adapter, or whatever
    assert warnings_of(caplog) == ""
    hn.save_file(ONE, tmp_path / "model.safetensors")
    hn.save(TWO, tmp_path)
    assert "model.safetensors is still there" in warnings_of(caplog)


def test_after_a_killed_save_what_stays_is_told_and_what_went_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 200):
        folder = tmp_path / str(number)
        folder.mkdir()
        hn.save_file(ONE, folder / "model.safetensors")
        with hr.Context(files=FaultyFiles(die_at=number)) as context:
            try:
                hn.save(TWO, folder, max_shard_nbytes=30, context=context)
            except Killed:
                caplog.clear()
            else:
                break
        was_done = set(hn.load(folder)) == set(TWO)
        hn.save(TWO, folder)
        told = warnings_of(caplog)
        assert told.count("model.safetensors") >= 1 or was_done, number
        assert "-of-000" not in told
        stays = listing(folder) - shards_of(folder)
        assert stays == {INDEX, "model.safetensors"}
    assert number > 15


def test_metadata_key_of_headrace_is_the_user_s_own_in_the_shards(tmp_path: Path) -> None:
    for _ in range(2):
        hn.save(ONE, tmp_path, metadata={"headrace.interim": "x", "y": "z"})
        (shard,) = shards_of(tmp_path)
        with safe_open(tmp_path / shard, framework="np") as opened:
            assert opened.metadata() == {"headrace.interim": "x", "y": "z"}
        assert "headrace.interim" not in (tmp_path / INDEX).read_text()
        assert listing(tmp_path) == {INDEX, shard}


def kill_until(folder: Path, is_reached: Callable[[], bool], tensors: Tensors = TWO) -> None:
    """Kill a save at its first call by which some state of the folder is reached."""
    for number in range(1, 200):
        shutil.rmtree(folder.with_suffix(".copy"), ignore_errors=True)
        if folder.exists():
            shutil.copytree(folder, folder.with_suffix(".copy"), symlinks=True)
        with hr.Context(files=FaultyFiles(die_at=number)) as context, pytest.raises(Killed):
            hn.save(tensors, folder, max_shard_nbytes=30, context=context)
        if is_reached():
            return
        shutil.rmtree(folder, ignore_errors=True)
        if folder.with_suffix(".copy").exists():
            folder.with_suffix(".copy").rename(folder)
    raise AssertionError("never reached")


@pytest.mark.parametrize("how", ["full disk", "killed", "convert"])
def test_whole_checkpoint_of_a_killed_first_save_outlives_a_second_that_fails(
    tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "model"
    kill_until(folder, lambda: folder.exists() and len(listing(folder) & USUAL) == 2)
    assert same(hn.load(folder), TWO)
    if how == "full disk":
        fail_to_save(folder, ONE)
    elif how == "killed":
        with hr.Context(files=FaultyFiles(die_at=8)) as context, pytest.raises(Killed):
            hn.save(ONE, folder, context=context)
    else:
        assert CliRunner().invoke(app, ["convert", str(folder), str(folder)]).exit_code == 0
    assert same(hn.load(folder), TWO)
    for _ in range(2):
        hn.save(ONE, folder)
    assert listing(folder) == {INDEX, *shards_of(folder)}


@pytest.mark.parametrize("change", ["working directory", "link"])
@pytest.mark.parametrize("fails", [False, True])
def test_folder_is_the_one_that_was_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, fails: bool
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        hn.save(TWO, tmp_path / name / "model")
    monkeypatch.chdir(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "model")
    target = "model" if change == "working directory" else str(tmp_path / "link")

    def turn(_: hr.Progress) -> None:
        if change == "link":
            (tmp_path / "link").unlink()
            (tmp_path / "link").symlink_to(tmp_path / "b" / "model")
        else:
            os.chdir(tmp_path / "b")

    before = listing(tmp_path / "b" / "model")
    files = FaultyFiles(fail={"rename": errno.EIO} if fails else None)
    told = pytest.raises(OSError, match="Input/output") if fails else contextlib.nullcontext()
    with hr.Context(files=files) as context, told:
        hn.save(ONE, target, progress=turn, context=context)
    assert listing(tmp_path / "b" / "model") == before
    assert same(hn.load(tmp_path / "b" / "model"), TWO)
    assert same(hn.load(tmp_path / "a" / "model"), TWO if fails else ONE)
    shards = shards_of(tmp_path / "a" / "model")
    assert listing(tmp_path / "a" / "model") == {INDEX, *shards}


class Unlockable(FaultyFiles):
    def lock(self, fd: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_of_two_saves_at_once_where_nobody_can_lock_one_is_whole(tmp_path: Path) -> None:
    class Waiting(Unlockable):
        begun, go_on = threading.Event(), threading.Event()

        def rename(self, old: str, new: str) -> None:
            if new.endswith(INDEX):
                self.begun.set()
                assert self.go_on.wait(TIMEOUT_S)
            super().rename(old, new)

    hn.save(TWO, tmp_path)
    slow = Waiting()
    with hr.Context(files=slow) as context, hr.Context(files=Unlockable()) as other:
        thread = threading.Thread(target=hn.save, args=(ONE, tmp_path), kwargs={"context": context})
        thread.start()
        assert slow.begun.wait(TIMEOUT_S)
        hn.save(TWO, tmp_path, context=other)
        assert same(hn.load(tmp_path), TWO)
        slow.go_on.set()
        thread.join()
    assert same(hn.load(tmp_path), ONE)


def test_save_that_comes_second_leaves_the_folder_to_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"

    class Second(FaultyFiles):
        def lock(self, fd: int) -> bool:
            return False

    class First(FaultyFiles):
        def lock(self, fd: int) -> bool:
            with (
                hr.Context(files=Second()) as context,
                pytest.raises(OSError, match="under way"),
            ):
                hn.save(ONE, folder, context=context)
            return super().lock(fd)

    with hr.Context(files=First()) as context:
        hn.save(TWO, folder, context=context)
    assert same(hn.load(folder), TWO)


def test_folder_that_goes_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    class Losing(FaultyFiles):
        times = 0

        def lock(self, fd: int) -> bool:
            self.times += 1
            if self.times < 3:
                folder.rmdir()
            return super().lock(fd)

    with hr.Context(files=Losing()) as context:
        hn.save(TWO, folder, context=context)
        assert context.bindings.files.open_descriptors == ()  # type: ignore[attr-defined]
    assert same(hn.load(folder), TWO)


def test_directories_with_names_of_files_are_passed_over(tmp_path: Path) -> None:
    for name in ("x.safetensors.index.json", "model-00001-of-00001.safetensors", "b.safetensors"):
        (tmp_path / name).mkdir()
    hn.save_file(ONE, tmp_path / "model.safetensors")
    for number in range(1, 200):
        with hr.Context(files=FaultyFiles(die_at=number)) as context:
            try:
                hn.save(TWO, tmp_path, max_shard_nbytes=30, context=context)
            except Killed:
                assert set(hn.load(tmp_path)) in ({"a"}, {"b", "c"})
            else:
                break
    assert same(hn.load(tmp_path), TWO)
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {INDEX, "model.safetensors", *shards_of(tmp_path)}


class Stubborn(FaultyFiles):
    """Fails as the final index is renamed, and then at the first removal of a shard."""

    def __init__(self, *removals: int) -> None:
        super().__init__()
        self.indexes, self.removals, self.left = 0, 0, removals

    def rename(self, old: str, new: str) -> None:
        self.indexes += new.endswith(INDEX)
        if self.indexes == 2:
            raise OSError(errno.EIO, "EIO", new)
        super().rename(old, new)

    def remove(self, path: str) -> None:
        if os.path.basename(path).startswith("model-"):
            self.removals += 1
            if self.removals in self.left:
                raise OSError(errno.EIO, "EIO", path)
        super().remove(path)


def test_new_shard_that_cannot_be_removed_stays_hidden_and_goes_later(tmp_path: Path) -> None:
    hn.save_file(ONE, tmp_path / "model.safetensors")
    with hr.Context(files=Stubborn(1)) as context, pytest.raises(OSError, match="EIO"):
        hn.save(TWO, tmp_path, max_shard_nbytes=30, context=context)
    assert same(hn.load(tmp_path), ONE)
    hn.save(TWO, tmp_path)
    assert same(hn.load(tmp_path), TWO)
    assert listing(tmp_path) == {INDEX, "model.safetensors", *shards_of(tmp_path)}


def test_old_shard_that_cannot_be_removed_once_goes_with_the_next_save(tmp_path: Path) -> None:
    class Once(FaultyFiles):
        def remove(self, path: str) -> None:
            raise OSError(errno.EIO, "EIO", path)

    hn.save(TWO, tmp_path, max_shard_nbytes=30)
    with hr.Context(files=Once()) as context:
        hn.save(ONE, tmp_path, context=context)
    assert len(listing(tmp_path)) == 5
    hn.save(TWO, tmp_path)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


def test_shards_that_an_unreadable_index_protected_go_once_it_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hn.save(TWO, tmp_path)
    other = tmp_path / "best.safetensors.index.json"
    other.write_text("{")
    for _ in range(3):
        hn.save(ONE, tmp_path)
        assert "old shards stay, since an index there" in warnings_of(caplog)
    other.unlink()
    hn.save(TWO, tmp_path)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


@pytest.mark.parametrize("name", ["best.index.json", ".best.safetensors.index.json"])
def test_shards_of_any_index_that_can_be_loaded_stay(tmp_path: Path, name: str) -> None:
    hn.save(ONE, tmp_path)
    (tmp_path / name).write_bytes((tmp_path / INDEX).read_bytes())
    for _ in range(3):
        hn.save(TWO, tmp_path)
    assert same(hn.load(tmp_path / name), ONE)


def test_what_others_put_in_place_meanwhile_is_not_removed(tmp_path: Path) -> None:
    class Full(FaultyFiles):
        def rename(self, old: str, new: str) -> None:
            raise OSError(errno.ENOSPC, "ENOSPC", new)

    plain = tmp_path / "model-00001-of-00001.safetensors"

    def interfere(_: hr.Progress) -> None:
        hn.save_file(ONE, plain)

    with hr.Context(files=Full()) as context, pytest.raises(OSError, match="ENOSPC"):
        hn.save(TWO, tmp_path, progress=interfere, context=context)
    assert listing(tmp_path) == {plain.name}
    assert same(hn.load_file(plain), ONE)


def test_record_of_another_folder_removes_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    hn.save(ONE, first)
    kill_until(first, lambda: ".headrace-save.json" in listing(first))
    shutil.copytree(first, second)
    adapter = json.loads((second / ".headrace-save.json").read_text())["new"].popitem()[0]
    hn.save(TWO, second)
    hn.save_file(ONE, second / adapter)
    (second / ".headrace-save.json").write_bytes((first / ".headrace-save.json").read_bytes())
    hn.save(TWO, second)
    assert same(hn.load_file(second / adapter), ONE)


@pytest.mark.parametrize("name", ["\\ud800.safetensors", "x" * 300 + ".safetensors"], ids=len)
def test_names_that_no_file_can_have_hinder_no_save(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    for _ in range(2):
        hn.save(ONE, tmp_path)
        assert same(hn.load(tmp_path), ONE)
        assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


def test_nothing_is_removed_before_the_index_that_replaces_it_lasts(tmp_path: Path) -> None:
    events: list[str] = []

    class Telling(FaultyFiles):
        def remove(self, path: str) -> None:
            events.append(os.path.basename(path))
            super().remove(path)

        def sync_directory(self, path: str) -> None:
            events.append("sync")
            super().sync_directory(path)

    hn.save(ONE, tmp_path)
    (old,) = shards_of(tmp_path)
    kill_until(tmp_path, lambda: old not in shards_of(tmp_path))
    with hr.Context(files=Telling()) as context:
        hn.save(TWO, tmp_path, context=context)
    assert events.index("sync") < events.index(old)


def test_first_error_is_the_one_that_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Worse(FaultyFiles):
        def __init__(self, error: BaseException) -> None:
            super().__init__()
            self.error, self.over = error, False

        def rename(self, old: str, new: str) -> None:
            self.over = new.endswith(INDEX)
            if self.over:
                raise self.error
            super().rename(old, new)

        def path_status(self, path: str) -> FileStatus:
            if self.over:
                raise OSError(errno.EIO, "worse", path)
            return super().path_status(path)

        def unlock(self, fd: int) -> None:
            super().unlock(fd)
            raise OSError(errno.EIO, "unlock")

    hn.save(ONE, tmp_path)
    for error in (OSError(errno.ENOSPC, "first"), KeyboardInterrupt()):
        with hr.Context(files=Worse(error)) as context, pytest.raises(type(error)) as caught:
            hn.save(TWO, tmp_path, context=context)
        assert caught.value is error
        assert "could not all be undone" in "".join(error.__notes__)
        assert "stays locked" in warnings_of(caplog)
    hn.save(TWO, tmp_path)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


def test_message_says_the_new_files_are_in_place_only_where_they_are(tmp_path: Path) -> None:
    class Unsynced(FaultyFiles):
        left = 0

        def sync_directory(self, path: str) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, "EIO", path)
            super().sync_directory(path)

    hn.save_file(ONE, tmp_path / "model.safetensors")
    for number in (1, 2, 3):
        files = Unsynced()
        files.left = number
        with hr.Context(files=files) as context, pytest.raises(OSError, match="EIO") as caught:
            hn.save(TWO, tmp_path, context=context)
        in_place = set(hn.load(tmp_path)) == set(TWO)
        assert ("in place" in str(caught.value)) is in_place
    assert in_place


def test_error_about_an_index_that_a_killed_save_left_says_so(tmp_path: Path) -> None:
    hn.save_file(ONE, tmp_path / "model.safetensors")
    kill_until(tmp_path, lambda: INDEX in listing(tmp_path))
    hn.save_file(TWO, tmp_path / "model.safetensors")
    with pytest.raises(hr.FormatError, match="left of a save that was killed: save again"):
        hn.load(tmp_path)
    hn.save(TWO, tmp_path)
    assert same(hn.load(tmp_path), TWO)


def kill_before_rename(
    folder: Path, number: int, tensors: Tensors = TWO, *, max_shard_nbytes: int = 100
) -> None:
    """Kill a save before it puts its so many-th name in place: record, interim, shards, index."""

    class Dying(FaultyFiles):
        left = number

        def rename(self, old: str, new: str) -> None:
            self.left -= 1
            if self.left == 0:
                self.die_at = self.writing_calls + 1
            super().rename(old, new)

    with hr.Context(files=Dying()) as context, pytest.raises(Killed):
        hn.save(tensors, folder, max_shard_nbytes=max_shard_nbytes, context=context)


def fail_to_save(folder: Path, tensors: Tensors = TWO) -> None:
    full = FaultyFiles(enospc_after=100)
    with hr.Context(files=full) as context, pytest.raises(OSError, match="No space"):
        hn.save(tensors, folder, context=context)


@pytest.mark.parametrize("own", [True, False])
def test_files_that_an_interim_index_names_stay_whatever_was_recorded(
    tmp_path: Path, own: bool
) -> None:
    if own:
        hn.save(ONE, tmp_path)
    kill_before_rename(tmp_path, 2)
    if own:
        (tmp_path / INDEX).unlink()
    else:
        hn.save_file(ONE, tmp_path / "model-00001-of-00001.safetensors")
    kill_before_rename(tmp_path, 3)
    fail_to_save(tmp_path)
    assert same(hn.load(tmp_path), ONE)
    hn.save(TWO, tmp_path)
    assert same(hn.load(tmp_path), TWO)
    assert (tmp_path / "model-00001-of-00001.safetensors").exists()


@pytest.mark.parametrize("number", [2, 3])
def test_file_with_a_recorded_name_is_not_taken_for_the_one_that_was_meant(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    kill_before_rename(tmp_path, number)
    (tmp_path / INDEX).unlink(missing_ok=True)
    plain = tmp_path / "model-00001-of-00001.safetensors"
    hn.save_file(ONE, plain)
    caplog.clear()
    hn.save(TWO, tmp_path)
    assert same(hn.load_file(plain), ONE)
    assert f"{plain.name} is still there" in warnings_of(caplog)


INODES_COME_BACK = pytest.mark.parametrize("times", [1, 2, 3, 4])
"""ext4 gives the number of a file that went to one of the next: how often there is a new one."""


@INODES_COME_BACK
def test_file_that_takes_the_place_of_an_old_shard_during_a_save_stays(
    tmp_path: Path, times: int
) -> None:
    hn.save(ONE, tmp_path)
    (name,) = shards_of(tmp_path)
    is_taken = threading.Event()

    def take_its_place(_: hr.Progress) -> None:
        if not is_taken.is_set():
            is_taken.set()
            for _n in range(times):
                hn.save_file(TWO, tmp_path / name)

    hn.save(TWO, tmp_path, progress=take_its_place)
    assert same(hn.load_file(tmp_path / name), TWO)
    assert listing(tmp_path) == {INDEX, name, *shards_of(tmp_path)}


@INODES_COME_BACK
def test_file_that_takes_the_name_of_a_shard_that_went_stays(tmp_path: Path, times: int) -> None:
    class Dying(FaultyFiles):
        def remove(self, path: str) -> None:
            if path.endswith(".headrace-save.json"):
                self.die_at = self.writing_calls + 1
            super().remove(path)

    hn.save(ONE, tmp_path)
    (name,) = shards_of(tmp_path)
    with hr.Context(files=Dying()) as context, pytest.raises(Killed):
        hn.save(TWO, tmp_path, context=context)
    for _ in range(times):
        hn.save_file(ONE, tmp_path / name)
    hn.save(TWO, tmp_path)
    assert same(hn.load_file(tmp_path / name), ONE)


@pytest.mark.parametrize("is_killed", [True, False])
def test_shards_of_an_index_that_is_set_aside_after_a_save_that_did_not_end_stay(
    tmp_path: Path, is_killed: bool
) -> None:
    three = {"d": np.ones(4)}
    hn.save(ONE, tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "best.safetensors.index.json")
    hn.save(TWO, tmp_path)
    if is_killed:
        kill_before_rename(tmp_path, 3, three)
    else:
        with hr.Context(files=NoIndex()) as context, pytest.raises(OSError, match="EIO"):
            hn.save(three, tmp_path, context=context)
    (tmp_path / INDEX).rename(tmp_path / "aside.json")
    hn.save(three, tmp_path)
    (tmp_path / "aside.json").rename(tmp_path / "aside.index.json")
    assert same(hn.load(tmp_path / "aside.index.json"), TWO)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


class RecordStays(FaultyFiles):
    """Is killed, or fails to remove, as the record is to go: the save is over by then."""

    def __init__(self, *, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def remove(self, path: str) -> None:
        if path.endswith(".headrace-save.json"):
            if not self.dies:
                raise OSError(errno.EIO, "EIO", path)
            self.die_at = self.writing_calls + 1
        super().remove(path)


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_shards_of_a_save_that_got_through_stay_where_its_index_is_set_aside(
    tmp_path: Path, dies: bool, alone: bool
) -> None:
    three = {"d": np.ones(4)}
    hn.save(ONE, tmp_path)
    if not alone:
        (tmp_path / INDEX).rename(tmp_path / "best.safetensors.index.json")
    ended = pytest.raises(Killed) if dies else contextlib.nullcontext()
    with hr.Context(files=RecordStays(dies=dies)) as context, ended:
        hn.save(TWO, tmp_path, context=context)
    (tmp_path / INDEX).rename(tmp_path / "aside.json")
    if alone:
        hn.save_file(ONE, tmp_path / "mine.safetensors")
        (tmp_path / INDEX).write_text('{"weight_map": {"a": "mine.safetensors"}}')
    hn.save(three, tmp_path)
    (tmp_path / "aside.json").rename(tmp_path / "aside.index.json")
    assert same(hn.load(tmp_path / "aside.index.json"), TWO)
    assert same(hn.load(tmp_path / INDEX), three)


def test_file_that_comes_in_place_of_a_shard_that_did_not_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill_before_rename(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="left of a save that was killed"):
        hn.load(tmp_path)
    plain = tmp_path / "model-00001-of-00001.safetensors"
    hn.save_file(TWO, plain)
    assert same(hn.load(tmp_path), TWO)
    caplog.clear()
    hn.save(ONE, tmp_path)
    assert same(hn.load_file(plain), TWO)
    assert f"{plain.name} is still there" in warnings_of(caplog)


def test_old_shard_that_cannot_be_looked_at_does_not_fail_a_save_that_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Blind(FaultyFiles):
        is_over = False

        def rename(self, old: str, new: str) -> None:
            super().rename(old, new)
            self.is_over = new.endswith(INDEX)

        def path_status(self, path: str) -> FileStatus:
            if self.is_over and path.endswith(".safetensors"):
                raise OSError(errno.EIO, "EIO", path)
            return super().path_status(path)

    hn.save(ONE, tmp_path)
    with hr.Context(files=Blind()) as context:
        hn.save(TWO, tmp_path, context=context)
    assert "old shards stay" in warnings_of(caplog)
    hn.save(ONE, tmp_path)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


@pytest.mark.parametrize("change", ["gone", "written again"])
def test_old_shards_go_also_where_the_new_ones_have_changed_since(
    tmp_path: Path, change: str
) -> None:
    hn.save(ONE, tmp_path)
    (old,) = shards_of(tmp_path)
    kill_until(tmp_path, lambda: old not in shards_of(tmp_path))
    for name in shards_of(tmp_path):
        (tmp_path / name).unlink()
        if change != "gone":
            hn.save_file(TWO, tmp_path / name)
    hn.save(ONE, tmp_path)
    assert old not in listing(tmp_path)


class UnableOnce(FaultyFiles):
    """Cannot remove the first shard that it is to remove."""

    is_first = True

    def remove(self, path: str) -> None:
        if self.is_first and os.path.basename(path).startswith("model-"):
            self.is_first = False
            raise OSError(errno.EIO, "EIO", path)
        super().remove(path)


@pytest.mark.parametrize("make_files", [Unlockable, UnableOnce])
def test_leftover_that_a_save_could_not_remove_goes_with_the_next_one(
    tmp_path: Path, make_files: Callable[[], FaultyFiles]
) -> None:
    hn.save(ONE, tmp_path)
    kill_before_rename(tmp_path, 3)
    with hr.Context(files=make_files()) as context:
        hn.save(ONE, tmp_path, context=context)
    hn.save(ONE, tmp_path)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


@pytest.mark.parametrize("kind", ["loop", "pipe", "dangling"])
def test_what_no_reader_can_open_hinders_no_save(tmp_path: Path, kind: str) -> None:
    for name in ("x.safetensors", "other.index.json"):
        if kind == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to(name if kind == "loop" else "nowhere")
    for tensors in (ONE, TWO):
        hn.save(tensors, tmp_path)
        assert same(hn.load(tmp_path / INDEX), tensors)
    assert listing(tmp_path) == {INDEX, "x.safetensors", "other.index.json", *shards_of(tmp_path)}


def test_index_that_is_made_during_a_save_keeps_its_shards(tmp_path: Path) -> None:
    best = tmp_path / "best.safetensors.index.json"

    def remember(_: hr.Progress) -> None:
        best.write_bytes((tmp_path / INDEX).read_bytes())

    hn.save(ONE, tmp_path)
    hn.save(TWO, tmp_path, progress=remember)
    assert same(hn.load(best), ONE)
    assert same(hn.load(tmp_path), TWO)


class NoIndex(FaultyFiles):
    def rename(self, old: str, new: str) -> None:
        if new.endswith(INDEX):
            raise OSError(errno.EIO, "EIO", new)
        super().rename(old, new)


def test_failed_save_remembers_what_a_killed_one_left(tmp_path: Path) -> None:
    hn.save(ONE, tmp_path)
    (tmp_path / "bad.index.json").write_text("{")
    kill_before_rename(tmp_path, 4, max_shard_nbytes=30)
    with hr.Context(files=NoIndex()) as context, pytest.raises(OSError, match="EIO"):
        hn.save(ONE, tmp_path, context=context)
    (tmp_path / "bad.index.json").unlink()
    hn.save(ONE, tmp_path)
    assert listing(tmp_path) == {INDEX, *shards_of(tmp_path)}


def test_index_that_cannot_be_read_is_told_of_only_where_it_keeps_something(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "search.index.json"
    other.write_text("{}")
    hn.save(ONE, tmp_path)
    assert warnings_of(caplog) == ""
    (old,) = shards_of(tmp_path)
    assert listing(tmp_path) == {INDEX, other.name, old}
    hn.save(TWO, tmp_path)
    told = warnings_of(caplog)
    assert "old shards stay" in told
    assert "remove what is" not in told  # the index may name it
    other.unlink()
    (tmp_path / INDEX).unlink()
    hn.save(ONE, tmp_path)
    assert f"{old}" in warnings_of(caplog)
    assert old in listing(tmp_path)


@pytest.mark.parametrize("call", ["open", "lock", "status"])
def test_directories_go_where_the_folder_cannot_even_be_held(tmp_path: Path, call: str) -> None:
    class Refusing(FaultyFiles):
        def open(self, path: str, *, direct: bool = False) -> int:
            self._refuse("open")
            return super().open(path, direct=direct)

        def lock(self, fd: int) -> bool:
            self._refuse("lock")
            return super().lock(fd)

        def status(self, fd: int) -> FileStatus:
            self._refuse("status")
            return super().status(fd)

        def _refuse(self, name: str) -> None:
            if name == call:
                raise OSError(errno.EMFILE, "EMFILE")

    files = Refusing()
    with hr.Context(files=files) as context, pytest.raises(OSError, match="EMFILE"):
        hn.save(ONE, tmp_path / "a" / "b", context=context)
    assert listing(tmp_path) == set()
    assert files.open_descriptors == ()


def test_missing_file_of_an_index_that_a_killed_save_left_is_told_so(tmp_path: Path) -> None:
    for name in ("a", "b"):
        hn.save_file({name: np.ones(3)}, tmp_path / f"{name}.safetensors")
    kill_before_rename(tmp_path, 3)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="left of a save that was killed"):
        hn.load(tmp_path)


def test_conversion_into_what_the_source_links_to_is_refused(tmp_path: Path) -> None:
    folder, link = tmp_path / "model", tmp_path / "one.safetensors"
    hn.save(TWO, folder, max_shard_nbytes=30)
    link.symlink_to(folder / min(shards_of(folder)))
    done = CliRunner().invoke(app, ["convert", str(link), str(folder)])
    assert done.exit_code == 1
    assert "is a part of what" in done.stderr
    assert same(hn.load(folder), TWO)


AFTER_THE_MAIN_THREAD = """
import sys, threading, time
import numpy as np

def work():
    threading.main_thread().join()
    import headrace.numpy as hn
    hn.save_file({"a": np.arange(5)}, sys.argv[1])
    print(hn.load_file(sys.argv[1])["a"].sum(), flush=True)

threading.Thread(target=work).start()
"""


def test_first_save_works_in_a_thread_that_outlives_the_main_one(tmp_path: Path) -> None:
    assert run_python(AFTER_THE_MAIN_THREAD, str(tmp_path / "a.safetensors")) == "10\n"

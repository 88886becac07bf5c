"""What else may be in the folder of a checkpoint, and what becomes of it when one is saved."""

from __future__ import annotations

import json
import logging
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
import headrace.numpy as hn
from headrace.testing import FaultyFiles
from headrace.testing.faulty_writing import Killed
from tests.support import TIMEOUT_S, run_python

INDEX = "model.safetensors.index.json"
ONE = {"a": np.ones(3)}
TWO = {"b": np.full(3, 2.0), "c": np.full(3, 3.0)}


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def shards_of(folder: Path, index: str = INDEX) -> set[str]:
    return set(json.loads((folder / index).read_text())["weight_map"].values())


def same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return got.keys() == wanted.keys() and all(np.array_equal(got[n], wanted[n]) for n in wanted)


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


def test_metadata_key_of_headrace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the key 'headrace\.interim'"):
        hn.save(ONE, tmp_path / "model", metadata={"headrace.interim": "x"})
    assert listing(tmp_path) == set()


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

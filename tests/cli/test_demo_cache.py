from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.bindings.sysfs import Linux, read_mounts
from headrace.cli.demo_cache import CachedFile
from headrace.probing.volume import find_mount
from headrace.storage.residency import Residency

NBYTES = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> CachedFile:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(NBYTES))
    return CachedFile(str(path), find_mount(str(path), read_mounts(Linux())).file_system)


def test_a_warmed_file_is_resident(file: CachedFile) -> None:
    file.chill()
    file.warm()
    residency = file.residency()
    if residency.method == "unknown":
        pytest.skip(residency.why)
    assert residency.resident_nbytes == NBYTES


def test_a_chilled_file_is_out_of_the_cache_or_says_why_not(file: CachedFile) -> None:
    file.warm()
    obstacle = file.chill()
    if obstacle:
        assert obstacle.startswith("no cold figure: ")
    else:
        assert file.residency().resident_nbytes <= 0.02 * NBYTES


def test_a_file_system_in_memory_has_no_cold_state(file: CachedFile) -> None:
    obstacle = CachedFile(file.path, "tmpfs").chill()
    assert obstacle == "no cold figure: tmpfs keeps its files in memory"


def test_pages_that_stay_are_counted(file: CachedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Residency((), NBYTES // 2, "cachestat", "cachestat(2)")
    monkeypatch.setattr(CachedFile, "residency", lambda _: stuck)
    assert file.chill().startswith("no cold figure: 524 kB of 1.05 MB would not leave")


def test_a_cache_that_cannot_be_seen_gives_no_cold_figure(
    file: CachedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = Residency((), 0, "unknown", "cachestat: ENOSYS")
    monkeypatch.setattr(CachedFile, "residency", lambda _: unseen)
    assert "nothing tells what the page cache holds (cachestat: ENOSYS)" in file.chill()


def test_an_empty_file_is_cold(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert CachedFile(str(path), "ext4").chill() == ""

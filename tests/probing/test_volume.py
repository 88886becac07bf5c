from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bindings.posix import DirectAlignment
from headrace.bindings.sysfs import Linux, Mount, read_mounts
from headrace.errors import SourceChanged
from headrace.probing.volume import find_mount, probe_volume
from headrace.testing import FaultyFiles
from tests.support import PAGE, folder_with_direct, needs_mount, open_source, write_random


def walk(path: str, children: dict[tuple[int, str], int]) -> int:
    """As the kernel walks: step into what is mounted at each component, as often as it is."""
    at, parts = 0, [part for part in path.split("/") if part]
    for length in range(len(parts) + 1):
        prefix = "/" + "/".join(parts[:length])
        while (at, prefix) in children:
            at = children[(at, prefix)]
    return at


def mounts(*pairs: tuple[str, str]) -> tuple[Mount, ...]:
    """Mounts made one after the other."""
    children: dict[tuple[int, str], int] = {}
    table = []
    for number, (point, kind) in enumerate(pairs, 1):
        parent = walk(point, children)
        children[(parent, point)] = number
        table.append(Mount(point, kind, "rw", mount_id=number, parent_id=parent))
    return tuple(table)


USUAL = mounts(
    ("/", "ext4"),
    ("/proc", "proc"),
    ("/mnt", "xfs"),
    ("/mnt/fast", "zfs"),
    ("/mnt/with space", "btrfs"),
    ("/mnt/fast/tmp", "tmpfs"),
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/nowhere/model", "ext4"),
        ("/mnt", "xfs"),
        ("/mnt/model", "xfs"),
        ("/mnt/fast", "zfs"),
        ("/mnt/fast/model", "zfs"),
        ("/mnt/faster/model", "xfs"),
        ("/mnt/fast/tmp/model", "tmpfs"),
        ("/mnt/fast/../model", "xfs"),
        ("/mnt/with space/model", "btrfs"),
        ("/mntx", "ext4"),
    ],
)
def test_mount_under_a_path_is_the_deepest_above_it(path: str, kind: str) -> None:
    assert find_mount(path, USUAL).file_system == kind
    assert find_mount(path, tuple(reversed(USUAL))).file_system == kind


def test_later_mount_on_the_same_point_hides_the_earlier() -> None:
    assert find_mount("/mnt/x", mounts(("/", "a"), ("/mnt", "b"), ("/mnt", "c"))).file_system == "c"
    assert find_mount("/x", mounts(("/", "rootfs"), ("/", "ext4"))).file_system == "ext4"


def test_mount_that_a_later_one_hides_is_not_the_one_under_the_path() -> None:
    hidden = mounts(("/", "ext4"), ("/mnt/old", "overlay"), ("/mnt", "xfs"))
    assert find_mount("/mnt/old/model", hidden).file_system == "xfs"


def test_without_mounts_the_file_system_is_unknown() -> None:
    assert find_mount("/some/model", ()).file_system == "unknown"
    assert find_mount("/some/model", mounts(("/other", "xfs"))).file_system == "unknown"


def test_symbolic_link_counts_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    real = os.path.realpath(tmp_path)
    table = mounts(("/", "ext4"), (f"{real}/real", "xfs"), (f"{real}/link", "nfs"))
    assert find_mount(str(tmp_path / "link" / "model"), table).file_system == "xfs"


def test_relative_path_counts_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = mounts(("/", "ext4"), (os.path.realpath(tmp_path), "xfs"))
    assert find_mount("model", table).file_system == "xfs"


@given(
    points=st.lists(st.lists(st.sampled_from("ab"), max_size=3).map(tuple), max_size=8),
    parts=st.lists(st.sampled_from("abc"), max_size=4),
)
def test_any_tree_of_mounts_is_walked_as_the_kernel_walks(
    points: list[tuple[str, ...]], parts: list[str]
) -> None:
    table = mounts(*(("/" + "/".join(p), str(n)) for n, p in enumerate([(), *points], 1)))
    children = {(each.parent_id, each.mount_point): each.mount_id for each in table}
    path = "/" + "/".join(parts)
    assert find_mount(path, table).file_system == str(walk(path, children))


@pytest.mark.root
def test_bind_mount_and_nested_mounts_are_found_on_the_running_kernel(tmp_path: Path) -> None:
    for name in ("a b", "bound"):
        (tmp_path / name).mkdir()
    mounted = []
    try:
        needs_mount("-t", "tmpfs", "tmpfs", str(tmp_path / "a b"))
        mounted.append(tmp_path / "a b")
        (tmp_path / "a b" / "model").write_bytes(b"x")
        needs_mount("--bind", str(tmp_path / "a b"), str(tmp_path / "bound"))
        mounted.append(tmp_path / "bound")
        table = read_mounts(Linux())
        for name in ("a b", "bound"):
            assert find_mount(str(tmp_path / name / "model"), table).file_system == "tmpfs"
        assert find_mount(str(tmp_path), table).file_system != "tmpfs"
    finally:
        for point in reversed(mounted):
            os.system(f"umount '{point}'")


# O_DIRECT.


def test_volume_with_o_direct_states_its_alignment(tmp_path: Path) -> None:
    path = folder_with_direct(tmp_path) / "model"
    write_random(path, 2 * PAGE)
    with open_source(path) as source:
        volume = probe_volume(source, mounts(("/", "somefs")))
        source.open_direct()
    assert (volume.file_system, volume.direct.holds) == ("somefs", True)
    assert "on somefs" in volume.direct.found
    assert volume.alignment.offset >= 512


def test_alignment_that_is_not_stated_is_a_page(tmp_path: Path) -> None:
    path = folder_with_direct(tmp_path) / "model"
    write_random(path, PAGE)
    with open_source(path, FaultyFiles(no_dioalign=True)) as source:
        volume = probe_volume(source, ())
    assert volume.alignment == DirectAlignment(4096, 4096)
    assert volume.direct.holds
    assert "not stated" in volume.direct.why


def test_kernel_without_statx_is_taken_as_stating_nothing(tmp_path: Path) -> None:
    class Old(FaultyFiles):
        def direct_alignment(self, fd: int) -> DirectAlignment | None:
            raise OSError(errno.ENOSYS, "statx: ENOSYS")

    path = folder_with_direct(tmp_path) / "model"
    write_random(path, PAGE)
    with open_source(path, Old()) as source:
        assert probe_volume(source, ()).alignment == DirectAlignment(4096, 4096)


def test_refused_o_direct_is_a_fact_with_a_remedy_and_no_error(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_random(path, PAGE)
    with open_source(path, FaultyFiles(refuse_direct=True)) as source:
        volume = probe_volume(source, mounts(("/", "oddfs")))
    assert volume.direct.holds is False
    assert volume.direct.found == "refused by oddfs"
    assert "Invalid argument" in volume.direct.why
    assert "O_DIRECT" in volume.direct.remedy


def test_file_replaced_before_the_probe_is_a_source_changed_error(tmp_path: Path) -> None:
    path = folder_with_direct(tmp_path) / "model"
    write_random(path, PAGE)
    with open_source(path) as source:
        write_random(tmp_path / "other", PAGE)
        (tmp_path / "other").rename(path)
        with pytest.raises(SourceChanged, match="replaced"):
            probe_volume(source, ())


class RunsDry(FaultyFiles):
    """The process may open no more files."""

    def open(self, path: str, *, direct: bool = False) -> int:
        if direct:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return super().open(path)

    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        raise AssertionError("a probe reads no payload")


def test_probe_that_runs_out_of_descriptors_does_not_blame_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_random(path, PAGE)
    with open_source(path, RunsDry()) as source:
        volume = probe_volume(source, mounts(("/", "ext4")))
    assert "Too many open files" in volume.direct.why
    assert "refused by" not in volume.direct.found
    assert "ext4" not in volume.direct.remedy

from __future__ import annotations

import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from headrace.bindings.sysfs import Linux, Mount, read_mounts
from headrace.probing.volume import find_mount
from tests.support import RecordedSystem, needs_mount

MOUNTINFO = "/proc/self/mountinfo"

RECORDED = """\
21 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw,discard
22 21 0:20 / /proc rw,nosuid,nodev,noexec,relatime shared:2 - proc proc rw
25 21 0:23 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64
36 21 259:3 /models /mnt/a\\040b rw,noatime master:1 propagate_from:2 - xfs /dev/nvme0n1 rw,attr2
37 21 0:50 / /var/lib/docker/merged rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
38 21 0:51 / /srv rw,relatime - nfs4 server:/export rw,vers=4.2
"""


def mounts_at(*points: str) -> list[str]:
    lines = [f"{n} 1 0:{n} / {point} rw - ext4 /dev/x rw\n" for n, point in enumerate(points)]
    return [mount.mount_point for mount in read_mounts(RecordedSystem({MOUNTINFO: "".join(lines)}))]


def test_mounts_are_read_in_their_order() -> None:
    assert read_mounts(RecordedSystem({MOUNTINFO: RECORDED})) == (
        Mount("/", "ext4", "rw,discard"),
        Mount("/proc", "proc", "rw"),
        Mount("/dev/shm", "tmpfs", "rw,inode64"),
        Mount("/mnt/a b", "xfs", "rw,attr2"),
        Mount("/var/lib/docker/merged", "overlay", "rw,lowerdir=/l,upperdir=/u,workdir=/w"),
        Mount("/srv", "nfs4", "rw,vers=4.2"),
    )


def test_missing_mountinfo_is_no_mounts() -> None:
    assert read_mounts(RecordedSystem()) == ()
    assert read_mounts(RecordedSystem({MOUNTINFO: ""})) == ()


@pytest.mark.parametrize(
    ("escaped", "plain"),
    [
        ("/a\\040b", "/a b"),
        ("/a\\011b", "/a\tb"),
        ("/a\\012b", "/a\nb"),
        ("/a\\134b", "/a\\b"),
        ("/a\\134040b", "/a\\040b"),
        ("/a\\134x41", "/a\\x41"),
        ("/a\\134134", "/a\\134"),
        ("/a-b", "/a-b"),
        ("/a'\"b", "/a'\"b"),
    ],
)
def test_escapes_of_the_kernel_are_undone_once(escaped: str, plain: str) -> None:
    assert mounts_at(escaped) == [plain]


@pytest.mark.parametrize(
    "name",
    [
        "/mnt/Gewähr",
        "/mnt/模型",
        "/mnt/\N{ROCKET}",
        pytest.param(os.fsdecode(b"/mnt/\xff\xfe"), id="no UTF-8"),
    ],
)
def test_mount_point_in_any_letters_is_what_the_path_functions_say(name: str) -> None:
    assert mounts_at("/", name) == ["/", name]


@pytest.mark.parametrize("name", ["/mnt/a\x0cb", "/mnt/a\x1cb", "/mnt/a\x85b", "/mnt/a\u2028b"])
def test_only_newlines_end_a_line(name: str) -> None:
    found = mounts_at("/", name, "/last")
    assert (found[0], len(found), found[-1]) == ("/", 3, "/last")


@pytest.mark.parametrize("line", ["", "garbage", "1 2 3"])
def test_damaged_lines_are_passed_over(line: str) -> None:
    text = f"{line}\n36 1 0:1 / / rw - ext4 /dev/x rw\n"
    assert read_mounts(RecordedSystem({MOUNTINFO: text})) == (Mount("/", "ext4", "rw"),)


def test_line_without_options_has_none() -> None:
    text = "36 1 0:1 / / rw - ext4 /dev/x\n"
    assert read_mounts(RecordedSystem({MOUNTINFO: text})) == (Mount("/", "ext4", ""),)


def test_running_kernel_has_a_root_mount_and_cpus() -> None:
    linux = Linux()
    assert "/" in [mount.mount_point for mount in read_mounts(linux)]
    assert linux.cpus() == len(os.sched_getaffinity(0))
    assert linux.load_average() >= 0


def test_missing_file_is_none_and_odd_bytes_survive(tmp_path: Path) -> None:
    assert Linux().read(str(tmp_path / "missing")) is None
    path = tmp_path / "odd"
    path.write_bytes(b"a\xff\nb")
    assert Linux().read(str(path)) == "a\udcff\nb"


@pytest.mark.root
def test_file_that_may_not_be_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "locked"
    path.write_text("secret")
    path.chmod(0)
    os.seteuid(65_534)
    try:
        assert Linux().read(str(path)) is None
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "path",
    [
        *("/proc/sys/kernel/osrelease", "/proc/sys/kernel/io_uring_disabled", "/proc/config.gz"),
        *("/proc/kallsyms", "/proc/cpuinfo", "/proc/modules", "/proc/cmdline", "/proc/filesystems"),
        *("/sys/devices/system/cpu/online", "/etc/ld.so.cache"),
    ],
)
def test_file_of_the_kernel_is_read_to_its_end_however_it_is_served(path: str) -> None:
    """Some give a page at a time, some refuse to be asked for megabytes; their sizes are 0."""
    try:
        expected = Path(path).read_bytes()
    except OSError as error:
        pytest.skip(f"this machine does not show it: {error}")
    text = Linux().read(path)
    assert text is not None
    assert text.encode("utf-8", "surrogateescape") == expected


@pytest.mark.root
def test_mount_is_found_behind_any_number_of_others(tmp_path: Path) -> None:
    needs_mount("-t", "tmpfs", "-o", "size=1M", "tmpfs", str(tmp_path))
    made = [tmp_path]
    try:
        for number in range(60):
            folder = tmp_path / f"{number:03}-a-name-that-makes-its-line-of-mountinfo-longer"
            folder.mkdir()
            needs_mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder))
            made.append(folder)
        assert len(Linux().read(MOUNTINFO) or "") > 2 * 4096
        (made[-1] / "file").write_bytes(b"1")
        found = find_mount(str(made[-1] / "file"), read_mounts(Linux()))
        assert (found.mount_point, found.file_system) == (str(made[-1]), "tmpfs")
    finally:
        for folder in reversed(made):
            subprocess.run(["umount", str(folder)], check=True)


def test_small_file_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        assert Linux().read("/proc/self/stat")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_file_that_never_ends_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headrace.bindings.sysfs._MOST_NBYTES", 1 << 20)
    (tmp_path / "long").write_bytes(bytes((1 << 20) + 1))
    assert Linux().read(str(tmp_path / "long")) is None

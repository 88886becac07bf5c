from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.bindings.posix import Files, PosixFiles
from headrace.bindings.pymemory import map_pages
from headrace.storage.replacement import Replacement
from headrace.testing import FaultyFiles
from tests.support import PAGE, folder_with_direct, needs_mount, open_descriptors

OLD, NEW = b"old" * 1000, b"new!" * 5000
NOBODY = 65_534


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(OLD)
    return path


def save(
    path: Path | str, content: bytes = NEW, files: Files | None = None, *, fsync: bool = True
) -> None:
    with Replacement(str(path), files or PosixFiles()) as replacement:
        replacement.sink.write([memoryview(content)], 0)
        replacement.commit(fsync=fsync)


def beside(path: Path) -> list[str]:
    """What is in the folder of a file but the file."""
    return sorted(set(os.listdir(path.parent)) - {path.name})


def stale(path: Path) -> Path:
    return path.with_name(f".{path.name}.0123456789abcdef.headrace")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("fsync", [True, False])
def test_target_has_the_old_bytes_until_the_commit_and_then_the_new_ones(
    target: Path, fsync: bool
) -> None:
    files, before = FaultyFiles(), open_descriptors()
    with Replacement(str(target), files) as replacement:
        assert replacement.path == str(target)
        replacement.sink.write([memoryview(NEW)], 0)
        assert target.read_bytes() == OLD
        (name,) = beside(target)
        replacement.commit(fsync=fsync)
        assert target.read_bytes() == NEW
    assert beside(target) == []
    assert files.synced == ([str(target.parent / name), "directory"] if fsync else [])
    assert (files.open_descriptors, open_descriptors()) == ((), before)


def test_missing_target_is_made(tmp_path: Path) -> None:
    save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == NEW
    assert os.listdir(tmp_path) == ["file"]


def test_steps_can_be_taken_one_by_one_and_bytes_go_around_the_page_cache(target: Path) -> None:
    folder_with_direct(target.parent)
    view = map_pages(2 * PAGE)
    view[:] = os.urandom(len(view))
    with Replacement(str(target), PosixFiles()) as replacement:
        replacement.sink.open_direct()
        replacement.sink.write_aligned(view, 0, PAGE)
        replacement.sink.resize(PAGE + 9)
        replacement.sync()
        replacement.rename()
        replacement.sync_directory()
    assert target.read_bytes() == bytes(view[: PAGE + 9])


def test_leaving_without_a_commit_keeps_the_old_file_alone(target: Path) -> None:
    files = FaultyFiles()
    with Replacement(str(target), files) as replacement:
        replacement.sink.write([memoryview(NEW)], 0)
    replacement.abandon()
    assert (target.read_bytes(), beside(target)) == (OLD, [])
    assert files.open_descriptors == ()


def test_abandoning_after_the_commit_keeps_the_new_file(target: Path) -> None:
    replacement = Replacement(str(target), PosixFiles())
    replacement.sink.write([memoryview(NEW)], 0)
    replacement.commit(fsync=False)
    replacement.abandon()
    assert (target.read_bytes(), beside(target)) == (NEW, [])


def test_steps_out_of_order_are_refused(target: Path) -> None:
    with Replacement(str(target), PosixFiles()) as replacement:
        with pytest.raises(ValueError, match=r"call rename\(\) before"):
            replacement.sync_directory()
        replacement.rename()
        with pytest.raises(ValueError, match="renamed or abandoned"):
            replacement.rename()


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444, 0o640, 0o777, 0o000])
def test_new_file_has_the_permissions_of_the_old_one(target: Path, mode: int) -> None:
    target.chmod(mode)
    with umask(0o077):
        save(target)
    assert stat.S_IMODE(target.stat().st_mode) == mode


class ModeAtSync(FaultyFiles):
    def sync(self, fd: int) -> None:
        assert stat.S_IMODE(self.status(fd).mode) == 0o640
        FaultyFiles.sync(self, fd)


def test_permissions_are_synced_with_the_bytes(target: Path) -> None:
    target.chmod(0o640)
    save(target, NEW, ModeAtSync())


def test_set_user_id_is_not_passed_on(target: Path) -> None:
    target.chmod(0o6755)
    save(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_file_where_none_was_has_the_permissions_that_the_umask_leaves(
    tmp_path: Path, mask: int
) -> None:
    with umask(mask):
        save(tmp_path / "file")
        assert os.umask(mask) == mask
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_what_replaces_a_private_file_is_private_from_the_start(target: Path) -> None:
    target.chmod(0o600)
    with umask(0), Replacement(str(target), PosixFiles()):
        (name,) = beside(target)
        assert stat.S_IMODE((target.parent / name).stat().st_mode) == 0o600


def test_link_is_followed_and_stays_a_link(target: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("folder/" + target.name)
    with Replacement(str(link), PosixFiles()) as replacement:
        assert replacement.path == str(target)
        replacement.sink.write([memoryview(NEW)], 0)
        assert len(beside(target)) == 1
        replacement.commit(fsync=True)
    assert link.is_symlink()
    assert (target.read_bytes(), beside(target)) == (NEW, [])


def test_dangling_link_has_its_target_made(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("missing")
    save(link)
    assert link.is_symlink()
    assert (tmp_path / "missing").read_bytes() == NEW


def test_relative_path_means_the_folder_of_the_beginning(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(target.parent)
    with Replacement(target.name, PosixFiles()) as replacement:
        monkeypatch.chdir(tmp_path)
        replacement.commit(fsync=True)
    assert (target.read_bytes(), beside(target)) == (b"", [])


@pytest.mark.parametrize("name", ["n" * 255, "n" * 228, "é" * 127, "x" + "模" * 84, "a.b", "[*]?"])
def test_name_of_any_length_and_script_is_replaced_and_cleaned_up(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    with Replacement(str(path), PosixFiles()) as replacement:
        (made,) = beside(path)
        made.encode()
        assert made.startswith("." + name[:50])
        replacement.commit(fsync=False)
    (tmp_path / made).write_bytes(b"left by the dead")
    save(path)
    assert beside(path) == []


def test_directory_is_an_is_a_directory_error(target: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        Replacement(str(target.parent), PosixFiles())
    assert caught.value.filename == str(target.parent)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_before_anything_is_made(
    tmp_path: Path, kind: str
) -> None:
    path, files = Path("/dev/null") if kind == "device" else tmp_path / "pipe", FaultyFiles()
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file") as caught:
        Replacement(str(path), files)
    assert caught.value.errno == errno.EINVAL
    assert files.writing_calls == 0


@pytest.mark.parametrize("name", ["", "missing/", "missing/.", "missing/..", "missing/file"])
def test_path_that_names_no_file_that_can_be_made_is_a_file_not_found_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        Replacement(name, PosixFiles())
    assert os.listdir(tmp_path) == []


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_target() -> Iterator[Path]:
    """A target that everybody can reach, which those in `tmp_path` are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "file")
        path.write_bytes(OLD)
        yield path


@pytest.mark.root
def test_folder_without_permission_names_the_target_and_says_what_is_needed(
    public_target: Path,
) -> None:
    public_target.chmod(0o666)
    with as_nobody(), pytest.raises(PermissionError) as caught:
        Replacement(str(public_target), PosixFiles())
    assert caught.value.filename == str(public_target)
    assert caught.value.__notes__ == [
        f"its replacement has to be made as a new file in {public_target.parent}"
    ]


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o333, 0o777])
def test_ordinary_user_removes_what_is_stale_where_the_folder_can_be_listed(
    public_target: Path, mode: int
) -> None:
    left = stale(public_target)
    left.touch()
    left.chmod(0o444)  # its writer was killed just before the rename
    os.chown(left, NOBODY, NOBODY)
    public_target.parent.chmod(mode)
    with as_nobody():
        save(public_target, fsync=False)  # what cannot be listed cannot be synced either
    assert public_target.read_bytes() == NEW
    assert beside(public_target) == ([left.name] if mode == 0o333 else [])


@pytest.mark.root
def test_temporary_of_another_user_that_cannot_be_removed_does_not_hinder(
    public_target: Path,
) -> None:
    left = stale(public_target)
    left.touch()
    left.chmod(0o600)
    public_target.parent.chmod(0o1777)
    os.chown(public_target, NOBODY, NOBODY)
    with as_nobody():
        save(public_target)
    assert (public_target.read_bytes(), beside(public_target)) == (NEW, [left.name])


FAULTS: list[tuple[dict[str, Any], int]] = [
    ({"enospc_after": 100}, errno.ENOSPC),
    ({"write_eio_at": 7}, errno.EIO),
    *(
        ({"fail": {call: errno.EDQUOT}}, errno.EDQUOT)
        for call in ("list_directory", "create", "lock", "pwritev", "set_mode", "sync", "rename")
    ),
]


@pytest.mark.parametrize(("fault", "code"), FAULTS)
def test_failed_save_is_the_kernels_error_and_leaves_the_old_file_alone(
    target: Path, fault: dict[str, Any], code: int
) -> None:
    files = FaultyFiles(**fault)
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the number is compared)
        save(target, NEW, files)
    assert caught.value.errno == code
    assert (target.read_bytes(), beside(target)) == (OLD, [])
    assert files.open_descriptors == ()


@pytest.mark.parametrize("fault", [{"enospc_after": 100}, {"fail": {"sync": errno.EIO}}])
def test_error_names_the_target_and_not_the_temporary(target: Path, fault: dict[str, Any]) -> None:
    with pytest.raises(OSError, match=str(target)) as caught:
        save(target, NEW, FaultyFiles(**fault))
    assert caught.value.filename == str(target)


def test_failed_sync_of_the_directory_says_that_the_new_file_is_in_place(target: Path) -> None:
    with pytest.raises(OSError, match=r"is in place, but .* may not survive a power cut") as caught:
        save(target, NEW, FaultyFiles(fail={"sync_directory": errno.EIO}))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(target))
    assert (target.read_bytes(), beside(target)) == (NEW, [])


def test_error_of_abandoning_is_a_note_to_the_first_error(target: Path) -> None:
    files = FaultyFiles(fail={"remove": errno.EROFS}, enospc_after=0)
    with pytest.raises(OSError, match="ENOSPC") as caught:
        save(target, NEW, files)
    assert "could not be removed" in caught.value.__notes__[0]
    assert beside(target)[0] in caught.value.__notes__[0]
    assert files.open_descriptors == ()


def test_error_of_abandoning_alone_is_raised(target: Path) -> None:
    files = FaultyFiles(fail={"remove": errno.EROFS})
    with pytest.raises(OSError, match="Read-only"), Replacement(str(target), files):
        pass
    assert files.open_descriptors == ()
    save(target)
    assert beside(target) == []


def test_error_of_the_caller_passes_through(target: Path) -> None:
    with pytest.raises(ZeroDivisionError), Replacement(str(target), PosixFiles()):
        _ = 1 // 0
    assert (target.read_bytes(), beside(target)) == (OLD, [])


def test_temporary_that_somebody_removed_is_no_error_of_abandoning(target: Path) -> None:
    replacement = Replacement(str(target), PosixFiles())
    os.unlink(replacement.sink.path)
    replacement.abandon()
    assert (target.read_bytes(), beside(target)) == (OLD, [])


def test_temporary_that_somebody_removed_cannot_be_committed(target: Path) -> None:
    with Replacement(str(target), PosixFiles()) as replacement:
        os.unlink(replacement.sink.path)
        with pytest.raises(FileNotFoundError):
            replacement.commit(fsync=False)
    assert (target.read_bytes(), beside(target)) == (OLD, [])


def test_only_dead_temporaries_of_the_same_target_are_removed(target: Path) -> None:
    dead, held = stale(target), stale(target).with_name(f".{target.name}.fedcba9876543210.headrace")
    others = [
        *(f".other.{'0' * 16}.headrace", f".{target.name}.0123.headrace", f".{target.name}.tmp"),
        *(f".{target.name}.{'0' * 16}.headrace~", f".{target.name}.{'X' * 16}.headrace"),
    ]
    for path in (dead, held, *(target.with_name(name) for name in others)):
        path.touch()
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(target)
    assert beside(target) == sorted([held.name, *others])


def test_what_only_looks_like_a_temporary_is_left_and_waited_for_by_nobody(target: Path) -> None:
    os.mkfifo(stale(target))
    folder = target.with_name(f".{target.name}.{'0' * 16}.headrace")
    folder.mkdir()
    dangling = target.with_name(f".{target.name}.{'1' * 16}.headrace")
    dangling.symlink_to("missing")
    save(target)
    assert target.read_bytes() == NEW
    assert beside(target) == sorted([stale(target).name, folder.name, dangling.name])


class Taken(FaultyFiles):
    """Somebody else has a file of the name that was drawn."""

    def create(self, path: str, mode: int) -> int:
        Path(path).write_bytes(b"theirs")
        return FaultyFiles.create(self, path, mode)


def test_file_of_somebody_else_by_the_drawn_name_is_not_removed(target: Path) -> None:
    with pytest.raises(FileExistsError):
        Replacement(str(target), Taken())
    (name,) = beside(target)
    assert target.with_name(name).read_bytes() == b"theirs"


class Lockless(FaultyFiles):
    def lock(self, fd: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_file_system_without_locks_is_written_to_and_nothing_there_counts_as_dead(
    target: Path,
) -> None:
    stale(target).touch()
    save(target, NEW, Lockless())
    assert (target.read_bytes(), beside(target)) == (NEW, [stale(target).name])


class Hunted(FaultyFiles):
    """The first temporaries are taken for dead ones between their making and their locking."""

    def lock(self, fd: int) -> bool:
        hunts = HUNTS[self]
        hunt = hunts.pop() if hunts else None
        path = self._open[fd][0]
        if hunt == "removed":
            os.unlink(path)
        elif hunt == "replaced":
            os.unlink(path)
            Path(path).write_bytes(b"somebody else's")
        elif hunt == "locked":
            other = os.open(path, os.O_RDWR)
            fcntl.flock(other, fcntl.LOCK_EX)
            try:
                return FaultyFiles.lock(self, fd)
            finally:
                os.close(other)
        return FaultyFiles.lock(self, fd)


HUNTS: dict[FaultyFiles, list[str]] = {}


@pytest.mark.parametrize(
    "hunts", [["removed"], ["locked"], ["replaced"], ["removed", "locked", "locked", "removed"]]
)
def test_temporary_that_was_taken_for_a_dead_one_is_given_up_for_another(
    target: Path, hunts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Hunted()
    monkeypatch.setitem(HUNTS, files, list(hunts))
    save(target, NEW, files)
    assert (target.read_bytes(), beside(target)) == (NEW, [])
    assert files.opens == len(hunts) + 1
    assert files.open_descriptors == ()


def test_endless_hunt_ends_in_an_error(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Hunted()
    monkeypatch.setitem(HUNTS, files, ["locked"] * 1000)
    with pytest.raises(OSError, match="one after the other") as caught:
        Replacement(str(target), files)
    assert (caught.value.errno, caught.value.filename) == (errno.EAGAIN, str(target))
    assert (target.read_bytes(), beside(target)) == (OLD, [])
    assert files.open_descriptors == ()


def test_two_at_once_have_a_temporary_each_and_the_last_rename_wins(target: Path) -> None:
    with (
        Replacement(str(target), PosixFiles()) as first,
        Replacement(str(target), PosixFiles()) as second,
    ):
        assert len(beside(target)) == 2
        second.sink.write([memoryview(b"second")], 0)
        first.sink.write([memoryview(b"first")], 0)
        second.commit(fsync=False)
        assert target.read_bytes() == b"second"
        first.commit(fsync=False)
    assert (target.read_bytes(), beside(target)) == (b"first", [])


def test_threads_that_save_at_once_never_show_part_of_a_file(target: Path) -> None:
    contents = [bytes([number]) * (1000 + number) for number in range(8)]

    def save_often(content: bytes) -> None:
        for _ in range(20):
            save(target, content, fsync=False)

    with ThreadPoolExecutor(len(contents)) as pool:
        writers = [pool.submit(save_often, content) for content in contents]
        while not all(writer.done() for writer in writers):
            assert target.read_bytes() in (OLD, *contents)
    for writer in writers:
        writer.result()
    assert target.read_bytes() in contents
    assert beside(target) == []


@pytest.mark.root
def test_full_volume_keeps_the_old_file_and_has_its_space_back(tmp_path: Path) -> None:
    needs_mount("-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path))
    target, old = tmp_path / "file", os.urandom(300_000)
    try:
        target.write_bytes(old)
        free = os.statvfs(tmp_path).f_bfree
        with pytest.raises(OSError, match="No space") as caught:
            save(target, bytes(2 << 20))
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(target))
        assert (target.read_bytes(), beside(target)) == (old, [])
        assert os.statvfs(tmp_path).f_bfree == free
        save(target, bytes(400_000))
        assert target.read_bytes() == bytes(400_000)
    finally:
        os.system(f"umount {tmp_path}")

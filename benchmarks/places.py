"""Where the inputs lie: on a disk in the page cache, on tmpfs, and cold on a fast block device."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.files import MODEL_NAME, RAW_NAME, copy_tree
from benchmarks.result import COLD, RESIDENT, TMPFS
from headrace.bindings.posix import Files

_SHM = Path("/dev/shm")
_STRAY_SHARE = 0.001  # of the files: pages that may be in the other state, and are counted
_ROOM = 1.06  # of the files: inodes, journal and a margin


@dataclass(frozen=True, slots=True)
class Place:
    """One directory with both inputs, and the state that each reading finds them in."""

    key: str
    """``"resident"``, ``"tmpfs"`` or ``"cold"``."""
    directory: Path
    """Where the files lie."""
    filesystem: str
    """Type of the file system, ``"ext4"`` say."""
    title: str
    """Heading of its tables."""
    cold: bool
    """Whether the page cache is emptied of the files before each reading."""

    def source(self, kind: str) -> Path:
        """Path of the model's directory (``"model"``, ``"kept"``), else of the raw file."""
        return self.directory / (MODEL_NAME if kind in ("model", "kept") else RAW_NAME)


@dataclass(frozen=True, slots=True)
class AbsentPlace:
    """A place that could not be made."""

    key: str
    """As `Place.key`."""
    why: str
    """What was missing."""


class PlaceError(Exception):
    """A place cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Puts a source's files into the page cache or out of it, and counts them there."""

    files: Files
    """System calls."""

    def prepare(self, source: Path, *, cold: bool) -> int:
        """Bring the files to the state that a reading wants.

        Returns
        -------
        int
            Bytes of them that the page cache then holds.

        Raises
        ------
        RuntimeError
            The state could not be reached.
        """
        paths = files_of(source)
        for path in paths:
            self._drop(path) if cold else self._warm(path)
        resident = sum(self.resident_nbytes(path) for path in paths)
        total = sum(path.stat().st_size for path in paths)
        wanted = 0 if cold else total
        if abs(resident - wanted) > total * _STRAY_SHARE:
            raise RuntimeError(f"{resident} bytes of {source.name} are resident, not {wanted}")
        return resident

    def resident_nbytes(self, path: Path) -> int:
        """Bytes of a file that the page cache holds."""
        nbytes = path.stat().st_size
        if not nbytes:
            return 0
        fd = self.files.open(str(path))
        try:
            pages = self._count_pages(fd, nbytes)
        finally:
            self.files.close(fd)
        return min(pages * mmap.PAGESIZE, nbytes)

    def _count_pages(self, fd: int, nbytes: int) -> int:
        try:
            return self.files.cached_pages(fd, 0, nbytes)
        except OSError:  # Linux before 6.5
            return self.files.mapped_pages(fd, 0, nbytes)

    def _drop(self, path: Path) -> None:
        fd = self.files.open(str(path))
        try:
            for _ in range(20):  # pages on a CPU's pending list stay until it is drained
                self.files.forget(fd, 0, 0)
                if not self.resident_nbytes(path):
                    return
                time.sleep(0.01)
        finally:
            self.files.close(fd)

    def _warm(self, path: Path) -> None:
        if self.resident_nbytes(path) == path.stat().st_size:
            return
        buffer = bytearray(16 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def files_of(source: Path) -> list[Path]:
    """Return the file itself, or the files of a directory."""
    return [source] if source.is_file() else sorted(source.iterdir())


def filesystem_of(path: Path) -> tuple[str, str]:
    """Type and options of the file system that a path is on."""
    best = (Path("/"), "unknown", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        point_path = Path(point.encode().decode("unicode_escape"))
        if path.is_relative_to(point_path) and len(point_path.parts) >= len(best[0].parts):
            best = (point_path, kind, options)
    return best[1], best[2]


def disk_place(directory: Path) -> Place:
    """Describe the place that the inputs are made in."""
    kind = filesystem_of(directory)[0]
    return Place(RESIDENT, directory, kind, f"{kind}, resident in the page cache", cold=False)


@contextmanager
def same_files_cold(resident: Place) -> Iterator[Place]:
    """Describe the same files with the page cache emptied.

    Raises
    ------
    PlaceError
        The file system lives in the page cache.
    """
    if resident.filesystem == "tmpfs":
        raise PlaceError("files on tmpfs are always resident")
    title = f"{resident.filesystem}, cold"
    yield Place(COLD, resident.directory, resident.filesystem, title, cold=True)


@contextmanager
def tmpfs_place(resident: Place, work: Path, nbytes: int) -> Iterator[Place]:
    """Copy the inputs to tmpfs: /dev/shm, or one mounted for the purpose where that is small.

    Raises
    ------
    PlaceError
        There is no room, and mounting is not allowed.
    """
    wanted = round(nbytes * _ROOM)
    with ExitStack() as stack:
        if _SHM.is_dir() and _free_nbytes(_SHM) >= wanted:
            directory = _SHM / work.name
            directory.mkdir()
            stack.callback(remove_tree, directory)
        else:
            _need_root("mount a tmpfs, since /dev/shm is too small")
            directory = work / "tmpfs"
            mounting = ("mount", "-t", "tmpfs", "-o", f"size={wanted}", "tmpfs")
            stack.enter_context(_mounted(directory, *mounting))
        _copy_inputs(resident.directory, directory, direct=False)
        yield Place(TMPFS, directory, "tmpfs", "tmpfs", cold=False)


@contextmanager
def zram_place(resident: Place, work: Path, nbytes: int, device: str) -> Iterator[Place]:
    """Copy the inputs to ext4 on an idle zram device.

    Raises
    ------
    PlaceError
        Not root, no such device, or the device is in use.
    """
    _need_root(f"set up {device}")
    control = Path("/sys/block") / Path(device).name
    if not control.is_dir():
        _run_quietly("modprobe", "zram")
    if not control.is_dir():
        raise PlaceError(f"there is no {device}: the zram module is missing")
    if (control / "disksize").read_text().strip() != "0":
        raise PlaceError(f"{device} is in use")
    directory = work / "zram"
    with ExitStack() as stack:
        stack.callback((control / "reset").write_text, "1")
        (control / "disksize").write_text(str(round(nbytes * _ROOM) + (64 << 20)))
        _run("mkfs.ext4", "-q", "-F", "-E", "nodiscard", device)
        stack.enter_context(_mounted(directory, "mount", "-o", "data=ordered", device))
        _copy_inputs(resident.directory, directory, direct=True)
        yield Place(COLD, directory, "ext4 on zram", "ext4 on zram, cold", cold=True)


def remove_tree(directory: Path) -> None:
    """Delete a directory of inputs; one that is gone already is no error."""
    if directory.is_dir():
        for path in directory.iterdir():
            remove_tree(path) if path.is_dir() else path.unlink()
        directory.rmdir()


def _copy_inputs(source: Path, destination: Path, *, direct: bool) -> None:
    for name in (RAW_NAME, MODEL_NAME):
        if (source / name).exists():
            copy_tree(source / name, destination / name, direct=direct)


@contextmanager
def _mounted(directory: Path, *mounting: str) -> Iterator[None]:
    directory.mkdir()
    try:
        _run(*mounting, str(directory))
        try:
            yield
        finally:
            _retry(lambda: _run("umount", str(directory)))
    finally:
        directory.rmdir()


def _retry(do: Callable[[], None]) -> None:
    """Try for a second: a mapping that a peer has just dropped keeps a mount busy for a moment."""
    for _ in range(10):
        try:
            return do()
        except PlaceError:
            time.sleep(0.1)
    return do()


def _need_root(purpose: str) -> None:
    if os.geteuid():
        raise PlaceError(f"only root can {purpose}")


def _free_nbytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise PlaceError(f"there is no program {command[0]}") from None
    if done.returncode:
        raise PlaceError(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")


def _run_quietly(*command: str) -> None:
    """Run a command whose effect is looked at afterwards."""
    try:
        subprocess.run(command, capture_output=True, timeout=60, check=False)
    except FileNotFoundError:
        return


def sync_tree(directory: Path) -> None:
    """Wait until every file below a directory is on its disk, so that its pages are clean."""
    for path in _files_below(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def tree_nbytes(directory: Path) -> int:
    """Bytes of every file below a directory."""
    return sum(path.stat().st_size for path in _files_below(directory))


def _files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())

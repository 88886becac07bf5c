"""What the kernel says in text files: ``/proc`` and ``/sys``."""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
from dataclasses import dataclass, field
from typing import Protocol

_MOST_NBYTES = 64 << 20
_CHUNK_NBYTES = 32 << 10  # /proc/sys refuses reads of megabytes; other files give a page at a time


class System(Protocol):
    """Text files of the kernel; tests hand in recorded trees."""

    def read(self, path: str) -> str | None:
        """Text of an absolute path, up to its end; None where it is missing or may not be read."""

    def listdir(self, path: str) -> tuple[str, ...]:
        """Names in a folder, sorted; none where it is missing or may not be read."""

    def exists(self, path: str) -> bool:
        """Whether the path names something that can be seen."""

    def read_link(self, path: str) -> str | None:
        """Target of a symbolic link, as it is written; None where there is no such link."""

    def cpus(self) -> int:
        """CPUs that this process may run on."""

    def load_average(self) -> float:
        """Runnable tasks, averaged over one minute."""


class Linux:
    """`System` of the running kernel."""

    def read(self, path: str) -> str | None:
        """See `System.read`."""
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return None  # a pipe would keep us waiting, a device never end
            with open(path, "rb", buffering=0) as file:
                return _read_all(file.fileno()).decode("utf-8", "surrogateescape")
        except OSError:  # some files of /sys answer EIO or ENODEV: nothing can be read there
            return None

    def listdir(self, path: str) -> tuple[str, ...]:
        """See `System.listdir`."""
        try:
            return tuple(sorted(os.listdir(path)))
        except OSError:
            return ()

    def exists(self, path: str) -> bool:
        """See `System.exists`."""
        return os.path.exists(path)

    def read_link(self, path: str) -> str | None:
        """See `System.read_link`."""
        try:
            return os.readlink(path)
        except OSError:
            return None

    def cpus(self) -> int:
        """See `System.cpus`."""
        return len(os.sched_getaffinity(0))

    def load_average(self) -> float:
        """See `System.load_average`."""
        return os.getloadavg()[0]


def _read_all(fd: int) -> bytes:
    """Read up to the end, which only a read of nothing tells: the sizes of these files are 0."""
    text = bytearray()
    while chunk := os.read(fd, _CHUNK_NBYTES):
        text += chunk
        if len(text) > _MOST_NBYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return bytes(text)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    mount_point: str
    """Where it is mounted."""
    file_system: str
    """Type, such as "ext4", "tmpfs", "overlay"."""
    options: str
    """Options of the file system, separated by commas."""
    device: str = field(default="", compare=False)
    """``major:minor``, as ``st_dev`` of the files has it."""
    source: str = field(default="", compare=False)
    """What is mounted: a device node, ``server:/export``, ..."""
    mount_id: int = field(default=0, compare=False)
    """Number of the mount."""
    parent_id: int = field(default=-1, compare=False)
    """Number of the mount that it is mounted on."""


def read_mounts(system: System) -> tuple[Mount, ...]:
    """Mounts of this process, in the order in which they were made (proc(5))."""
    return _parse_mounts(system.read("/proc/self/mountinfo") or "")


@functools.lru_cache(maxsize=1)  # mounts seldom change, and to parse them takes longer than to read
def _parse_mounts(text: str) -> tuple[Mount, ...]:
    return tuple(_parse_mount(line) for line in text.split("\n") if " - " in line)


def _parse_mount(line: str) -> Mount:
    left, _, right = line.partition(" - ")
    mount_id, parent_id, device, _, point, *_ = left.split(" ", 5)
    kind, source, options, *_ = [*right.split(" ", 2), "", ""]
    return Mount(
        _unescape(point), kind, options, device, _unescape(source), int(mount_id), int(parent_id)
    )


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline and backslash."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)


_OCTAL = re.compile(r"\\([0-7]{3})")

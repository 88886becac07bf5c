"""What the kernel says in text files: ``/proc`` and ``/sys``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class System(Protocol):
    """Text files of the kernel; tests hand in recorded trees."""

    def read(self, path: str) -> str | None:
        """Text of an absolute path; None where it is missing or may not be read."""

    def cpus(self) -> int:
        """CPUs that this process may run on."""

    def load_average(self) -> float:
        """Runnable tasks, averaged over one minute."""


class Linux:
    """`System` of the running kernel."""

    def read(self, path: str) -> str | None:
        """See `System.read`."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
        except (FileNotFoundError, PermissionError):
            return None

    def cpus(self) -> int:
        """See `System.cpus`."""
        return len(os.sched_getaffinity(0))

    def load_average(self) -> float:
        """See `System.load_average`."""
        return os.getloadavg()[0]


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    mount_point: str
    """Where it is mounted."""
    file_system: str
    """Type, such as "ext4", "tmpfs", "overlay"."""
    options: str
    """Options of the file system, separated by commas."""


def read_mounts(system: System) -> tuple[Mount, ...]:
    """Mounts of this process, in the order in which they were made (proc(5))."""
    text = system.read("/proc/self/mountinfo") or ""
    return tuple(_parse_mount(line) for line in text.splitlines() if " - " in line)


def _parse_mount(line: str) -> Mount:
    left, _, right = line.partition(" - ")
    fields = right.split(" ")
    # The kernel writes space, tab, newline and backslash in paths as octal escapes.
    mount_point = left.split(" ")[4].encode("latin-1", "surrogateescape").decode("unicode_escape")
    mount_point = mount_point.encode("latin-1", "replace").decode("utf-8", "surrogateescape")
    return Mount(mount_point, fields[0], fields[2] if len(fields) > 2 else "")

"""What the kernel says in text files: ``/proc`` and ``/sys``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
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
            with open(path, "rb", buffering=0) as file:
                return file.read().decode("utf-8", "surrogateescape")
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
    mount_id: int = field(default=0, compare=False)
    """Number of the mount."""
    parent_id: int = field(default=-1, compare=False)
    """Number of the mount that it is mounted on."""


def read_mounts(system: System) -> tuple[Mount, ...]:
    """Mounts of this process, in the order in which they were made (proc(5))."""
    text = system.read("/proc/self/mountinfo") or ""
    return tuple(_parse_mount(line) for line in text.split("\n") if " - " in line)


def _parse_mount(line: str) -> Mount:
    left, _, right = line.partition(" - ")
    mount_id, parent_id, _, _, mount_point, *_ = left.split(" ", 5)
    fields = right.split(" ", 2)
    if "\\" in mount_point:  # space, tab, newline and backslash are octal escapes
        mount_point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), mount_point)
    options = fields[2] if len(fields) > 2 else ""
    return Mount(mount_point, fields[0], options, int(mount_id), int(parent_id))


_OCTAL = re.compile(r"\\([0-7]{3})")

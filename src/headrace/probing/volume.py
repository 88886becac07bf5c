"""Facts of the volume under a file: file system, O_DIRECT and its alignment."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from headrace.bindings.posix import DirectAlignment
from headrace.bindings.sysfs import Mount
from headrace.options import PAGE_NBYTES
from headrace.probing.fact import Fact
from headrace.storage.source import Source

_UNKNOWN = Mount("", "unknown", "")
_SAFE_ALIGNMENT = DirectAlignment(PAGE_NBYTES, PAGE_NBYTES)
# Where the kernel does not state it (before Linux 6.1, or tmpfs), a page satisfies all disks.


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """What the planner needs to know of the file system under one file."""

    file_system: str
    """Type, as in /proc/self/mountinfo; "unknown" where no mount matches."""
    direct: Fact
    """Whether the file opens with O_DIRECT."""
    alignment: DirectAlignment
    """What O_DIRECT demands."""


def find_mount(path: str, mounts: tuple[Mount, ...]) -> Mount:
    """Mount under a path: the longest mount point above it, and the last of equals."""
    real = os.path.realpath(path)
    best = _UNKNOWN
    for mount in mounts:
        root = mount.mount_point.rstrip("/") + "/"
        above = (real + "/").startswith(root)
        if above and len(mount.mount_point) >= len(best.mount_point):
            best = mount
    return best


def probe_volume(source: Source, mounts: tuple[Mount, ...]) -> VolumeFacts:
    """Read the facts of the volume; leaves the source open with O_DIRECT where that works."""
    mount = find_mount(source.path, mounts)
    try:
        source.open_direct()
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise
        direct = Fact(
            "O_DIRECT",
            False,
            f"refused by {mount.file_system}",
            f"open(O_DIRECT): {os.strerror(error.errno or 0)}",
            "keep the file on ext4, XFS or another file system with O_DIRECT",
        )
        return VolumeFacts(mount.file_system, direct, _SAFE_ALIGNMENT)
    stated = _stated_alignment(source)
    alignment = stated or _SAFE_ALIGNMENT
    found = f"memory {alignment.memory}, offset {alignment.offset} bytes on {mount.file_system}"
    why = "statx(STATX_DIOALIGN)" if stated else "open(O_DIRECT); alignment not stated, so a page"
    return VolumeFacts(mount.file_system, Fact("O_DIRECT", True, found, why), alignment)


def _stated_alignment(source: Source) -> DirectAlignment | None:
    try:
        return source.files.direct_alignment(source.fd)
    except OSError:  # a kernel without statx: nothing is stated
        return None

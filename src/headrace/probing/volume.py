"""Facts of the volume under a file: file system, O_DIRECT and its alignment."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from headrace.bindings.posix import DirectAlignment
from headrace.bindings.sysfs import Mount
from headrace.options import PAGE_NBYTES
from headrace.probing.fact import Fact
from headrace.storage.open_file import OpenFile

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
    """Mount under a path, as the kernel walks to it.

    Parameters
    ----------
    path
        Any path; symbolic links count where they lead.
    mounts
        As `read_mounts` gives them.
    """
    real = os.path.realpath(path) + "/"
    above = [each for each in mounts if real.startswith(each.mount_point.rstrip("/") + "/")]
    known = {each.mount_id for each in above}
    below = [each for each in above if each.parent_id not in known]
    found = _UNKNOWN
    while below:
        # Of several mounts on one parent, the walk meets the shallowest first: it hides the others.
        found = min(below, key=lambda each: (len(each.mount_point), -each.mount_id))
        below = [each for each in above if each.parent_id == found.mount_id != each.mount_id]
    return found


def probe_volume(file: OpenFile, mounts: tuple[Mount, ...]) -> VolumeFacts:
    """Read the facts of the volume; leaves the file open with O_DIRECT where that works."""
    mount = find_mount(file.path, mounts)
    try:
        file.open_direct()
    except OSError as error:
        if error.errno == errno.ESTALE:  # not this file any more
            raise
        return VolumeFacts(mount.file_system, _refused(mount, error), _SAFE_ALIGNMENT)
    stated = _stated_alignment(file)
    alignment = stated or _SAFE_ALIGNMENT
    found = f"memory {alignment.memory}, offset {alignment.offset} bytes on {mount.file_system}"
    why = "statx(STATX_DIOALIGN)" if stated else "open(O_DIRECT); alignment not stated, so a page"
    return VolumeFacts(mount.file_system, Fact("O_DIRECT", True, found, why), alignment)


def unseen_volume(why: str) -> VolumeFacts:
    """What is known of a volume that was not looked at."""
    return VolumeFacts("unknown", Fact("O_DIRECT", None, "not looked for", why), _SAFE_ALIGNMENT)


def _stated_alignment(file: OpenFile) -> DirectAlignment | None:
    try:
        return file.files.direct_alignment(file.fd)
    except OSError:  # a kernel without statx: nothing is stated
        return None


def _refused(mount: Mount, error: OSError) -> Fact:
    why = f"open(O_DIRECT): {os.strerror(error.errno or 0)}"
    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # nothing that the file system said
        return Fact("O_DIRECT", False, "the file could not be opened a second time", why)
    found = f"refused by {mount.file_system}"
    remedy = "keep the file on ext4, XFS or another file system with O_DIRECT"
    return Fact("O_DIRECT", False, found, why, remedy)

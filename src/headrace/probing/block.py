"""The block device under a mount: what kind it is, and what it lies on."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from headrace.bindings.sysfs import System

_MOST_LAYERS = 8  # of dm on md on partitions: far more than anybody stacks

_KINDS = (
    (re.compile(r"nvme\d"), "NVMe"),
    (re.compile(r"md"), "RAID"),
    (re.compile(r"dm-"), "device mapper"),
    (re.compile(r"vd[a-z]"), "virtio disk"),
    (re.compile(r"xvd"), "Xen disk"),
    (re.compile(r"loop"), "loop"),
    (re.compile(r"zram"), "zram"),
    (re.compile(r"pmem"), "persistent memory"),
    (re.compile(r"nbd|rbd"), "network block device"),
    (re.compile(r"sd[a-z]"), "SCSI or SATA disk"),
)


@dataclass(frozen=True, slots=True)
class Disk:
    """A whole disk."""

    name: str
    """Name in ``/sys/block``."""
    folder: str
    """Its folder in ``/sys``, without symbolic links."""
    kind: str
    """"NVMe", "RAID", "virtio disk", ...; "disk" where the name says nothing."""
    detail: str
    """RAID level, dm target, NVMe transport or file of the loop; "" where there is none."""
    parts: tuple[Disk, ...] = ()
    """Disks that it is made of."""

    def describe(self) -> str:
        """Name, kind, detail, and what it is made of."""
        text = f"{self.name} ({self.kind}{', ' + self.detail if self.detail else ''})"
        if self.parts:
            text += " on " + ", ".join(part.describe() for part in self.parts)
        return text

    @property
    def layers(self) -> tuple[Disk, ...]:
        """Itself and all that is below it."""
        return (self, *(layer for part in self.parts for layer in part.layers))

    @property
    def leaves(self) -> tuple[Disk, ...]:
        """The disks at the bottom."""
        return tuple(layer for layer in self.layers if not layer.parts)


def find_disk(system: System, device: str, source: str) -> Disk | None:
    """The disk that a device number, or else a device node, belongs to.

    Parameters
    ----------
    system
        Where ``/sys`` is read.
    device
        ``major:minor``; file systems such as btrfs have made-up ones.
    source
        What was mounted, such as ``/dev/nvme0n1p1``; "" where that is not known.
    """
    link = f"/sys/dev/block/{device}"
    target = system.read_link(link)
    if target is None and source.startswith("/dev/"):
        node = posixpath.basename(system.read_link(source) or source)
        link = f"/sys/class/block/{node}"
        target = system.read_link(link)
    if target is None:
        return None
    return _read_disk(
        system, posixpath.normpath(posixpath.join(posixpath.dirname(link), target)), 0
    )


def _read_disk(system: System, folder: str, depth: int) -> Disk:
    if system.exists(f"{folder}/partition"):
        folder = posixpath.dirname(folder)
    name = posixpath.basename(folder)
    kind = next((kind for pattern, kind in _KINDS if pattern.match(name)), "disk")
    parts: list[Disk] = []
    for slave in system.listdir(f"{folder}/slaves") if depth < _MOST_LAYERS else ():
        link = f"/sys/class/block/{slave}"
        target = system.read_link(link)
        if target is not None:
            below = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
            parts.append(_read_disk(system, below, depth + 1))
    return Disk(name, folder, kind, _detail(system, folder), tuple(parts))


def _detail(system: System, folder: str) -> str:
    for key in ("md/level", "dm/uuid", "loop/backing_file", "device/transport"):
        text = (system.read(f"{folder}/{key}") or "").strip()
        if key == "dm/uuid":
            text = text.partition("-")[0]  # CRYPT, LVM, mpath: the rest is a name
        if text:
            return text
    return ""

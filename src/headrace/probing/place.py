"""Facts of the place under a path: mount, file system, device, encryption, udev's record."""

from __future__ import annotations

import re
from types import MappingProxyType

from headrace.bindings.sysfs import Mount, System
from headrace.probing.block import Disk, find_disk
from headrace.probing.fact import Fact

NETWORK = MappingProxyType(
    {
        "nfs": "NFS",
        "nfs4": "NFS",
        "cifs": "SMB",
        "smb3": "SMB",
        "lustre": "Lustre",
        "wekafs": "WekaFS",
        "gpfs": "GPFS",
        "beegfs": "BeeGFS",
        "panfs": "PanFS",
        "scatefs": "ScaTeFS",
        "ceph": "CephFS",
        "9p": "9P of a hypervisor",
        "virtiofs": "VirtioFS",
    }
)
"""File systems whose bytes come from another machine, and what people call them."""

_GDS_LOCAL = ("ext4", "xfs")
_GDS_NETWORK = ("lustre", "wekafs", "gpfs", "beegfs", "scatefs", "virtiofs", "panfs")
# File systems that GDS serves (NVIDIA's GDS documentation, as FACTS.md lists them).
_REMEDY = "keep the file on ext4 or XFS on local NVMe, or on a parallel file system with GDS"


def probe_place(system: System, mount: Mount) -> tuple[Fact, ...]:
    """Everything that the kernel's text files say of a mount."""
    disk = find_disk(system, mount.device, mount.source)
    facts = [_mount_fact(mount), _kind_fact(mount, disk), _gds_fact(mount, disk)]
    if mount.file_system == "ext4":
        facts.append(_ordered_fact(mount))
    facts.append(_overlay_fact(mount))
    facts.append(_plain_fact(mount, disk))
    if disk is not None:
        facts.append(_udev_record_fact(system, mount, disk))
    return tuple(facts)


def _mount_fact(mount: Mount) -> Fact:
    name, path = "mount", "/proc/self/mountinfo"
    if not mount.mount_point:
        return Fact(name, None, "no mount matches the path", path)
    found = f"{mount.file_system} at {mount.mount_point} from {mount.source} ({mount.options})"
    return Fact(name, True, found, path)


def is_rdma(mount: Mount) -> bool:
    """Whether an NFS mount goes over RDMA."""
    return bool(re.search(r"(^|,)(proto=rdma|rdma)(,|$)", mount.options))


def _kind_fact(mount: Mount, disk: Disk | None) -> Fact:
    """What the bytes lie on; whether that is a local disk."""
    name = "device"
    if disk is not None:
        return Fact(name, True, disk.describe(), f"/sys/dev/block/{mount.device}, slaves")
    kind = mount.file_system
    why = "type and options in /proc/self/mountinfo"
    if kind in ("nfs", "nfs4"):
        return Fact(name, False, f"NFS {'with' if is_rdma(mount) else 'without'} RDMA", why)
    if kind in NETWORK:
        return Fact(name, False, f"network: {NETWORK[kind]}", why)
    if kind.startswith("fuse"):
        label = "3FS (FUSE)" if "3fs" in f"{kind},{mount.source}".lower() else f"FUSE: {kind}"
        return Fact(name, False, label, why)
    if kind in ("tmpfs", "ramfs", "hugetlbfs"):
        return Fact(name, False, f"memory: {kind}", why)
    remedy = "look from the host, or name a path on a volume" if kind == "overlay" else ""
    return Fact(name, None, f"unknown, under {kind}", f"no /sys/dev/block/{mount.device}", remedy)


def _gds_fact(mount: Mount, disk: Disk | None) -> Fact:
    """Whether GDS serves this file system on this device at all."""
    name, kind = "GDS file system", mount.file_system
    why = "NVIDIA's list of file systems for GDS"
    if kind in _GDS_NETWORK:
        return Fact(name, True, kind, why)
    if kind in ("nfs", "nfs4"):
        if is_rdma(mount):
            return Fact(name, True, "NFS over RDMA", f"{why}; proto=rdma")
        remedy = "mount it with proto=rdma (server, NIC and nvidia-fs with rpcrdma permitting)"
        return Fact(name, False, "NFS without RDMA", f"{why}; no proto=rdma", remedy)
    if kind not in _GDS_LOCAL:
        return Fact(name, False, kind, why, _REMEDY)
    if disk is None:
        return Fact(name, None, f"{kind} on an unknown device", why)
    if all(leaf.kind == "NVMe" for leaf in disk.leaves):
        return Fact(name, True, f"{kind} on {disk.describe()}", why)
    found = f"{kind} on {disk.describe()}, which is no NVMe"
    return Fact(name, False, found, why, _REMEDY)


def _ordered_fact(mount: Mount) -> Fact:
    name, why = "data=ordered", "options in /proc/self/mountinfo; cuFile looks for this one"
    if "data=ordered" in mount.options.split(","):
        return Fact(name, True, "data=ordered", why)
    found = next((o for o in mount.options.split(",") if o.startswith("data=")), "not shown")
    remedy = f"mount -o remount,data=ordered {mount.mount_point}, or unmount and mount it so"
    return Fact(name, False, found, why, remedy)


def _overlay_fact(mount: Mount) -> Fact:
    name, why = "overlay", "type in /proc/self/mountinfo"
    if mount.file_system != "overlay":
        return Fact(name, False, f"no, {mount.file_system}", why)
    remedy = "mount a volume into the container (-v /data:/data) and keep the file there"
    return Fact(name, True, "the file lies in a container's image or its upper layer", why, remedy)


def _plain_fact(mount: Mount, disk: Disk | None) -> Fact:
    """Whether the bytes on the device are those of the file."""
    name, why = "neither encrypted nor compressed", "mount options, dm/uuid in /sys"
    remedy = "keep the file on a volume without that: no DMA can undo it"
    layers = disk.layers if disk else ()
    if crypt := [layer.name for layer in layers if layer.detail == "CRYPT"]:
        return Fact(name, False, f"dm-crypt: {', '.join(crypt)}", why, remedy)
    if match := re.search(r"(?:^|,)(compress(?:-force)?(?:=\w+)?)", mount.options):
        return Fact(name, False, f"{mount.file_system} with {match[1]}", why, remedy)
    if mount.file_system in ("ecryptfs", "zfs", "squashfs", "fuse.gocryptfs"):
        return Fact(name, False, mount.file_system, why, remedy)
    if mount.file_system in ("ext4", "f2fs") and "inlinecrypt" in mount.options.split(","):
        return Fact(name, None, "fscrypt is possible (inlinecrypt)", why)
    return Fact(name, True, "no sign of either", why)


def _udev_record_fact(system: System, mount: Mount, disk: Disk) -> Fact:
    name = "udev record"
    number = mount.device
    path = f"/run/udev/data/b{number}"
    text = system.read(path)
    if text is None:
        remedy = "mount the host's /run/udev into the container, or start systemd-udevd"
        found = f"none for {disk.name}"
        return Fact(name, False, found, f"{path} cannot be read; cuFile answers 5027", remedy)
    if "ID_FS_USAGE=filesystem" in text:
        return Fact(name, True, f"names the file system of {disk.name}", path)
    remedy = f"udevadm trigger --settle /dev/{disk.name}, as root"
    return Fact(name, False, "without ID_FS_USAGE", path, remedy)

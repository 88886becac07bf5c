from __future__ import annotations

import pytest

from headrace.bindings.sysfs import Mount
from headrace.probing.fact import Fact
from headrace.probing.place import probe_place
from tests.support import RecordedSystem

BLOCK = "/sys/devices/virtual/block"
NVME = "/sys/devices/pci0000:00/nvme/nvme0/nvme0n1"


def facts(mount: Mount, system: RecordedSystem | None = None) -> dict[str, Fact]:
    return {fact.name: fact for fact in probe_place(system or RecordedSystem(), mount)}


def mounted(kind: str, source: str, options: str = "rw", device: str = "0:50") -> Mount:
    return Mount("/data", kind, options, device, source)


@pytest.mark.parametrize(
    ("kind", "source", "options", "device", "gds"),
    [
        ("nfs4", "srv:/x", "rw,vers=4.2,proto=rdma", "NFS with RDMA", True),
        ("nfs", "srv:/x", "rw,vers=3,rdma,port=20049", "NFS with RDMA", True),
        ("nfs", "srv:/x", "rw,proto=tcp", "NFS without RDMA", False),
        ("cifs", "//srv/x", "rw", "network: SMB", False),
        ("lustre", "10.0.0.1@o2ib:/scratch", "rw", "network: Lustre", True),
        ("wekafs", "backend/fs", "rw", "network: WekaFS", True),
        ("gpfs", "fs1", "rw", "network: GPFS", True),
        ("beegfs", "beegfs_nodev", "rw", "network: BeeGFS", True),
        ("virtiofs", "share", "rw", "network: VirtioFS", True),
        ("fuse.hf3fs", "hf3fs.stage", "rw", "3FS (FUSE)", False),
        ("fuse.sshfs", "me@srv:/", "rw", "FUSE: fuse.sshfs", False),
        ("tmpfs", "tmpfs", "rw", "memory: tmpfs", False),
        ("overlay", "overlay", "rw", "unknown, under overlay", False),
    ],
)
def test_mounts_without_a_block_device_are_told_apart(
    kind: str, source: str, options: str, device: str, gds: bool
) -> None:
    found = facts(mounted(kind, source, options))
    assert found["device"].found == device
    assert found["GDS file system"].holds is gds
    assert found["overlay"].holds is (kind == "overlay")
    assert "udev record" not in found


def stack(*names: str, **texts: str) -> RecordedSystem:
    """Disks that each lie on the next; the last is an NVMe disk."""
    recorded, links = {f"{NVME}/queue/logical_block_size": "512"}, {}
    links["/sys/class/block/nvme0n1"] = "../.." + NVME.removeprefix("/sys")
    for name, below in zip(names, (*names[1:], "nvme0n1"), strict=True):
        links[f"/sys/class/block/{name}"] = f"../../devices/virtual/block/{name}"
        links[f"{BLOCK}/{name}/slaves/{below}"] = "../elsewhere"
    for key, text in texts.items():
        name, _, file = key.partition("__")
        recorded[f"{BLOCK}/{name.replace('_', '-')}/{file.replace('__', '/')}"] = text
    return RecordedSystem(recorded, links=links)


def test_raid_of_nvme_is_described_with_its_level() -> None:
    system = stack("md0", md0__md__level="raid0\n")
    found = facts(mounted("xfs", "/dev/md0"), system)
    assert found["device"].found == "md0 (RAID, raid0) on nvme0n1 (NVMe)"
    assert found["GDS file system"].holds


def test_encrypted_device_is_seen_below_a_logical_volume() -> None:
    system = stack("dm-1", "dm-0", dm_1__dm__uuid="LVM-abc\n", dm_0__dm__uuid="CRYPT-LUKS2-abc\n")
    system.links = {**system.links, "/dev/mapper/vg-data": "../dm-1"}
    plain = facts(mounted("xfs", "/dev/mapper/vg-data"), system)["neither encrypted nor compressed"]
    assert (plain.holds, plain.found) == (False, "dm-crypt: dm-0")


def test_disks_that_lie_on_each_other_in_a_ring_end() -> None:
    system = stack("dm-0", "dm-1")
    system.links = {**system.links, f"{BLOCK}/dm-1/slaves/dm-0": "../elsewhere"}
    assert facts(mounted("xfs", "/dev/dm-0"), system)["device"].holds


@pytest.mark.parametrize("name", ["zram0", "loop0", "vda", "sda", "pmem0", "nbd0"])
def test_disk_that_is_no_nvme_is_no_place_for_gds(name: str) -> None:
    link = {f"/sys/class/block/{name}": f"../../devices/virtual/block/{name}"}
    found = facts(mounted("ext4", f"/dev/{name}"), RecordedSystem(links=link))
    assert found["GDS file system"].holds is False
    assert "no NVMe" in found["GDS file system"].found


def test_unknown_mount_is_unknown() -> None:
    found = facts(Mount("", "unknown", ""))
    assert found["mount"].holds is None
    assert found["device"].holds is None

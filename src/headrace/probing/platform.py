"""Facts of the platform: container, virtual machine, IOMMU, ACS, udev, limits, io_uring."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable

from headrace.bindings.sysfs import System
from headrace.probing.fact import Fact
from headrace.probing.sight import sees_proc, sees_sys

_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_GROUPS = re.compile(r"docker|kubepods|containerd|libpod|lxc|crio|garden")
_VENDORS = re.compile(
    r"QEMU|KVM|VMware|VirtualBox|Xen|Bochs|Parallels|Amazon EC2|Google Compute|Virtual Machine|"
    r"OpenStack",
    re.IGNORECASE,
)
_SMALL_LIMIT = 64 << 20
# Below this a bounded pool of pinned blocks, or cuFile's bounce buffers, may not fit (RLIMIT).


def probe_platform(system: System, ask_io_uring: Callable[[], int]) -> tuple[Fact, ...]:
    """Everything about the platform that decides, or explains, a route."""
    return (
        _udev_fact(system),
        _container_fact(system),
        _machine_fact(system),
        _iommu_fact(system),
        _acs_fact(system),
        _locked_memory_fact(system),
        _io_uring_fact(system, ask_io_uring),
    )


def _udev_fact(system: System) -> Fact:
    name, path = "udev", "/run/udev"
    if system.exists(f"{path}/data") or system.exists(f"{path}/control"):
        return Fact(name, True, f"{path} is there", path)
    remedy = "in a container mount the host's: -v /run/udev:/run/udev:ro; else start systemd-udevd"
    return Fact(name, False, f"no {path}, so cuFile learns nothing of block devices", path, remedy)


def _container_fact(system: System) -> Fact:
    name = "container"
    for path in _CONTAINER_FILES:
        if system.exists(path):
            return Fact(name, True, f"{path} is there", path)
    groups = system.read("/proc/1/cgroup") or system.read("/proc/self/cgroup") or ""
    if match := _CONTAINER_GROUPS.search(groups):
        return Fact(name, True, f"control group of {match[0]}", "/proc/1/cgroup")
    return Fact(name, False, "no sign of one", f"{', '.join(_CONTAINER_FILES)}, /proc/1/cgroup")


def _machine_fact(system: System) -> Fact:
    name = "virtual machine"
    product = " ".join(
        (system.read(f"/sys/class/dmi/id/{key}") or "").strip()
        for key in ("sys_vendor", "product_name")
    ).strip()
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", system.read("/proc/cpuinfo") or "", re.M)
    if flags:
        return Fact(name, True, product or "a hypervisor", "flags in /proc/cpuinfo, DMI")
    if _VENDORS.search(product):
        return Fact(name, True, product, "/sys/class/dmi/id")
    why = "no hypervisor flag in /proc/cpuinfo; /sys/class/dmi/id"
    if not product and not (sees_proc(system) and sees_sys(system)):
        return Fact(name, None, "unknown", "/proc or /sys is hidden")
    return Fact(name, False, product or "no sign of one", why)


def _iommu_fact(system: System) -> Fact:
    name, path = "IOMMU", "/sys/kernel/iommu_groups"
    groups = len(system.listdir(path))
    command = (system.read("/proc/cmdline") or "").split()
    given = [word for word in command if "iommu" in word]
    found = f"{groups} groups{', ' + ' '.join(given) if given else ''}"
    why = f"{path}, /proc/cmdline"
    if not groups and not given and not sees_sys(system):
        return Fact(name, None, "unknown", "/sys is hidden")
    if not groups:
        return Fact(name, False, f"off{', ' + ' '.join(given) if given else ''}", why)
    if "iommu=pt" in given or "iommu.passthrough=1" in given:
        return Fact(name, True, f"{found}: passthrough", why)
    remedy = "iommu=pt, or off, lets peer-to-peer transfers pass at full speed (bare metal, x86)"
    return Fact(name, True, found, why, remedy)


def _acs_fact(system: System) -> Fact:
    name, path = "PCIe ACS", "/proc/driver/nvidia-fs/bridges"
    text = system.read(path)
    if text is None:
        remedy = "as root: lspci -vvv | grep ACSCtl; or gdscheck -p"
        why = "the ACS capability in PCI configuration space can be read by root alone"
        return Fact(name, None, "unknown", why, remedy)
    bridges = text.split()
    if not bridges:
        return Fact(name, False, "on no bridge", path)
    remedy = "switch ACS off in the firmware, or as root with setpci, for full peer-to-peer speed"
    return Fact(name, True, f"on {len(bridges)} bridges: {' '.join(bridges[:4])}", path, remedy)


def _locked_memory_fact(system: System) -> Fact:
    name, path = "pinned-memory limit", "/proc/self/limits"
    match = re.search(r"^Max locked memory\s+(\S+)", system.read(path) or "", re.MULTILINE)
    if match is None:
        return Fact(name, None, "unknown", f"{path} cannot be read")
    if match[1] == "unlimited":
        return Fact(name, True, "unlimited", f"Max locked memory in {path}")
    enough = int(match[1]) >= _SMALL_LIMIT
    # CUDA's driver does not count against it; RDMA, io_uring and libcufile_rdma do.
    remedy = "" if enough else "ulimit -l unlimited (container: --ulimit memlock=-1), for RDMA"
    found = f"{match[1]} bytes; CUDA's own page-locking is not counted"
    return Fact(name, enough, found, f"Max locked memory in {path}", remedy)


def _io_uring_fact(system: System, ask: Callable[[], int]) -> Fact:
    name, path = "io_uring", "/proc/sys/kernel/io_uring_disabled"
    setting = (system.read(path) or "").strip()
    try:
        code = ask()
    except OSError as error:
        return Fact(name, None, "unknown", f"io_uring_setup: {error}")
    state = f"{path} is {setting}" if setting else f"no {path}"
    if code == 0:
        return Fact(name, True, "allowed", f"io_uring_setup(2); {state}")
    said = f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
    remedy = "use Linux 5.6 or later with CONFIG_IO_URING"
    if code == errno.EPERM:
        remedy = "sysctl kernel.io_uring_disabled=0, or a container profile that allows io_uring"
    return Fact(name, False, said, f"io_uring_setup(2); {state}", remedy)

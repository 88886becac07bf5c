from __future__ import annotations

import errno

import pytest

from headrace.bindings.uring import io_uring_errno
from headrace.probing.fact import Fact
from headrace.probing.machine import probe_pressure
from headrace.probing.platform import probe_platform
from tests.support import RecordedSystem


def facts(texts: dict[str, str], code: int = 0) -> dict[str, Fact]:
    return {fact.name: fact for fact in probe_platform(RecordedSystem(texts), lambda: code)}


@pytest.mark.parametrize(
    ("texts", "inside"),
    [
        ({"/.dockerenv": ""}, True),
        ({"/run/.containerenv": ""}, True),
        ({"/proc/1/cgroup": "0::/kubepods.slice/pod1\n"}, True),
        ({"/proc/1/cgroup": "0::/init.scope\n"}, False),
        ({}, False),
    ],
)
def test_container_is_seen_by_its_files_or_its_group(texts: dict[str, str], inside: bool) -> None:
    assert facts(texts)["container"].holds is inside


@pytest.mark.parametrize(
    ("texts", "virtual"),
    [
        ({"/proc/cpuinfo": "flags\t\t: fpu hypervisor vme\n"}, True),
        ({"/sys/class/dmi/id/sys_vendor": "QEMU\n"}, True),
        ({"/proc/cpuinfo": "flags\t: fpu\n", "/sys/class/dmi/id/sys_vendor": "Dell Inc.\n"}, False),
        ({"/sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, True),
    ],
)
def test_virtual_machine_is_seen_by_flag_or_vendor(texts: dict[str, str], virtual: bool) -> None:
    assert facts(texts)["virtual machine"].holds is virtual


def test_iommu_in_passthrough_needs_no_change() -> None:
    groups = {f"/sys/kernel/iommu_groups/{n}/type": "DMA" for n in range(3)}
    on = facts({**groups, "/proc/cmdline": "ro quiet"})["IOMMU"]
    assert (on.holds, on.found[:8]) == (True, "3 groups")
    assert "iommu=pt" in on.remedy
    assert facts({**groups, "/proc/cmdline": "ro iommu=pt"})["IOMMU"].remedy == ""
    assert facts({"/proc/cmdline": "intel_iommu=off"})["IOMMU"].found == "off, intel_iommu=off"


def test_acs_needs_root_unless_nvidia_fs_tells() -> None:
    assert facts({})["PCIe ACS"].holds is None
    assert "root" in facts({})["PCIe ACS"].why
    path = "/proc/driver/nvidia-fs/bridges"
    assert facts({path: ""})["PCIe ACS"].holds is False
    assert "0000:15:01.0" in facts({path: "0000:15:01.0\n"})["PCIe ACS"].found


@pytest.mark.parametrize(
    ("limit", "enough"), [("unlimited", True), ("8388608", False), ("134217728", True)]
)
def test_limit_of_locked_memory_is_read(limit: str, enough: bool) -> None:
    text = f"Max locked memory         {limit}             {limit}              bytes\n"
    assert facts({"/proc/self/limits": text})["pinned-memory limit"].holds is enough


@pytest.mark.parametrize(
    ("code", "allowed", "remedy"),
    [(0, True, ""), (errno.ENOSYS, False, "CONFIG_IO_URING"), (errno.EPERM, False, "sysctl")],
)
def test_io_uring_is_what_the_kernel_answers(code: int, allowed: bool, remedy: str) -> None:
    fact = facts({}, code)["io_uring"]
    assert fact.holds is allowed
    assert remedy in fact.remedy


def test_running_kernel_answers_about_io_uring_and_makes_no_ring() -> None:
    assert io_uring_errno() in (0, errno.ENOSYS, errno.EPERM)


@pytest.mark.parametrize(
    ("text", "pressed"),
    [
        ("some avg10=0.50 avg60=0 avg300=0 total=1\n", False),
        ("some avg10=42.00 avg60=0 avg300=0 total=1\n", True),
        ("", None),
    ],
)
def test_pressure_is_the_share_of_waiting_tasks(text: str, pressed: bool | None) -> None:
    assert probe_pressure(RecordedSystem({"/proc/pressure/cpu": text})).holds is pressed

"""Whether the kernel's text files can be seen at all: in some containers they are hidden."""

from __future__ import annotations

from headrace.bindings.sysfs import System

_PROC = ("/proc/self/mountinfo", "/proc/modules", "/proc/cpuinfo", "/proc/meminfo")
_SYS = ("/sys/bus", "/sys/class", "/sys/module", "/sys/kernel", "/sys/block", "/sys/devices")


def sees_proc(system: System) -> bool:
    """Whether ``/proc`` is there; where it is not, what is missing in it proves nothing."""
    return any(system.exists(path) for path in _PROC)


def sees_sys(system: System) -> bool:
    """Whether ``/sys`` is there; likewise."""
    return any(system.exists(path) for path in _SYS)

"""Facts of the machine: memory and CPUs."""

from __future__ import annotations

import re
from functools import cached_property

from headrace.bindings.sysfs import System
from headrace.probing.fact import Fact

_BUSY_LOAD_PER_CPU = 0.75
# Above three runnable tasks for four CPUs, a transfer's own workers would take time from others.

PRESSURE_PERCENT = 10.0
"""Share of the last ten seconds, in percent, from which on waiting tasks count as pressure."""


class MachineFacts:
    """What the planner needs to know of the machine (proc(5)).

    Each is looked at when it is first asked for, and then stays: most transfers need none of those
    that the kernel has to be asked for, and asking takes longer than planning.

    Parameters
    ----------
    system
        Where the facts are read.
    """

    def __init__(self, system: System) -> None:
        self._system = system

    @cached_property
    def cpus(self) -> int:
        """CPUs that this process may run on."""
        return self._system.cpus()

    @cached_property
    def available_nbytes(self) -> int | None:
        """Memory that can be had without swapping, in bytes; None where the kernel does not say."""
        return _available_nbytes(self._system)

    @cached_property
    def busy(self) -> Fact:
        """Whether other work keeps the CPUs busy."""
        load, pressure = self._system.load_average(), probe_pressure(self._system)
        limit = _BUSY_LOAD_PER_CPU * self.cpus
        return Fact(
            "CPUs busy",
            load > limit or pressure.holds is True,
            f"load {load:.2f} on {self.cpus} CPUs; {pressure.found}",
            f"one-minute load average, against {limit:.2f}; {pressure.why}",
            "policy='auto' spends fewer CPU seconds for each byte while this holds",
        )

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Everything as facts, for people."""
        available = self.available_nbytes
        memory = Fact(
            "available memory",
            None if available is None else available > 0,
            "unknown" if available is None else f"{available} bytes",
            "MemAvailable in /proc/meminfo",
        )
        return memory, self.busy


def probe_pressure(system: System) -> Fact:
    """Whether tasks wait for a CPU: pressure stall information (PSI), Linux 4.20 on."""
    name, path = "CPU pressure", "/proc/pressure/cpu"
    match = re.search(r"^some avg10=([\d.]+)", system.read(path) or "", re.MULTILINE)
    if match is None:
        return Fact(name, None, "unknown", f"{path} cannot be read (psi=1 switches it on)")
    found = f"some task waited for a CPU {match[1]} % of the last 10 s"
    return Fact(name, float(match[1]) > PRESSURE_PERCENT, found, f"{path}: {PRESSURE_PERCENT} %")


def _available_nbytes(system: System) -> int | None:
    for line in (system.read("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def storage_read_nbytes(system: System) -> int | None:
    """Bytes that block devices have delivered to this process so far (proc(5), /proc/self/io).

    What the page cache serves does not count, so that the difference around a read tells whether
    storage was touched. All threads count, also those of other work.
    """
    for line in (system.read("/proc/self/io") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return None

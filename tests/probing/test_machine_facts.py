from __future__ import annotations

import pytest

from headrace.bindings.sysfs import Linux
from headrace.probing.machine import MachineFacts, storage_read_nbytes
from tests.support import RecordedSystem

MEMINFO = """\
MemTotal:       131072000 kB
MemFree:         1000000 kB
MemAvailable:   98304000 kB
HugePages_Total:       0
"""


def system(meminfo: str | None = MEMINFO, cpus: int = 8, load: float = 0.0) -> RecordedSystem:
    texts = {} if meminfo is None else {"/proc/meminfo": meminfo}
    return RecordedSystem(texts, cpus, load)


def test_available_memory_is_what_the_kernel_calls_so_and_not_what_is_free() -> None:
    assert MachineFacts(system()).available_nbytes == 98_304_000 * 1024


@pytest.mark.parametrize("meminfo", [None, "", "MemTotal: 5 kB\nMemFree: 3 kB\n"])
def test_kernel_that_does_not_say_is_unknown(meminfo: str | None) -> None:
    machine = MachineFacts(system(meminfo))
    assert machine.available_nbytes is None
    memory, _ = machine.facts
    assert (memory.holds, memory.found) == (None, "unknown")


@pytest.mark.parametrize(
    ("cpus", "load", "busy"),
    [(1, 0.0, False), (4, 3.0, False), (4, 3.01, True), (16, 12.0, False), (16, 400.0, True)],
)
def test_cpus_are_busy_above_three_quarters_of_a_task_each(
    cpus: int, load: float, busy: bool
) -> None:
    machine = MachineFacts(system(cpus=cpus, load=load))
    assert (machine.cpus, machine.busy.holds) == (cpus, busy)
    assert f"{load:.2f} on {cpus} CPUs" in machine.busy.found


def test_facts_are_named_found_and_explained() -> None:
    facts = MachineFacts(system()).facts
    assert [fact.name for fact in facts] == ["available memory", "CPUs busy"]
    for fact in facts:
        assert set(fact.to_dict()) == {"name", "holds", "found", "why", "remedy"}
        assert fact.found
        assert fact.why


def test_running_machine_has_cpus_and_memory() -> None:
    machine = MachineFacts(Linux())
    assert machine.cpus >= 1
    assert machine.available_nbytes is None or machine.available_nbytes > 0


def test_bytes_read_from_storage_are_those_of_the_kernel() -> None:
    text = "rchar: 100\nwchar: 5\nread_bytes: 4096\nwrite_bytes: 0\n"
    assert storage_read_nbytes(RecordedSystem({"/proc/self/io": text})) == 4096


@pytest.mark.parametrize("text", [None, "", "rchar: 1\n"])
def test_bytes_read_from_storage_may_be_unknown(text: str | None) -> None:
    texts = {} if text is None else {"/proc/self/io": text}
    assert storage_read_nbytes(RecordedSystem(texts)) is None

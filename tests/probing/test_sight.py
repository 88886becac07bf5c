"""What cannot be seen is unknown, not absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.probing.cufile_config import probe_cufile_config
from headrace.probing.devices import probe_driver
from headrace.probing.gds import probe_nvidia_fs, probe_p2pdma
from headrace.probing.platform import probe_platform
from headrace.probing.sight import sees_proc, sees_sys
from tests.support import RecordedSystem

NOTHING = RecordedSystem({})


def test_hidden_proc_and_sys_make_facts_unknown() -> None:
    config = probe_cufile_config(NOTHING, {})
    facts = {
        fact.name: fact
        for fact in (
            *probe_nvidia_fs(NOTHING),
            *probe_p2pdma(NOTHING, config, ()),
            *probe_platform(NOTHING, lambda: 0),
            *probe_driver(NOTHING, ()),
        )
    }
    for name in (
        "loadable modules",
        "nvidia-fs",
        "P2PDMA: no NVMe multipath",
        "IOMMU",
        "virtual machine",
        "GPU on the PCI bus",
    ):
        assert (name, facts[name].holds) == (name, None)
        assert "hidden" in facts[name].why


def test_what_is_seen_to_be_absent_is_absent() -> None:
    seen = RecordedSystem({"/proc/cpuinfo": "", "/sys/class": ""})
    assert sees_proc(seen)
    assert sees_sys(seen)
    facts = {fact.name: fact for fact in probe_platform(seen, lambda: 0)}
    assert facts["IOMMU"].holds is False
    assert facts["virtual machine"].holds is False


def test_configuration_that_may_not_be_read_is_not_called_absent(tmp_path: Path) -> None:
    class Locked(RecordedSystem):
        def exists(self, path: str) -> bool:
            return path == "/etc/cufile.json"

    fact = probe_cufile_config(Locked({}), {}).fact
    assert fact.holds is None
    assert "cannot be read" in fact.found


@pytest.mark.parametrize("text", ['"false"', '"yes"', "1", "null", "[]"])
def test_only_true_is_true(text: str) -> None:
    system = RecordedSystem({"/etc/cufile.json": f'{{"properties": {{"use_pci_p2pdma": {text}}}}}'})
    assert not probe_cufile_config(system, {}).uses_p2pdma

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

import headrace
from headrace.bindings.posix import DirectAlignment, PosixFiles
from headrace.errors import DeviceError
from headrace.probing import examination
from headrace.probing.alignment import find_alignment
from headrace.probing.examination import Instruments
from headrace.testing import FakeCuda
from headrace.types import Route
from tests.recorded import TREES, change_tree, diagnose, fact_of, load_tree, verdict_of
from tests.support import RecordedSystem

STATES = {
    # host, cached, mapped, direct, gds
    "bare-metal-nvfs": (True, True, True, True, True),
    "p2pdma": (True, True, True, True, True),
    "container-without-udev": (True, True, True, True, False),
    "microvm": (True, True, True, True, False),
    "lustre-client": (True, True, True, True, True),
    "nfs-rdma-client": (True, True, True, True, True),
    "no-gpu": (True, True, True, True, False),
}
PARAMS = "/proc/driver/nvidia/params"
CONFIG = "/etc/cufile.json"
TRANSPORT = "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/nvme/nvme1/nvme1n1/device/transport"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(8192))
    return path


@pytest.mark.parametrize("name", STATES)
def test_each_recorded_machine_gets_its_verdicts(name: str, file: Path) -> None:
    diagnosis = diagnose(load_tree(name, file.parent), file)
    assert [verdict.route for verdict in diagnosis.routes] == list(Route)
    assert tuple(verdict.available for verdict in diagnosis.routes) == STATES[name]
    assert diagnosis.works


def test_every_tree_is_tested() -> None:
    assert {path.stem for path in TREES.glob("*.txt")} == set(STATES)


@pytest.mark.parametrize("name", STATES)
def test_what_cannot_serve_says_why_and_what_would_change_it(name: str, file: Path) -> None:
    for verdict in diagnose(load_tree(name, file.parent), file).routes:
        assert verdict.why
        assert verdict.remedy or verdict.available


@pytest.mark.parametrize("name", STATES)
def test_json_has_the_keys_of_the_public_surface(name: str, file: Path) -> None:
    diagnosis = diagnose(load_tree(name, file.parent), file)
    document = json.loads(json.dumps(diagnosis.to_dict()))
    assert set(document) == {"facts", "routes"}
    for fact in document["facts"]:
        assert set(fact) == {"name", "holds", "found", "why", "remedy"}
        assert fact["holds"] in (True, False, None)
        assert fact["found"]
        assert fact["why"]
    for route in document["routes"]:
        assert set(route) == {"route", "available", "why", "remedy"}
    names = [fact["name"] for fact in document["facts"]]
    assert len(set(names)) == len(names)


def test_nvidia_fs_is_named_as_the_way(file: Path) -> None:
    gds = verdict_of(diagnose(load_tree("bare-metal-nvfs", file.parent), file), "gds")
    assert gds.why.startswith("nvidia-fs: loaded, version: 2.26")


def test_p2pdma_is_named_as_the_way(file: Path) -> None:
    gds = verdict_of(diagnose(load_tree("p2pdma", file.parent), file), "gds")
    assert gds.why.startswith("P2PDMA: every condition is met")


@pytest.mark.parametrize(
    ("path", "text", "why", "remedy"),
    [
        ("/boot/config-6.8.0-60-generic", "CONFIG_PCI=y\n", "kernel option", "CONFIG_PCI_P2PDMA=y"),
        ("/proc/sys/kernel/osrelease", "6.1.0\n", "kernel version", "Linux 6.2"),
        (
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed\n",
            "open driver",
            "open driver, 565",
        ),
        (
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release\n",
            "open driver",
            "open driver, 565",
        ),
        (PARAMS, 'RegistryDwords: "RMForceStaticBar1=1"\n', "driver options", "IomapWC=1"),
        (PARAMS, 'RegistryDwords: ""\n', "driver options", "/etc/modprobe.d"),
        (CONFIG, '{"properties": {"use_pci_p2pdma": false}}', "use_pci_p2pdma", "cufile.json"),
        (CONFIG, None, "use_pci_p2pdma", "cufile.json"),
        ("/sys/module/nvme_core/parameters/multipath", "Y\n", "multipath", "multipath=N"),
        (
            "/proc/driver/nvidia/gpus/0000:19:00.0/information",
            "Model:  NVIDIA GeForce RTX 4090\n",
            "GPU",
            "nvidia-fs",
        ),
        ("/run/udev/data/b259:3", None, "udev record", "/run/udev"),
        (TRANSPORT, "tcp\n", "P2PDMA reaches local NVMe", "local NVMe"),
        ("/proc/modules", None, "would not come back", "kernel with modules"),
    ],
)
def test_p2pdma_with_one_condition_missing_names_it(
    path: str, text: str | None, why: str, remedy: str, file: Path
) -> None:
    tree = change_tree(load_tree("p2pdma", file.parent), {path: text})
    gds = verdict_of(diagnose(tree, file), "gds")
    if path == "/proc/sys/kernel/osrelease":
        assert gds.available is not True
    else:
        assert gds.available is False
    assert why in gds.why
    assert remedy in gds.remedy
    assert verdict_of(diagnose(tree, file), "cached").available


def test_only_compatibility_mode_is_said_where_nothing_else_would_serve(file: Path) -> None:
    tree = change_tree(load_tree("p2pdma", file.parent), {CONFIG: "{}"})
    assert "only cuFile's compatibility mode" in verdict_of(diagnose(tree, file), "gds").why
    off = '{"properties": {"allow_compat_mode": false}}'
    gds = verdict_of(diagnose(change_tree(tree, {CONFIG: off}), file), "gds")
    assert "its compatibility mode is off" in gds.why


def test_variables_of_cufile_come_before_its_file(file: Path) -> None:
    tree = change_tree(load_tree("p2pdma", file.parent), {CONFIG: "{}", "/my.json": "{\n,}"})
    on = diagnose(tree, file, environment={"CUFILE_USE_PCIP2PDMA": "true"})
    assert verdict_of(on, "gds").available
    other = diagnose(tree, file, environment={"CUFILE_ENV_PATH_JSON": "/my.json"})
    assert fact_of(other, "cufile.json").why == "/my.json"


def test_container_without_udev_is_told_to_mount_it(file: Path) -> None:
    diagnosis = diagnose(load_tree("container-without-udev", file.parent), file)
    gds = verdict_of(diagnosis, "gds")
    assert "5027" in gds.why
    assert "/run/udev" in gds.remedy
    assert fact_of(diagnosis, "container").holds
    assert fact_of(diagnosis, "udev").holds is False


def test_module_without_its_device_nodes_is_not_usable(file: Path) -> None:
    tree = load_tree("container-without-udev", file.parent)
    fact = fact_of(diagnose(change_tree(tree, {"/dev": None}), file), "nvidia-fs")
    assert fact.holds is False
    assert "NVIDIA_GDS" in fact.remedy


def test_nvme_driver_without_hooks_is_an_obstacle(file: Path) -> None:
    tree = load_tree("bare-metal-nvfs", file.parent)
    hooks = {"/proc/driver/nvidia-fs/modules": "lnet: 2.15\n"}
    gds = verdict_of(diagnose(change_tree(tree, hooks), file), "gds")
    assert gds.available is False
    assert "the NVMe driver is not among them" in gds.why


def test_microvm_shows_disk_hypervisor_and_missing_modules(file: Path) -> None:
    diagnosis = diagnose(load_tree("microvm", file.parent), file)
    assert fact_of(diagnosis, "virtual machine").holds
    assert fact_of(diagnosis, "device").found == "vda (virtio disk)"
    assert fact_of(diagnosis, "loadable modules").holds is False
    gds = verdict_of(diagnosis, "gds")
    for reason in ("not loaded", "which is no NVMe", "data=ordered", "udev record"):
        assert reason in gds.why


def test_nfs_without_rdma_is_told_to_mount_with_it(file: Path) -> None:
    tree = load_tree("nfs-rdma-client", file.parent)
    mounts = tree.texts["/proc/self/mountinfo"].replace("proto=rdma,port=20049", "proto=tcp")
    diagnosis = diagnose(change_tree(tree, {"/proc/self/mountinfo": mounts}), file)
    assert fact_of(diagnosis, "device").found == "NFS without RDMA"
    gds = verdict_of(diagnosis, "gds")
    assert gds.available is False
    assert "proto=rdma" in gds.remedy


def test_missing_data_ordered_names_the_mount(file: Path) -> None:
    tree = load_tree("bare-metal-nvfs", file.parent)
    mounts = tree.texts["/proc/self/mountinfo"].replace("data=ordered", "data=writeback")
    gds = verdict_of(diagnose(change_tree(tree, {"/proc/self/mountinfo": mounts}), file), "gds")
    assert "data=writeback" in gds.why
    assert f"data=ordered {file.parent}" in gds.remedy


def test_compression_is_seen_and_the_device_found_by_its_node(file: Path) -> None:
    diagnosis = diagnose(load_tree("no-gpu", file.parent), file)
    assert "compress=zstd" in fact_of(diagnosis, "neither encrypted nor compressed").found
    assert fact_of(diagnosis, "device").found == "nvme1n1 (NVMe, pcie)"


def test_link_numa_and_bar_are_read(file: Path) -> None:
    diagnosis = diagnose(load_tree("p2pdma", file.parent), None)
    link = fact_of(diagnosis, "PCIe link of 0000:19:00.0")
    assert (link.holds, link.found) == (
        True,
        "32.0 GT/s PCIe x16 now, 32.0 GT/s PCIe x16 at most",
    )
    assert fact_of(diagnosis, "NUMA node of 0000:19:00.0").found == "node 0"
    assert fact_of(diagnosis, "BAR1 of 0000:19:00.0").found == "262144 MiB"


def test_without_a_path_what_depends_on_it_is_unknown(tmp_path: Path) -> None:
    diagnosis = diagnose(load_tree("bare-metal-nvfs", tmp_path), None)
    for route in ("direct", "gds"):
        assert verdict_of(diagnosis, route).available is None
        assert "PATH" in verdict_of(diagnosis, route).remedy
    assert diagnosis.works


def test_gpu_that_cuda_cannot_use_is_not_well(tmp_path: Path) -> None:
    assert not diagnose(load_tree("p2pdma", tmp_path), None, cuda=FakeCuda(devices=0)).works


def test_machine_without_a_gpu_is_well(tmp_path: Path) -> None:
    diagnosis = diagnose(load_tree("no-gpu", tmp_path), None, cuda=FakeCuda(devices=0))
    assert diagnosis.works
    assert verdict_of(diagnosis, "cached").available is False


def test_gpu_that_cannot_register_host_memory_has_no_mapped_route(tmp_path: Path) -> None:
    class Unable(FakeCuda):
        def device_attribute(self, name: str, device: int) -> int:
            return 0

    class Silent(FakeCuda):
        def device_attribute(self, name: str, device: int) -> NoReturn:
            raise DeviceError("cudaDeviceGetAttribute failed: cudaErrorInvalidValue (1)")

    tree = load_tree("p2pdma", tmp_path)
    assert verdict_of(diagnose(tree, None, cuda=Unable()), "mapped").available is False
    assert verdict_of(diagnose(tree, None, cuda=Silent()), "mapped").available is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{\n  "properties": {\n    // one\n    "allow_compat_mode": tru\n  }\n}', "line 4"),
        ('{\n  /* a\n  b */\n  "x" "y"\n}', "line 4"),
        ("", "line 1"),
        ("[]", "line 1"),
        ('{\n"properties": 3}', "line 2"),
        ('{"a": "// no comment"\n', "line 2"),
    ],
)
def test_malformed_cufile_json_names_its_line(text: str, line: str, tmp_path: Path) -> None:
    tree = change_tree(load_tree("p2pdma", tmp_path), {CONFIG: text})
    fact = fact_of(diagnose(tree, None), "cufile.json")
    assert fact.holds is False
    assert line in fact.found
    assert CONFIG in fact.remedy


def test_comments_in_cufile_json_are_no_fault(tmp_path: Path) -> None:
    text = '{ // a\n"properties": {"allow_compat_mode": false /* b */, "x": "//"}}\n'
    tree = change_tree(load_tree("p2pdma", tmp_path), {CONFIG: text})
    fact = fact_of(diagnose(tree, None), "cufile.json")
    assert (fact.holds, fact.found) == (True, "allow_compat_mode = false")


def test_missing_path_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        headrace.doctor(tmp_path / "absent")


def test_empty_folder_is_unknown_and_stays_empty(tmp_path: Path) -> None:
    diagnosis = diagnose(load_tree("bare-metal-nvfs", tmp_path), tmp_path)
    assert fact_of(diagnosis, "O_DIRECT").holds is None
    assert verdict_of(diagnosis, "direct").available is None
    assert list(tmp_path.iterdir()) == []


def test_path_that_never_answers_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Stuck(PosixFiles):
        def path_status(self, path: str) -> NoReturn:
            release.wait(30)
            raise OSError("released")

    monkeypatch.setattr(examination, "_PATH_S", 0.05)
    tree = load_tree("lustre-client", tmp_path)
    instruments = Instruments(
        tree, Stuck(), FakeCuda, ask_libcufile=lambda _: {}, ask_io_uring=lambda: 0
    )
    diagnosis = headrace.doctor(tmp_path, instruments=instruments)
    release.set()
    assert fact_of(diagnosis, "path").holds is None
    for route in Route:
        verdict = verdict_of(diagnosis, route)
        assert (verdict.available, "mount" in verdict.remedy) in ((None, True), (False, False))
        assert "PATH" not in verdict.remedy
    assert verdict_of(diagnosis, "direct").available is None


def test_text_and_html_name_every_route_and_fact(tmp_path: Path) -> None:
    diagnosis = diagnose(load_tree("p2pdma", tmp_path), None)
    for shown in (str(diagnosis), diagnosis._repr_html_()):
        for name in (*Route, *(fact.name for fact in diagnosis.facts)):
            assert str(name) in shown


def test_running_machine_is_examined_without_an_error(tmp_path: Path) -> None:
    diagnosis = headrace.doctor(tmp_path)
    assert verdict_of(diagnosis, "host").available
    assert headrace.doctor(context=headrace.Context()).facts


def test_alignment_is_that_of_the_kernel_or_of_the_disk(file: Path) -> None:
    found = headrace.alignment(file)
    assert found.cufile_nbytes == 4096
    assert found.memory_nbytes >= 1
    assert found.offset_nbytes & (found.offset_nbytes - 1) == 0
    assert found.source
    assert headrace.alignment(file.parent).offset_nbytes == found.offset_nbytes
    with pytest.raises(FileNotFoundError):
        headrace.alignment(file.parent / "absent")


def test_alignment_falls_back_on_the_logical_block_size(file: Path) -> None:
    class Silent(PosixFiles):
        def direct_alignment(self, fd: int) -> DirectAlignment | None:
            return None

    number = file.stat().st_dev
    link = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
    disk = "/sys/devices/virtual/block/vdz"
    system = RecordedSystem(
        {f"{disk}/queue/logical_block_size": "4096\n"},
        links={link: "../../devices/virtual/block/vdz"},
    )
    found = find_alignment(str(file), Silent(), system)
    assert (found.offset_nbytes, found.source) == (4096, "logical block size of vdz")
    page = find_alignment(str(file), Silent(), RecordedSystem())
    assert (page.offset_nbytes, page.memory_nbytes) == (4096, 4096)


@pytest.mark.parametrize("text", ["{,}", "[]", '{"properties": 3}'])
def test_setting_in_a_file_that_cufile_cannot_read_is_unknown(text: str, file: Path) -> None:
    tree = change_tree(load_tree("p2pdma", file.parent), {CONFIG: text})
    setting = "P2PDMA: use_pci_p2pdma"
    assert fact_of(diagnose(tree, file), setting).holds is None
    told = diagnose(tree, file, environment={"CUFILE_USE_PCIP2PDMA": "false"})
    assert fact_of(told, setting).holds is False


def test_missing_cufile_json_is_said_to_be_missing(file: Path) -> None:
    tree = change_tree(load_tree("p2pdma", file.parent), {CONFIG: None})
    fact = fact_of(diagnose(tree, file), "cufile.json")
    assert "not there" in fact.found
    assert "no such file" in fact.why
    assert fact_of(diagnose(tree, file), "P2PDMA: use_pci_p2pdma").holds is False


def test_alignment_of_what_is_no_file_is_an_error(file: Path) -> None:
    os.mkfifo(file.parent / "pipe")
    for path in (file.parent / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="neither a regular file nor a folder"):
            headrace.alignment(path)

"""Facts of each GPU: model, driver, PCIe link, NUMA node, BAR1, and what CUDA says it can do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.bindings.cuda import Cuda
from headrace.bindings.sysfs import System
from headrace.errors import DeviceError
from headrace.probing.fact import Fact
from headrace.probing.sight import sees_sys

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class of VGA and 3D controllers
_PCI = "/sys/bus/pci/devices"
_DRIVER = "/proc/driver/nvidia"

ATTRIBUTES = (
    ("host registration", "cudaDevAttrHostRegisterSupported"),
    ("read-only host registration", "cudaDevAttrHostRegisterReadOnlySupported"),
    ("pageable memory access", "cudaDevAttrPageableMemoryAccess"),
    ("GPUDirect RDMA", "cudaDevAttrGPUDirectRDMASupported"),
    ("GPUDirect RDMA with CUDA VMM", "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"),
    ("integrated GPU", "cudaDevAttrIntegrated"),
)
"""Names of facts, and the device attributes behind them."""


@dataclass(frozen=True, slots=True)
class PciGpu:
    """A GPU as the PCI bus shows it."""

    address: str
    """``domain:bus:device.function``."""
    model: str
    """Name, as the driver has it; "" where it does not say."""


def find_gpus(system: System) -> tuple[PciGpu, ...]:
    """NVIDIA's GPUs on the PCI bus, with or without a driver; CUDA may see fewer."""
    known = {address: _model(system, address) for address in system.listdir(f"{_DRIVER}/gpus")}
    for address in system.listdir(_PCI):
        vendor = (system.read(f"{_PCI}/{address}/vendor") or "").strip()
        kind = system.read(f"{_PCI}/{address}/class") or ""
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            known.setdefault(address, "")
    return tuple(PciGpu(address, known[address]) for address in sorted(known))


def _model(system: System, address: str) -> str:
    text = system.read(f"{_DRIVER}/gpus/{address}/information") or ""
    match = re.search(r"^Model:\s*(.*\S)", text, re.MULTILINE)
    return match[1] if match else ""


def probe_driver(system: System, gpus: tuple[PciGpu, ...]) -> tuple[Fact, ...]:
    """The kernel driver and the GPUs on the bus."""
    path = f"{_DRIVER}/version"
    first = (system.read(path) or "").split("\n")[0]
    match = re.search(r"Module\s.*?\s(\d+\.\d[\d.]*)", first)
    if match:
        kind = "open" if "Open Kernel Module" in first else "proprietary"
        driver = Fact("NVIDIA driver", True, f"{match[1]}, {kind} kernel module", path)
    else:
        missing = bool(gpus) or None
        remedy = "install the NVIDIA driver" if missing else ""
        driver = Fact("NVIDIA driver", False, "not loaded, or not to be seen", path, remedy)
    models = ", ".join(f"{gpu.model or 'NVIDIA GPU'} at {gpu.address}" for gpu in gpus)
    where = f"{_DRIVER}/gpus, {_PCI}"
    if not gpus and not sees_sys(system):
        return driver, Fact("GPU on the PCI bus", None, "unknown", "/sys is hidden")
    return driver, Fact("GPU on the PCI bus", bool(gpus), models or "none", where)


def probe_pci(system: System, gpu: PciGpu) -> tuple[Fact, ...]:
    """PCIe link, NUMA node and BAR1 of one GPU."""
    folder = f"{_PCI}/{gpu.address}"
    return (
        _link_fact(system, gpu.address, folder),
        _numa_fact(system, gpu.address, folder),
        _bar_fact(system, gpu.address, folder),
    )


def _link_fact(system: System, address: str, folder: str) -> Fact:
    name, why = f"PCIe link of {address}", f"current_link_* and max_link_* in {folder}"
    values = [
        (system.read(f"{folder}/{key}") or "").strip()
        for key in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    ]
    if not all(values):
        return Fact(name, None, "unknown", why, "the hypervisor may hide it: ask nvidia-smi -q")
    speed, width, top_speed, top_width = values
    found = f"{speed} x{width} now, {top_speed} x{top_width} at most"
    remedy = ""
    if width != top_width:
        remedy = "fewer lanes than the GPU has: look at the slot and the riser"
    elif speed != top_speed:
        remedy = "an idle GPU lowers its link speed: look again under load"
    return Fact(name, (speed, width) == (top_speed, top_width), found, why, remedy)


def _numa_fact(system: System, address: str, folder: str) -> Fact:
    name, path = f"NUMA node of {address}", f"{folder}/numa_node"
    node = (system.read(path) or "").strip()
    if not node or node == "-1":
        return Fact(name, None, "not stated (one node, or a virtual machine)", path)
    return Fact(name, True, f"node {node}", path)


def _bar_fact(system: System, address: str, folder: str) -> Fact:
    name, path = f"BAR1 of {address}", f"{folder}/resource"
    lines = (system.read(path) or "").split("\n")
    try:
        start, end = (int(word, 16) for word in lines[1].split()[:2])
    except (IndexError, ValueError):
        return Fact(name, None, "unknown", f"{path} cannot be read")
    nbytes = end - start + 1 if end else 0
    if not nbytes:
        return Fact(name, False, "not mapped", path, "switch on resizable BAR in the firmware")
    small = nbytes <= 256 << 20
    remedy = (
        "switch on resizable BAR in the firmware: cuFile registers memory here" if small else ""
    )
    return Fact(name, not small, f"{nbytes >> 20} MiB", path, remedy)


def probe_attributes(load_cuda: Callable[[], Cuda], device: int) -> tuple[Fact, ...]:
    """What CUDA says that a device can do; unknown where CUDA does not answer."""
    return tuple(
        _attribute_fact(load_cuda, name, attribute, device) for name, attribute in ATTRIBUTES
    )


def _attribute_fact(load_cuda: Callable[[], Cuda], name: str, attribute: str, device: int) -> Fact:
    why = f"{attribute} of cuda:{device}"
    try:
        value = load_cuda().device_attribute(attribute, device)
    except (DeviceError, ImportError) as error:
        return Fact(name, None, "unknown", f"{why}: {error}")
    return Fact(name, bool(value), "yes" if value else "no", why)

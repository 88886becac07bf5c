"""Facts of GPUDirect Storage: nvidia-fs, and the conditions of P2PDMA, which goes without it."""

from __future__ import annotations

import gzip
import re
import zlib

from headrace.bindings.sysfs import System
from headrace.probing.cufile_config import CufileConfig
from headrace.probing.fact import Fact
from headrace.probing.sight import sees_proc, sees_sys

_KERNEL = (6, 2)
_DRIVER = 565
_DRIVER_OPTIONS = ("RMForceStaticBar1", "RmForceDisableIomapWC")
_MODELS = re.compile(r"A100|L4\b|L40S|H100|H200|H800|GH200|\bB\d{3}|GB\d{3}", re.IGNORECASE)
# GPUs for which NVIDIA names P2PDMA (GDS troubleshooting guide, CUDA 12.8 on).


def probe_nvidia_fs(system: System) -> tuple[Fact, ...]:
    """Whether nvidia-fs is loaded and can be reached, and which storage drivers it works with."""
    modules = system.read("/proc/modules")
    if modules is None and not sees_proc(system):
        why = "/proc is hidden"
        hidden = [Fact(each, None, "unknown", why) for each in ("loadable modules", "nvidia-fs")]
        return tuple(hidden)
    has_modules = Fact(
        "loadable modules",
        modules is not None,
        "/proc/modules is there" if modules is not None else "this kernel has no modules",
        "/proc/modules",
        ""
        if modules is not None
        else "use a kernel with modules: libcufile 1.16 to 1.20 spin in cuFileDriverOpen here",
    )
    loaded = _nvidia_fs_fact(system, modules)
    if loaded.holds is not True:
        return has_modules, loaded
    return has_modules, loaded, _hooks_fact(system)


def _nvidia_fs_fact(system: System, modules: str | None) -> Fact:
    name, version = "nvidia-fs", system.read("/proc/driver/nvidia-fs/version")
    listed = any(line.startswith("nvidia_fs ") for line in (modules or "").split("\n"))
    if not (listed or version or system.exists("/sys/module/nvidia_fs")):
        remedy = "install nvidia-fs (package nvidia-gds) and modprobe nvidia-fs, as root"
        if modules is None:
            remedy = "use a kernel with loadable modules, and nvidia-fs; or P2PDMA"
        why = "/proc/modules, /proc/driver/nvidia-fs/version, /sys/module/nvidia_fs"
        return Fact(name, False, "not loaded", why, remedy)
    found = f"loaded, {' '.join((version or 'version unknown').split())}"
    if not any(node.startswith("nvidia-fs") for node in system.listdir("/dev")):
        remedy = "hand /dev/nvidia-fs* to the container (NVIDIA_GDS=enabled, or --device)"
        return Fact(name, False, f"{found}, but no /dev/nvidia-fs* here", "/dev", remedy)
    return Fact(name, True, found, "/proc/driver/nvidia-fs/version, /dev")


def _hooks_fact(system: System) -> Fact:
    name, path = "storage drivers with nvidia-fs", "/proc/driver/nvidia-fs/modules"
    text = system.read(path)
    if text is None:
        return Fact(name, None, "unknown", f"{path} cannot be read")
    drivers = [line.partition(":")[0].strip() for line in text.split("\n") if ":" in line]
    remedy = "" if drivers else "install storage drivers built for GDS (MOFED/DOCA with nvidia-fs)"
    return Fact(name, bool(drivers), ", ".join(drivers) or "none", path, remedy)


def probe_p2pdma(system: System, config: CufileConfig, models: tuple[str, ...]) -> tuple[Fact, ...]:
    """Each condition of P2PDMA, and the first fact of all: whether every one is met.

    Parameters
    ----------
    system
        Where files are read.
    config
        Settings of cuFile.
    models
        Names of the GPUs; none where they are not known.
    """
    conditions = (
        _kernel_option_fact(system),
        _kernel_version_fact(system),
        _driver_fact(system),
        _driver_options_fact(system),
        _setting_fact(config),
        _multipath_fact(system),
        _model_fact(models),
    )
    return _all_of("P2PDMA", conditions), *conditions


def _all_of(name: str, conditions: tuple[Fact, ...]) -> Fact:
    missing = [fact for fact in conditions if fact.holds is False]
    unknown = [fact.name for fact in conditions if fact.holds is None]
    why = "every condition below"
    if missing:
        remedies = "; ".join(fact.remedy for fact in missing if fact.remedy)
        names = ", ".join(fact.name for fact in missing)
        return Fact(name, False, f"not met: {names}", why, remedies)
    if unknown:
        return Fact(name, None, f"not known: {', '.join(unknown)}", why)
    return Fact(name, True, "every condition is met", why)


def _kernel_option_fact(system: System) -> Fact:
    name, option = "P2PDMA: kernel option", "CONFIG_PCI_P2PDMA"
    path, text = _kernel_config(system)
    if text is None:
        return Fact(name, None, "unknown", f"no {path}; /boot may need root")
    if f"\n{option}=y" in f"\n{text}":
        return Fact(name, True, f"{option}=y", path)
    return Fact(name, False, f"{option} is not set", path, f"use a kernel with {option}=y")


def _kernel_config(system: System) -> tuple[str, str | None]:
    release = (system.read("/proc/sys/kernel/osrelease") or "").strip()
    paths = (f"/boot/config-{release}", f"/lib/modules/{release}/config")
    for path in paths:
        if (text := system.read(path)) is not None:
            return path, text
    packed = system.read("/proc/config.gz")
    try:
        text = gzip.decompress((packed or "").encode("utf-8", "surrogateescape")).decode()
    except (OSError, EOFError, ValueError, zlib.error):
        return ", ".join((*paths, "/proc/config.gz")), None
    return "/proc/config.gz", text or None


def _kernel_version_fact(system: System) -> Fact:
    name, path = "P2PDMA: kernel version", "/proc/sys/kernel/osrelease"
    release = (system.read(path) or "").strip()
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return Fact(name, None, "unknown", f"{path} cannot be read")
    new = (int(match[1]), int(match[2])) >= _KERNEL
    return Fact(name, new, release, path, "" if new else "use Linux 6.2 or later")


def _driver_fact(system: System) -> Fact:
    name, path = "P2PDMA: open driver", "/proc/driver/nvidia/version"
    text = system.read(path)
    match = re.search(r"Module\s.*?\s(\d+)\.(\d[\d.]*)", text or "")
    if match is None:
        return Fact(name, None, "unknown", f"{path} cannot be read")
    is_open = "Open Kernel Module" in match.string
    good = is_open and int(match[1]) >= _DRIVER
    found = f"{match[1]}.{match[2]}, {'open' if is_open else 'proprietary'} kernel module"
    return Fact(name, good, found, path, "" if good else f"install the open driver, {_DRIVER} on")


def _driver_options_fact(system: System) -> Fact:
    name, path = "P2PDMA: driver options", "/proc/driver/nvidia/params"
    text = system.read(path)
    if text is None:
        return Fact(name, None, "unknown", f"{path} cannot be read")
    match = re.search(r'^RegistryDwords: *"?([^"\n]*)', text, re.MULTILINE)
    given = match[1] if match else ""
    pairs = {key.strip().lower(): value for key, _, value in _assignments(given)}
    missing = [option for option in _DRIVER_OPTIONS if pairs.get(option.lower()) != "1"]
    if not missing:
        return Fact(name, True, given, path)
    wanted = ";".join(f"{option}=1" for option in _DRIVER_OPTIONS)
    remedy = f'options nvidia NVreg_RegistryDwords="{wanted};" in /etc/modprobe.d, then reboot'
    return Fact(name, False, f"without {' and '.join(missing)}", path, remedy)


def _assignments(text: str) -> list[tuple[str, str, str]]:
    return [part.partition("=") for part in text.split(";")]


def _setting_fact(config: CufileConfig) -> Fact:
    name, on = "P2PDMA: use_pci_p2pdma", config.uses_p2pdma
    if on is None:
        return Fact(name, None, "unknown", config.fact.why, config.fact.remedy)
    remedy = "" if on else 'set "properties": {"use_pci_p2pdma": true} in cufile.json'
    return Fact(name, on, "on" if on else "off", config.fact.why, remedy)


def _multipath_fact(system: System) -> Fact:
    name, path = "P2PDMA: no NVMe multipath", "/sys/module/nvme_core/parameters/multipath"
    value = (system.read(path) or "").strip()
    if value in ("Y", "1"):
        remedy = "options nvme_core multipath=N in /etc/modprobe.d, then reboot"
        return Fact(name, False, "multipath is on", path, remedy)
    if not value and not sees_sys(system):
        return Fact(name, None, "unknown", "/sys is hidden")
    found = "multipath is off" if value else "the NVMe driver has no multipath"
    return Fact(name, True, found, path if value else f"no {path}")


def _model_fact(models: tuple[str, ...]) -> Fact:
    name, why = "P2PDMA: GPU", "A100, L4, L40S, H100, H200 and B-series, as NVIDIA lists them"
    if not models:
        return Fact(name, None, "model unknown", "/proc/driver/nvidia/gpus cannot be read")
    good = any(_MODELS.search(model) for model in models)
    remedy = "" if good else "use nvidia-fs, or a GPU for which NVIDIA names P2PDMA"
    return Fact(name, good, ", ".join(dict.fromkeys(models)), why, remedy)

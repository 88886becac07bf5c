"""The doctor's round: every fact of the machine and of a path, each probe with a time limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.bindings.cuda import Cuda
from headrace.bindings.posix import Files
from headrace.bindings.sysfs import System, read_mounts
from headrace.bindings.uring import io_uring_errno
from headrace.probing.content import probe_content
from headrace.probing.cufile_config import CufileConfig, probe_cufile_config
from headrace.probing.devices import (
    PciGpu,
    find_gpus,
    probe_attributes,
    probe_driver,
    probe_pci,
)
from headrace.probing.fact import Fact
from headrace.probing.gds import probe_nvidia_fs, probe_p2pdma
from headrace.probing.gpu import probe_gpu
from headrace.probing.libcufile import Ask, ask_child, probe_libcufile
from headrace.probing.machine import MachineFacts, probe_pressure
from headrace.probing.place import probe_place
from headrace.probing.platform import probe_platform
from headrace.probing.verdict import RouteVerdict, judge_routes
from headrace.probing.volume import find_mount
from headrace.probing.waiting import answer_within

_CUDA_S = 20.0  # eight GPUs without the persistence daemon take ten seconds to initialise
_PATH_S = 2.0


def _wheel_folders() -> tuple[str, ...]:
    return tuple(folder for folder in sys.path if folder)


@dataclass(frozen=True, slots=True)
class Instruments:
    """What the doctor looks with; tests hand in recorded machines."""

    system: System
    """Text files of the kernel."""
    files: Files
    """Calls on files."""
    load_cuda: Callable[[], Cuda]
    """Gives the CUDA bindings; raises ImportError where they are missing."""
    cufile_environment: Mapping[str, str] = field(default_factory=dict)
    """The ``CUFILE_*`` variables of the process."""
    wheel_folders: tuple[str, ...] = field(default_factory=_wheel_folders)
    """Where Python looks for packages, libcufile's wheel among them."""
    ask_libcufile: Ask = ask_child
    """Loads libcufile elsewhere."""
    ask_io_uring: Callable[[], int] = io_uring_errno
    """What the kernel says to a request for a ring."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found."""

    facts: tuple[Fact, ...]
    """In the order in which people read them."""
    routes: tuple[RouteVerdict, ...]
    """One for each route."""


def examine(path: str | None, instruments: Instruments) -> Examination:
    """Look at the machine, and at the volume under a path; nothing is written or read.

    Raises
    ------
    FileNotFoundError, OSError
        There is nothing at the path, or neither a file nor a folder.
    """
    system = instruments.system
    config = probe_cufile_config(system, instruments.cufile_environment)
    gpus = find_gpus(system)
    content = () if path is None else _probe_path(path, instruments)
    facts = (
        *_probe_cuda(instruments, system, gpus),
        *_probe_cufile(instruments, config, gpus),
        *probe_platform(system, instruments.ask_io_uring),
        *MachineFacts(system).facts,
        probe_pressure(system),
        *content,
    )
    return Examination(facts, judge_routes(facts, config.allows_compat))


def _probe_cuda(
    instruments: Instruments, system: System, gpus: tuple[PciGpu, ...]
) -> tuple[Fact, ...]:
    """The GPUs as CUDA, the driver and the bus show them."""
    load_cuda = instruments.load_cuda
    try:
        gpu = answer_within(lambda: probe_gpu(load_cuda, 0), _CUDA_S)
    except TimeoutError as error:
        remedy = "the driver hangs: look at dmesg and nvidia-smi"
        gpu = Fact("CUDA device", None, str(error), "cudaGetDeviceCount", remedy)
    pci = (fact for each in gpus for fact in probe_pci(system, each))
    attributes = probe_attributes(load_cuda, 0) if gpu.holds else ()
    return gpu, *probe_driver(system, gpus), *pci, *attributes


def _probe_cufile(
    instruments: Instruments, config: CufileConfig, gpus: tuple[PciGpu, ...]
) -> tuple[Fact, ...]:
    """What cuFile is here, and what it stands on."""
    system = instruments.system
    models = tuple(gpu.model for gpu in gpus if gpu.model)
    return (
        *probe_libcufile(system, instruments.wheel_folders, instruments.ask_libcufile),
        config.fact,
        *probe_nvidia_fs(system),
        *probe_p2pdma(system, config, models),
    )


def _probe_path(path: str, instruments: Instruments) -> tuple[Fact, ...]:
    """The volume and the file; a mount whose server is gone is not waited for."""
    system, mounts = instruments.system, read_mounts(instruments.system)
    try:
        mount = answer_within(lambda: find_mount(path, mounts), _PATH_S)
        content = answer_within(
            lambda: probe_content(path, mount, instruments.files, system), _PATH_S
        )
    except TimeoutError as error:
        remedy = "see that the server of the mount can be reached; umount -l gives it up"
        return (Fact("path", None, f"{path}: {error}", "stat(2), open(2)", remedy),)
    real = os.path.abspath(path)
    return Fact("path", True, real, "stat(2)"), *probe_place(system, mount), *content

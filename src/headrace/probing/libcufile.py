"""libcufile: which file it is, whether it loads, and which version it says it has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace import bindings
from headrace.bindings.sysfs import System
from headrace.probing.fact import Fact

TIMEOUT_S = 3.0
"""Most seconds that loading the library may take."""

_SONAME = "libcufile.so.0"
_WHEELS = ("nvidia/cu13/lib", "nvidia/cufile/lib")  # of nvidia-cufile and nvidia-cufile-cu12
_TOOLKITS = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/cuda/targets/sbsa-linux/lib",
)
_INSTALL = "pip install nvidia-cufile (CUDA 12: nvidia-cufile-cu12)"

Ask = Callable[[str], Mapping[str, str]]
"""Loads a library (none for "") elsewhere; the keys are those of `libcufile_child`."""


def find_libcufile(system: System, wheel_folders: tuple[str, ...]) -> tuple[str, str]:
    """Path of the library and how it was found; "" and where we looked if it was not."""
    for folder in wheel_folders:
        for part in _WHEELS:
            if system.exists(path := f"{folder}/{part}/{_SONAME}"):
                return path, "a wheel's folder"
    cache = system.read("/etc/ld.so.cache") or ""
    for path in re.findall(r"/[^\0]*/libcufile\.so\.0(?=\0)", cache + "\0"):
        if system.exists(path):
            return path, "/etc/ld.so.cache"
    for folder in _TOOLKITS:
        if system.exists(path := f"{folder}/{_SONAME}"):
            return path, "the folder of the CUDA toolkit"
    return "", "no wheel's folder, not in /etc/ld.so.cache, not below /usr/local/cuda"


def probe_libcufile(system: System, wheel_folders: tuple[str, ...], ask: Ask) -> tuple[Fact, Fact]:
    """Facts of NVIDIA's Python binding and of the library itself."""
    path, how = find_libcufile(system, wheel_folders)
    try:
        answer = ask(path)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        answer = {"bindings_error": str(error), "load_error": str(error)}
    return _bindings_fact(answer), _library_fact(path, how, answer)


def _bindings_fact(answer: Mapping[str, str]) -> Fact:
    name, why = "cuFile bindings", "import cuda.bindings.cufile, in a child process"
    if answer.get("bindings"):
        return Fact(name, True, f"cuda.bindings {answer['bindings']}", why)
    error = answer.get("bindings_error", "no answer")
    remedy = "install headrace with its extra [cuda13], or [cuda12], to match the driver"
    holds = None if "bindings" not in answer else False
    return Fact(name, holds, "cannot be imported", f"{why}: {error}", remedy)


def _library_fact(path: str, how: str, answer: Mapping[str, str]) -> Fact:
    name = "libcufile"
    if not path:
        return Fact(name, False, "not found", how, _INSTALL)
    if "version" not in answer:
        error = answer.get("load_error", "no answer")
        return Fact(name, False, f"{path} does not load", error, f"reinstall it: {_INSTALL}")
    why = f"{how}; loaded in a child process, cuFileGetVersion"
    return Fact(name, True, f"{path}, version {answer['version']}", why)


def ask_child(path: str) -> Mapping[str, str]:
    """Load the library in a child process, which is killed when it takes too long.

    Raises
    ------
    subprocess.SubprocessError
        The child crashed, or took longer than `TIMEOUT_S`.
    OSError, ValueError
        It could not be started, or what it printed makes no sense.
    """
    script = str(Path(bindings.__file__).with_name("libcufile_child.py"))
    if not sys.executable:
        raise OSError("this interpreter does not know its own executable")
    done = subprocess.run(
        # -P: the folder of the script holds modules with the names of others.
        [sys.executable, "-P", script, *([path] if path else [])],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    answer = json.loads(done.stdout)
    return {str(key): str(value) for key, value in answer.items()}

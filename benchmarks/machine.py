"""What the run ran on: hardware, kernel, file systems and versions; nothing that names anyone."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.places import Place, filesystem_of

DISTRIBUTIONS = (
    "headrace",
    "numpy",
    "safetensors",
    "ml_dtypes",
    "torch",
    "cupy-cuda13x",
    "cuda-bindings",
    "fastsafetensors",
    "instanttensor",
    "runai-model-streamer",
    "kvikio-cu13",
    "libkvikio-cu13",
)
"""Whose versions are told."""

_GPU_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "pcie.link.gen.gpucurrent",
    "pcie.link.gen.max",
    "pcie.link.width.current",
)


def describe_machine(places: list[Place]) -> dict[str, Any]:
    """Describe processor, memory, kernel, GPU, and the file system of each place."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "gpus": _describe_gpus(),
        "filesystems": {place.key: _describe_filesystem(place) for place in places},
    }


def collect_versions() -> dict[str, str | None]:
    """Version of each of `DISTRIBUTIONS`; None where it is not installed."""
    return {name: _version(name) for name in DISTRIBUTIONS}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _source_tree_version() if distribution == "headrace" else None


def _source_tree_version() -> str | None:
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    match = re.search(r'^version = "(.+)"', pyproject.read_text(), re.MULTILINE)
    return f"{match[1]} (source tree)" if match else None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _describe_gpus() -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]


def _describe_filesystem(place: Place) -> str:
    kind, options = filesystem_of(place.directory)
    return f"{kind} ({options})"


def cuda_version() -> str | None:
    """CUDA version that torch was built for; None without torch."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    return str(torch.version.cuda) if torch.version.cuda else None

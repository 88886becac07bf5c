"""The destination of the loads, and how results are checked: on the GPU, or in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

POISON = 0xA5
"""Byte that memory is filled with before a reading, so that bytes left over do not pass."""

_CHUNK_NBYTES = 256 << 20

Arrays = Mapping[str, Any]
"""Arrays by name; a raw file has one, under the empty name."""


class Memory(Protocol):
    """What the method needs of a framework and its device."""

    framework: str
    """``"torch"`` or ``"numpy"``: whose arrays they are."""
    device: str
    """Device that results are on, as the framework spells it."""

    def empty(self, nbytes: int) -> Any:
        """Give a new array of bytes."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""

    def poison(self, array: Any) -> None:
        """Fill with `POISON`, where the memory belongs to us."""

    def find_difference(self, found: Arrays, wanted: Arrays) -> str | None:
        """Compare names, dtypes, shapes and bytes; None if all are equal, else the first fault."""

    def load_reference(self, source: Path) -> Arrays:
        """Load a file, or a directory of shards, by the official loader."""

    def reset_peak(self) -> None:
        """Start a new maximum of device memory."""

    def peak_nbytes(self) -> int | None:
        """Return the maximum since `reset_peak`, above the level then; None without a device."""


class NumpyMemory:
    """`Memory` of NumPy arrays."""

    framework = "numpy"
    device = "cpu"

    def empty(self, nbytes: int) -> Any:
        """See `Memory.empty`."""
        return np.empty(nbytes, np.uint8)

    def synchronize(self) -> None:
        """See `Memory.synchronize`; there is nothing to wait for."""

    def poison(self, array: Any) -> None:
        """See `Memory.poison`."""
        if array.flags.writeable:
            array.reshape(-1).view(np.uint8)[...] = POISON

    def find_difference(self, found: Arrays, wanted: Arrays) -> str | None:
        """See `Memory.find_difference`."""
        return find_difference(found, wanted, _numpy_equal)

    def load_reference(self, source: Path) -> Arrays:
        """See `Memory.load_reference`."""
        if source.is_file():
            return {"": np.fromfile(source, np.uint8)}
        import ml_dtypes  # noqa: F401  teaches NumPy the name of bfloat16
        from safetensors.numpy import load_file

        return {k: v for shard in shards_of(source) for k, v in load_file(shard).items()}

    def reset_peak(self) -> None:
        """See `Memory.reset_peak`; there is no device."""

    def peak_nbytes(self) -> int | None:
        """See `Memory.peak_nbytes`."""
        return None


class TorchMemory:
    """`Memory` of torch tensors.

    Parameters
    ----------
    device
        ``"cuda:0"``; ``"cpu"`` serves to try the code where there is no GPU.
    """

    framework = "torch"

    def __init__(self, device: str = "cuda:0") -> None:
        import torch

        self._torch = torch
        self._on_gpu = not device.startswith("cpu")
        self._level = 0
        self.device = device

    def empty(self, nbytes: int) -> Any:
        """See `Memory.empty`."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device)

    def synchronize(self) -> None:
        """See `Memory.synchronize`."""
        if self._on_gpu:
            self._torch.cuda.synchronize()

    def poison(self, array: Any) -> None:
        """See `Memory.poison`; host tensors may be mapped files and are left alone."""
        if array.is_cuda:
            array.reshape(-1).view(self._torch.uint8).fill_(POISON)

    def find_difference(self, found: Arrays, wanted: Arrays) -> str | None:
        """See `Memory.find_difference`."""
        return find_difference(found, wanted, self._equal)

    def _equal(self, found: Any, wanted: Any) -> bool:
        torch = self._torch
        mine, theirs = (a.reshape(-1).view(torch.uint8) for a in (found, wanted))
        chunks = zip(mine.split(_CHUNK_NBYTES), theirs.split(_CHUNK_NBYTES), strict=True)
        return all(torch.equal(a, b) for a, b in chunks)

    def load_reference(self, source: Path) -> Arrays:
        """See `Memory.load_reference`."""
        if source.is_file():
            host = self._torch.from_numpy(np.fromfile(source, np.uint8))
            return {"": host.to(self.device)}
        from safetensors.torch import load_file

        shards = [load_file(shard, device=self.device) for shard in shards_of(source)]
        return {name: tensor for shard in shards for name, tensor in shard.items()}

    def reset_peak(self) -> None:
        """See `Memory.reset_peak`."""
        if self._on_gpu:
            self._torch.cuda.reset_peak_memory_stats()
            self._level = self._torch.cuda.memory_allocated()

    def peak_nbytes(self) -> int | None:
        """See `Memory.peak_nbytes`."""
        if not self._on_gpu:
            return None
        return int(self._torch.cuda.max_memory_allocated()) - self._level


def memory_of(device: str) -> Memory:
    """Give the memory of a run on ``"cuda"``, torch's, or on ``"cpu"``, NumPy's."""
    return NumpyMemory() if device == "cpu" else TorchMemory("cuda:0")


def shards_of(directory: Path) -> list[Path]:
    """Safetensors files of a directory, in order of their names."""
    return sorted(directory.glob("*.safetensors"))


def find_difference(found: Arrays, wanted: Arrays, equal: Any) -> str | None:
    """See `Memory.find_difference`; `equal` compares the bytes of two arrays of one size."""
    if missing := sorted(set(wanted) - set(found)):
        return f"{len(missing)} arrays are missing, {missing[0]!r} first"
    if surplus := sorted(set(found) - set(wanted)):
        return f"{len(surplus)} arrays are not in the source, {surplus[0]!r} first"
    for name, reference in wanted.items():
        array = found[name]
        mine, theirs = (
            f"{a.dtype} {tuple(a.shape)} on {_device_of(a)}" for a in (array, reference)
        )
        if mine != theirs:
            return f"{name!r} is {mine}; it should be {theirs}"
        if not equal(array, reference):
            return f"{name!r} has wrong bytes"
    return None


def _device_of(array: Any) -> str:
    return str(getattr(array, "device", "cpu"))


def _numpy_equal(found: Any, wanted: Any) -> bool:
    mine, theirs = (a.reshape(-1).view(np.uint8) for a in (found, wanted))
    return bool(np.array_equal(mine, theirs))

"""The ways of loading that the demo compares: headrace by each route, and what people do today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import headrace
from headrace.cli.demo_model import Model
from headrace.cli.target import Target
from headrace.types import Route

HOST_ROUTES = ("auto", str(Route.HOST), str(Route.DIRECT))
"""Routes to try for host memory."""
GPU_ROUTES = ("auto", *(str(route) for route in Route if route is not Route.HOST))
"""Routes to try for a GPU; those that cannot serve say so."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Method:
    """One way of loading the demo's file."""

    name: str
    """As in the table."""
    route: str
    """Forced route of headrace, or "auto"; "" for other software."""
    how: str
    """What other software does; "" for headrace, whose report says it."""
    load: Callable[[], Any]
    """Do it; returns when the bytes are in place."""
    matches: Callable[[Any], bool]
    """Whether a result equals the reference, byte for byte."""


class Memory(Protocol):
    """How plain NumPy and safetensors users reach one kind of memory."""

    suffix: str
    """What they add to their call."""

    def load_file(self, path: str) -> Mapping[str, Any]:
        """Load a safetensors file with the official library."""

    def upload(self, array: NDArray[Any]) -> Any:
        """Copy an array there; returns when the bytes are in place."""

    def download(self, array: Any) -> Bytes:
        """Bytes of an array that lives there."""


class HostMemory:
    """NumPy's memory."""

    suffix = ""

    def load_file(self, path: str) -> Mapping[str, Any]:
        """See `Memory.load_file`."""
        from safetensors.numpy import load_file

        loaded: Mapping[str, Any] = load_file(path)
        return loaded

    def upload(self, array: NDArray[Any]) -> Any:
        """See `Memory.upload`."""
        return array

    def download(self, array: Any) -> Bytes:
        """See `Memory.download`."""
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class TorchMemory:
    """A GPU through torch."""

    suffix = ".to(device)"

    def __init__(self, device: str) -> None:
        self._torch = import_module("torch")
        self._device = device

    def load_file(self, path: str) -> Mapping[str, Any]:
        """See `Memory.load_file`."""
        from safetensors.torch import load_file

        loaded: Mapping[str, Any] = load_file(path, device=self._device)
        self._torch.cuda.synchronize(self._device)
        return loaded

    def upload(self, array: NDArray[Any]) -> Any:
        """See `Memory.upload`."""
        tensor = self._torch.from_numpy(array).to(self._device)
        self._torch.cuda.synchronize(self._device)
        return tensor

    def download(self, array: Any) -> Bytes:
        """See `Memory.download`."""
        host: Bytes = array.contiguous().reshape(-1).view(self._torch.uint8).cpu().numpy()
        return host


class CupyMemory:
    """A GPU through CuPy."""

    suffix = " + cupy.asarray"

    def __init__(self, device: str) -> None:
        self._cupy = import_module("cupy")
        self._ordinal = int(device.partition(":")[2] or 0)

    def load_file(self, path: str) -> Mapping[str, Any]:
        """See `Memory.load_file`."""
        host = HostMemory().load_file(path)
        # As bytes: not every CuPy knows bfloat16, and the copy is the same.
        return {name: self.upload(array.view(np.uint8)) for name, array in host.items()}

    def upload(self, array: NDArray[Any]) -> Any:
        """See `Memory.upload`."""
        with self._cupy.cuda.Device(self._ordinal) as device:
            uploaded = self._cupy.asarray(array)
            device.synchronize()
        return uploaded

    def download(self, array: Any) -> Bytes:
        """See `Memory.download`."""
        return HostMemory().download(self._cupy.asnumpy(array))


def find_memory(target: Target) -> Memory:
    """Memory of a target, as its framework reaches it."""
    if target.is_host:
        return HostMemory()
    if target.framework == "torch":
        return TorchMemory(target.device)
    return CupyMemory(target.device)


def find_methods(
    model: Model, target: Target, context: headrace.Context, memory: Memory
) -> tuple[Method, ...]:
    """Every method to compare, headrace's automatic choice first."""
    load = partial(target.namespace().load, model.path, device=target.device, context=context)
    same = partial(_same_tensors, model, memory)
    ours = [
        Method(f"headrace {route}", route, "", partial(load, route=route), same)
        for route in (HOST_ROUTES if target.is_host else GPU_ROUTES)
    ]
    official = Method(
        "safetensors load_file" + (memory.suffix if target.framework == "cupy" else ""),
        "",
        "maps the file and copies one tensor after the other",
        partial(memory.load_file, model.path),
        same,
    )
    plain = Method(
        "np.fromfile" + memory.suffix,
        "",
        "one thread through the page cache" + ("" if target.is_host else ", then a pageable copy"),
        lambda: memory.upload(np.fromfile(model.path, dtype=np.uint8)),
        partial(_same_file, model, memory, _file_offsets(model, context)),
    )
    return (*ours, official, plain)


def _file_offsets(model: Model, context: headrace.Context) -> Mapping[str, int]:
    """Where each tensor's bytes begin in the file."""
    listed = headrace.explain(model.path, device="cpu", context=context).tensors
    return {tensor["name"]: tensor["file_offset"] for tensor in listed}


def _same_tensors(model: Model, memory: Memory, loaded: Mapping[str, Any]) -> bool:
    """Whether the loaded tensors are the reference's: names, sizes and bytes."""
    return loaded.keys() == model.tensors.keys() and all(
        np.array_equal(memory.download(loaded[name]), HostMemory().download(tensor))
        for name, tensor in model.tensors.items()
    )


def _same_file(model: Model, memory: Memory, offsets: Mapping[str, int], loaded: Any) -> bool:
    """Whether the file's bytes hold the reference's tensors at their places."""
    whole = memory.download(loaded)
    return all(
        np.array_equal(
            whole[offsets[name] : offsets[name] + tensor.nbytes], HostMemory().download(tensor)
        )
        for name, tensor in model.tensors.items()
    )

"""PyTorch as a `headrace.framework.Framework`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch

from headrace import framework
from headrace.bindings.cuda import LEGACY_STREAM
from headrace.errors import BufferMismatch, FormatError, RouteUnavailable
from headrace.formats.catalog import TensorSpec
from headrace.framework import StreamOf, Taken
from headrace.memory.buffer import Buffer
from headrace.types import HOST, Device

_ATTRIBUTES = MappingProxyType(
    {
        "BOOL": "bool",
        "U8": "uint8",
        "U16": "uint16",
        "U32": "uint32",
        "U64": "uint64",
        "I8": "int8",
        "I16": "int16",
        "I32": "int32",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "C64": "complex64",
        "<c16": "complex128",
    }
)
"""Attribute of ``torch`` for each type that torch has."""
_PACKED_FLOAT4 = "float4_e2m1fn_x2"  # two numbers of safetensors' F4 in each element


class Torch:
    """`Framework` of torch; see there."""

    def parse_device(self, device: Any) -> Device:
        """See `Framework.parse_device`."""
        if device is None:
            target = torch.get_default_device()
        elif isinstance(device, int):
            target = torch.device("cuda", device)
        else:
            target = torch.device(device)
        if target.type == "cpu":
            return HOST
        if target.type != "cuda":
            raise ValueError(f"device {target} is neither 'cpu' nor a CUDA device")
        if not torch.cuda.is_available():
            raise RouteUnavailable(
                f"torch {torch.__version__} sees no CUDA device (torch.cuda.is_available() is "
                "False); install a CUDA build of torch and the driver, or pass device='cpu'"
            )
        current = torch.cuda.current_device() if target.index is None else target.index
        return Device("cuda", current)

    @property
    def out_of_memory(self) -> tuple[type[Exception], ...]:
        """See `Framework.out_of_memory`."""
        return (torch.OutOfMemoryError,)

    def idle_nbytes(self, device: Device) -> int:
        """See `Framework.idle_nbytes`."""
        held = torch.cuda.memory_reserved(device.index)
        return int(held - torch.cuda.memory_allocated(device.index))

    def dtype_name(self, dtype: Any) -> str:
        """See `Framework.dtype_name`."""
        attribute = str(dtype).removeprefix("torch.")
        for name, known in _ATTRIBUTES.items():
            if attribute in (known, name):
                return name
        raise ValueError(
            f"dtype {dtype!r} is no type that safetensors has; take the bytes as one of the same "
            "size, and view them (torch.Tensor.view)"
        )

    def current_stream(self, device: Device) -> int | None:
        """See `Framework.current_stream`."""
        if device.is_host:
            return None
        return int(torch.cuda.current_stream(device.index).cuda_stream)

    def on_stream(self, stream: int | None, device: Device) -> AbstractContextManager[object]:
        """See `Framework.on_stream`."""
        if stream is None or stream == self.current_stream(device):
            return nullcontext()
        if stream in (0, LEGACY_STREAM):  # torch takes odd numbers for streams of its own
            wrapped = torch.cuda.default_stream(device.index)
        else:
            wrapped = torch.cuda.ExternalStream(stream, device=device.index)
        entered: AbstractContextManager[object] = torch.cuda.stream(wrapped)
        return entered

    def empty(self, spec: TensorSpec, device: Device) -> torch.Tensor:
        """See `Framework.empty`."""
        place = str(device)
        dtype = getattr(torch, _ATTRIBUTES.get(spec.dtype, ""), None)
        if dtype is None:
            what = f"tensor {spec.name!r}" if spec.name else "the array"
            raise FormatError(
                f"{what} is of type {spec.dtype}, which torch {torch.__version__} "
                "does not have; load it with headrace.numpy, or read its raw bytes"
            )
        if spec.order == "C":
            return torch.empty(spec.shape, dtype=dtype, device=place)
        backwards = tuple(reversed(range(len(spec.shape))))
        return torch.empty(spec.shape[::-1], dtype=dtype, device=place).permute(backwards)

    def pointer(self, array: torch.Tensor) -> int:
        """See `Framework.pointer`."""
        return int(array.data_ptr())

    def memory(self, array: torch.Tensor, stream_of: StreamOf, what: str = "the array") -> Buffer:
        """See `Framework.memory`; a conjugate or negative view is copied."""
        if not isinstance(array, torch.Tensor):
            raise BufferMismatch(f"{what} is {type(array).__name__}; pass a torch.Tensor")
        if array.layout != torch.strided:
            raise BufferMismatch(f"{what} is sparse ({array.layout}); pass its .to_dense()")
        if not array.is_contiguous():
            raise BufferMismatch(
                f"{what} is not contiguous; pass its .contiguous(), or, where it is a view, the "
                "whole tensor"
            )
        if array.nbytes and not _storage_address(array):
            raise BufferMismatch(
                f"{what} ({type(array).__name__} on {array.device}) has no memory of its own; give "
                "it values first (meta), or pass a plain tensor (of a DTensor, its .to_local() or "
                ".full_tensor())"
            )
        device = self.parse_device(array.device)
        stream = stream_of(device)
        plain = array.detach()
        if plain.is_conj() or plain.is_neg():
            with self.on_stream(stream, device):
                plain = plain.resolve_conj().resolve_neg()
        return Buffer(plain.data_ptr(), plain.nbytes, device, plain, stream)

    def take(self, tensors: Mapping[str, torch.Tensor], stream_of: StreamOf) -> list[Taken]:
        """See `Framework.take`; refuses what ``safetensors.torch.save_file`` refuses."""
        framework.check_mapping(tensors, torch.Tensor)
        if sparse := [name for name, each in tensors.items() if each.layout != torch.strided]:
            raise BufferMismatch(
                f"the tensors {sparse} are sparse, and safetensors has dense ones alone; save "
                "their .to_dense(), which may take much more space"
            )
        if groups := _find_shared(tensors):
            raise RuntimeError(
                f"these tensors share memory and would be apart once they are loaded: {groups}; "
                "save one of each group and tie the others to it after loading, or save a .clone()"
            )
        return [
            Taken(
                name,
                *_describe(name, tensor),
                self.memory(tensor, stream_of, f"tensor {name!r}"),
            )
            for name, tensor in tensors.items()
        ]


def _describe(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Type and shape of a tensor as its file has them."""
    attribute = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if attribute == _PACKED_FLOAT4:
        if not shape:
            raise FormatError(
                f"tensor {name!r} is a single {tensor.dtype}, which holds two numbers; give it one "
                "axis: reshape(1)"
            )
        return "F4", (*shape[:-1], 2 * shape[-1])
    names = (known for known, each in _ATTRIBUTES.items() if each == attribute)
    found = next(names, "")
    if not found or found.startswith("<"):  # a name of NumPy's, for what safetensors lacks
        raise FormatError(
            f"tensor {name!r} is of type {tensor.dtype}, which safetensors lacks; convert it, or "
            "save its bytes: .view(torch.uint8)"
        )
    return found, shape


def _find_shared(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of tensors of one storage whose bytes overlap, group by group."""
    storages: dict[tuple[object, ...], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        address = _storage_address(tensor)
        if tensor.numel() and address:
            key = (tensor.device, address, tensor.untyped_storage().nbytes())
            storages.setdefault(key, []).append((*_extent(tensor), name))
    groups: list[list[str]] = []
    for areas in storages.values():
        reach = 0
        for start, stop, name in sorted(areas):
            if start >= reach:
                groups.append([])
            groups[-1].append(name)
            reach = max(reach, stop)
    return [group for group in groups if len(group) > 1]


def _storage_address(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor is a part of; 0 where it only stands for another."""
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":  # a fake tensor, whatever device it claims
        return 0
    try:
        return int(storage.data_ptr())
    except RuntimeError:
        return 0


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and of the end of its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * step for length, step in steps)
    start = int(tensor.data_ptr())
    return start, start + (last + 1) * int(tensor.element_size())

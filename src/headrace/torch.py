"""PyTorch: tensors in host memory or on a GPU as torch tensors."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import FormatError, RouteUnavailable
from headrace.types import HOST, Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.context import Context
    from headrace.formats.catalog import TensorSpec
    from headrace.framework import ShownProgress
    from headrace.survey import PathLike, SourceLike

# Everything else is imported at the first call: importing this module must cost next to nothing.


def load_file(path: PathLike, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Load every tensor of a safetensors file: a drop-in for ``safetensors.torch.load_file``.

    Parameters
    ----------
    path
        A ``.safetensors`` file.
    device
        "cpu", "cuda", "cuda:N", a ``torch.device`` or a CUDA ordinal; None is torch's default.

    Returns
    -------
    dict
        Name to tensor, with torch's own bf16 and fp8 types. Each owns its memory, from
        torch's allocator; dropping one frees it.
        Sub-byte types come out as one-dimensional uint8 of the tensor's bytes.

    Raises
    ------
    FormatError
        The file is not whole and valid safetensors.
    FileNotFoundError, PermissionError, IsADirectoryError, OSError
        As the operating system says.
    SourceChanged
        The file changed while it was read.
    RouteUnavailable, DeviceError
        There is no way to the device, or the GPU refused.
    """
    from headrace import framework

    return framework.load(_Torch(), path, device=device)


def load(
    source: SourceLike,
    *,
    device: Any = None,
    names: Sequence[str] | None = None,
    route: str = "auto",
    progress: ShownProgress = False,
    context: Context | None = None,
) -> dict[str, torch.Tensor]:
    """Load tensors from safetensors files by the best route, or by a forced one.

    Parameters
    ----------
    source
        A file, a directory (with or without an index), an index file, or a list of files.
    device
        "cpu", "cuda", "cuda:N", a ``torch.device`` or a CUDA ordinal; None is torch's default.
    names
        Tensors to load; None for all.
    route
        "auto" chooses for each stretch of each file; "host", "cached", "mapped", "direct" or
        "gds" serves or raises.
    progress
        True shows a bar on a terminal; a function is told a `Progress` now and then.
    context
        Whose options and pools to use; None takes the default one.

    Returns
    -------
    dict
        As `load_file`, in file order.

    Raises
    ------
    KeyError
        A name is in none of the files.
    RouteUnavailable
        The forced route cannot serve; the message has every reason.
    FormatError, SourceChanged, DeviceError, OSError, ValueError
        As `load_file`; also for an index and files that disagree.
    """
    from headrace import framework

    return framework.load(
        _Torch(),
        source,
        device=device,
        names=names,
        route=route,
        progress=progress,
        context=context,
    )


def read(
    path: PathLike,
    *,
    dtype: Any = None,
    shape: int | Sequence[int] | None = None,
    file_offset: int = 0,
    nbytes: int | None = None,
    device: Any = None,
    route: str = "auto",
    progress: ShownProgress = False,
    context: Context | None = None,
) -> torch.Tensor:
    """Read one array: a ``.npy`` file, or the raw bytes of any file.

    Parameters
    ----------
    path
        A file. With the suffix ``.npy``, and neither `file_offset` nor `nbytes`, type and shape
        are the file's own, and `dtype` and `shape`, if given, must agree.
    dtype
        Type of raw bytes: a torch type, or a safetensors name; None for uint8.
    shape
        Of raw bytes; None for one axis over all of them.
    file_offset
        First byte of raw bytes; any value.
    nbytes
        Length of raw bytes; None for what the shape needs, or up to the end of the file.
    device
        "cpu", "cuda", "cuda:N", a ``torch.device`` or a CUDA ordinal; None is torch's default.
    route, progress, context
        As for `load`.

    Returns
    -------
    tensor, with torch's own bf16 and fp8 types
        Fortran order is kept: such an array is contiguous along its first axis.

    Raises
    ------
    FormatError
        The ``.npy`` file is malformed, holds Python objects or a type without a counterpart, or
        disagrees with `dtype` or `shape`.
    ShortRead
        The file ends before the bytes that were asked for.
    ValueError
        Offsets, lengths, type and shape do not fit each other.
    RouteUnavailable, SourceChanged, DeviceError, OSError
        As for `load`.
    """
    from headrace import framework

    return framework.read(
        _Torch(),
        path,
        dtype=dtype,
        shape=shape,
        file_offset=file_offset,
        nbytes=nbytes,
        device=device,
        route=route,
        progress=progress,
        context=context,
    )


def aligned_empty(nbytes: int, device: Any = None) -> torch.Tensor:
    """Make uninitialised bytes that no route has to bounce: their address is a multiple of 4096.

    Parameters
    ----------
    nbytes
        Length in bytes.
    device
        As for `load`.

    Returns
    -------
    torch.Tensor
        One axis of uint8, part of a slightly larger allocation; a destination for `read_into`.

    Raises
    ------
    ValueError
        `nbytes` is negative, or there is no such device.
    """
    from headrace import framework

    return framework.aligned_empty(_Torch(), nbytes, device)


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


class _Torch:
    """`headrace.framework.Framework` of torch."""

    def parse_device(self, device: Any) -> Device:
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

    def dtype_name(self, dtype: Any) -> str:
        attribute = str(dtype).removeprefix("torch.")
        for name, known in _ATTRIBUTES.items():
            if attribute in (known, name):
                return name
        raise ValueError(f"dtype {dtype!r} is neither a torch type nor a safetensors name")

    def current_stream(self, device: Device) -> int | None:
        if device.is_host:
            return None
        return int(torch.cuda.current_stream(device.index).cuda_stream)

    def empty(self, spec: TensorSpec, device: Device) -> torch.Tensor:
        place = str(device)
        dtype = getattr(torch, _ATTRIBUTES.get(spec.dtype, ""), None)
        if dtype is None:
            raise FormatError(
                f"tensor {spec.name!r} is of type {spec.dtype}, which torch {torch.__version__} "
                "does not have; load it with headrace.numpy, or read its raw bytes"
            )
        if spec.order == "C":
            return torch.empty(spec.shape, dtype=dtype, device=place)
        backwards = tuple(reversed(range(len(spec.shape))))
        return torch.empty(spec.shape[::-1], dtype=dtype, device=place).permute(backwards)

    def pointer(self, array: torch.Tensor) -> int:
        return int(array.data_ptr())

"""CuPy: tensors on a GPU as CuPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from headrace.errors import FormatError
from headrace.types import Device, parse_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.context import Context
    from headrace.formats.catalog import TensorSpec
    from headrace.framework import ShownProgress
    from headrace.survey import PathLike, SourceLike

# Everything else is imported at the first call: importing this module must cost next to nothing.


def load_file(path: PathLike, device: Any = None) -> dict[str, cupy.ndarray]:
    """Load every tensor of a safetensors file: a drop-in for safetensors' load_file, on the GPU.

    Parameters
    ----------
    path
        A ``.safetensors`` file.
    device
        "cuda", "cuda:N", a ``cupy.cuda.Device`` or a CUDA ordinal; None is CuPy's current device.

    Returns
    -------
    dict
        Name to CuPy array (bf16 and fp8 types are ml_dtypes'). Each owns its memory,
        from CuPy's memory pool; dropping one frees it.
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

    return framework.load(_CuPy(), path, device=device)


def load(
    source: SourceLike,
    *,
    device: Any = None,
    names: Sequence[str] | None = None,
    route: str = "auto",
    progress: ShownProgress = False,
    context: Context | None = None,
) -> dict[str, cupy.ndarray]:
    """Load tensors from safetensors files by the best route, or by a forced one.

    Parameters
    ----------
    source
        A file, a directory (with or without an index), an index file, or a list of files.
    device
        "cuda", "cuda:N", a ``cupy.cuda.Device`` or a CUDA ordinal; None is CuPy's current device.
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
        _CuPy(),
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
) -> cupy.ndarray:
    """Read one array: a ``.npy`` file, or the raw bytes of any file.

    Parameters
    ----------
    path
        A file. With the suffix ``.npy``, and neither `file_offset` nor `nbytes`, type and shape
        are the file's own, and `dtype` and `shape`, if given, must agree.
    dtype
        Type of raw bytes: a NumPy type, or a safetensors name; None for uint8.
    shape
        Of raw bytes; None for one axis over all of them.
    file_offset
        First byte of raw bytes; any value.
    nbytes
        Length of raw bytes; None for what the shape needs, or up to the end of the file.
    device
        "cuda", "cuda:N", a ``cupy.cuda.Device`` or a CUDA ordinal; None is CuPy's current device.
    route, progress, context
        As for `load`.

    Returns
    -------
    CuPy array (bf16 and fp8 types are ml_dtypes')
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
        _CuPy(),
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


def aligned_empty(nbytes: int, device: Any = None) -> cupy.ndarray:
    """Make uninitialised bytes that no route has to bounce: their address is a multiple of 4096.

    Parameters
    ----------
    nbytes
        Length in bytes.
    device
        As for `load`.

    Returns
    -------
    cupy.ndarray
        One axis of uint8, part of a slightly larger allocation; a destination for `read_into`.

    Raises
    ------
    ValueError
        `nbytes` is negative, or there is no such device.
    """
    from headrace import framework

    return framework.aligned_empty(_CuPy(), nbytes, device)


class _CuPy:
    """`headrace.framework.Framework` of CuPy."""

    def parse_device(self, device: Any) -> Device:
        if device is None or device == "cuda":
            return Device("cuda", int(cupy.cuda.runtime.getDevice()))
        if isinstance(device, (int, cupy.cuda.Device)):
            return Device("cuda", int(device))
        target = parse_device(str(device))
        if target.is_host:
            raise ValueError("CuPy arrays live on a GPU, not in host memory; use headrace.numpy")
        return target

    def dtype_name(self, dtype: Any) -> str:
        from headrace import framework

        return framework.numpy_dtype_name(dtype)

    def current_stream(self, device: Device) -> int | None:
        with cupy.cuda.Device(device.index):
            return int(cupy.cuda.get_current_stream().ptr)

    def empty(self, spec: TensorSpec, device: Device) -> cupy.ndarray:
        from headrace.formats.dtypes import numpy_dtype

        with cupy.cuda.Device(device.index):
            dtype = numpy_dtype(spec.dtype)
            try:
                return cupy.empty(spec.shape, dtype, order=spec.order)
            except (TypeError, ValueError) as error:
                raise FormatError(
                    f"tensor {spec.name!r} is of type {spec.dtype}, which CuPy "
                    f"{cupy.__version__} does not have: {error}; load it with headrace.torch"
                ) from error

    def pointer(self, array: cupy.ndarray) -> int:
        return int(array.data.ptr)

"""From files to torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.context import Context
    from headrace.framework import ShownProgress
    from headrace.survey import PathLike, SourceLike

# Everything else is imported at the first call: importing this module must cost next to nothing.


def load_file(
    path: PathLike, device: Any = "cpu", *, verify: bool = False
) -> dict[str, torch.Tensor]:
    """Load every tensor of a safetensors file: a drop-in for ``safetensors.torch.load_file``.

    Parameters
    ----------
    path
        A ``.safetensors`` file.
    device
        "cpu", "cuda", "cuda:N", a ``torch.device`` or a CUDA ordinal; None is torch's default.
    verify
        Whether the bytes must agree with the checksums in the file; a file may have none.

    Returns
    -------
    dict
        Name to tensor, with torch's own bf16 and fp8 types. Each owns its memory, from
        torch's allocator; dropping one frees it.
        Sub-byte types come out as one-dimensional uint8 of the tensor's bytes.

    Raises
    ------
    FormatError
        The file is not whole and valid safetensors, or does not agree with its checksums.
    FileNotFoundError, PermissionError, IsADirectoryError, OSError
        As the operating system says.
    SourceChanged
        The file changed while it was read.
    RouteUnavailable, DeviceError
        There is no way to the device, or the GPU refused.
    """
    from headrace import framework
    from headrace.torch.library import Torch

    return framework.load(Torch(), path, device=device, verify=verify)


def load(
    source: SourceLike,
    *,
    device: Any = None,
    names: Sequence[str] | None = None,
    route: str = "auto",
    verify: bool = False,
    progress: ShownProgress = False,
    stream: Any = None,
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
    verify
        Whether the bytes must agree with the checksums in the file; a file may have none.
    progress
        True shows a bar on a terminal; a function is told a `Progress` now and then.
    stream
        A ``torch.cuda.Stream``, anything with ``__cuda_stream__``, or a handle: memory for the
        tensors is taken and filled in its order. None stands for the current one.
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
        As `load_file`; also for an index and files that disagree, bytes that do
        not agree with their checksum, and a stream of another device.
    """
    from headrace import framework
    from headrace.torch.library import Torch

    return framework.load(
        Torch(),
        source,
        device=device,
        names=names,
        route=route,
        verify=verify,
        progress=progress,
        stream=stream,
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
    stream: Any = None,
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
    route, progress, stream, context
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
    from headrace.torch.library import Torch

    return framework.read(
        Torch(),
        path,
        dtype=dtype,
        shape=shape,
        file_offset=file_offset,
        nbytes=nbytes,
        device=device,
        route=route,
        progress=progress,
        stream=stream,
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
    from headrace.torch.library import Torch

    return framework.aligned_empty(Torch(), nbytes, device)

"""From torch tensors to files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.context import Context
    from headrace.framework import ShownProgress
    from headrace.futures import TransferFuture
    from headrace.report import Report
    from headrace.survey import PathLike

# Everything else is imported at the first call: importing this module must cost next to nothing.


def save_file(
    tensors: Mapping[str, torch.Tensor],
    path: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    align: bool = False,
    checksum: bool = False,
    fsync: bool = True,
    route: str = "auto",
    progress: ShownProgress = False,
    stream: Any = None,
    context: Context | None = None,
) -> Report:
    """Save tensors to a safetensors file: a drop-in for ``safetensors.torch.save_file``.

    The bytes are those of ``safetensors.torch.save_file``, but for conjugate and negative views,
    whose values it gets wrong, and several entries of metadata, which are sorted here.

    Parameters
    ----------
    tensors
        A dict of names to ``torch.Tensor``: contiguous, dense, on the host or on any GPUs.
    path
        The file, which is replaced at the end of the save: whatever happens, it holds all of the
        old bytes or all of the new ones. A symbolic link is followed.
    metadata
        Text entries for the header.
    align
        Whether tensors whose size is a multiple of 4096 bytes shall start at one, for faster reads.
        The file is as valid, but not what the official writer makes.
    checksum
        Whether to add a checksum of each tensor to the metadata, for ``load(verify=True)``; needs
        the extra ``checksum``.
    fsync
        Whether to wait until storage has the file; without, a power cut may take old and new bytes.
    route
        "auto" chooses; "host", "cached", "mapped", "direct" or "gds" serves or raises.
    progress
        True shows a bar on a terminal; a function is told a `Progress` now and then.
    stream
        A ``torch.cuda.Stream``, anything with ``__cuda_stream__``, or a handle: what is queued on
        it comes first. None stands for the current stream of each device.
    context
        Whose options and pools to use; None takes the default one.

    Returns
    -------
    Report
        Which way the bytes went, and why; ``durable`` says `fsync`.

    Raises
    ------
    ValueError
        `tensors` is no dict of tensors, or has a name or a type that safetensors lacks
        (`FormatError`), or a tensor is sparse, not contiguous or without memory
        (`BufferMismatch`); or `stream` is of another device than a tensor.
    RuntimeError
        Tensors share memory: those of one storage whose bytes overlap.
    TypeError
        A name or an entry of metadata is no str, or `stream` is no stream.
    RouteUnavailable, DeviceError
        The forced route cannot serve, or the GPU refused.
    IsADirectoryError, PermissionError, OSError
        As the operating system says, such as ENOSPC; the old file is as it was.
    """
    from headrace import saving
    from headrace.torch.library import Torch

    manner = saving.Manner(align, checksum, fsync, route)
    return saving.save_file(
        Torch(),
        tensors,
        path,
        metadata,
        manner,
        progress=progress,
        stream=stream,
        context=context,
    )


def save_file_async(
    tensors: Mapping[str, torch.Tensor],
    path: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    align: bool = False,
    checksum: bool = False,
    fsync: bool = True,
    route: str = "auto",
    progress: ShownProgress = False,
    stream: Any = None,
    context: Context | None = None,
) -> TransferFuture:
    """Save tensors as they are now while the program goes on.

    A snapshot is taken first, in stream order: on the device where its free memory allows, else in
    host memory. Once the call has returned, the tensors may be changed: by anybody or, if a
    `stream` was given, by what is queued on it. That goes for their memory, too, once they are
    dropped. The file is written in the background.

    Parameters
    ----------
    tensors, path, metadata, align, checksum, fsync, route, progress, stream, context
        As for `save_file`; a function for the progress is called in another thread.

    Returns
    -------
    TransferFuture
        ``result()`` waits for the file, and gives the Report; its ``snapshot`` says where the
        snapshot was and what it cost.

    Raises
    ------
    ValueError, RuntimeError, TypeError, RouteUnavailable, DeviceError, MemoryError
        As `save_file`, as far as it does not concern the file; the rest is told by ``result()``.
    """
    from headrace import saving
    from headrace.torch.library import Torch

    manner = saving.Manner(align, checksum, fsync, route)
    return saving.save_file_async(
        Torch(),
        tensors,
        path,
        metadata,
        manner,
        progress=progress,
        stream=stream,
        context=context,
    )


def save(
    tensors: Mapping[str, torch.Tensor],
    directory: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_nbytes: int = 5_000_000_000,
    align: bool = False,
    checksum: bool = False,
    fsync: bool = True,
    route: str = "auto",
    progress: ShownProgress = False,
    stream: Any = None,
    context: Context | None = None,
) -> Report:
    """Save tensors as a checkpoint of shards and ``model.safetensors.index.json``.

    Parameters
    ----------
    tensors
        As for `save_file`; one at least.
    directory
        Made if it is missing. At every moment it holds the whole old checkpoint or the whole new
        one, so it needs space for both. Shards of the replaced index are removed in the end. A
        ``model.safetensors`` that no index named is left there, with a warning in the log.
    metadata
        Text entries for the header of each shard and for the index.
    max_shard_nbytes
        Most bytes of tensors in a shard; a larger tensor has a shard of its own.
    align, checksum, fsync, route, progress, stream, context
        As for `save_file`.

    Returns
    -------
    Report
        Of all shards together.

    Raises
    ------
    OSError
        As the operating system says, or another save into the directory is under way (EBUSY).
    ValueError, RuntimeError, TypeError, RouteUnavailable, DeviceError
        As `save_file`.
    """
    from headrace import checkpoint_saving
    from headrace.saving import Manner
    from headrace.torch.library import Torch

    return checkpoint_saving.save(
        Torch(),
        tensors,
        directory,
        metadata,
        Manner(align, checksum, fsync, route),
        max_shard_nbytes=max_shard_nbytes,
        progress=progress,
        stream=stream,
        context=context,
    )


def write(
    array: torch.Tensor,
    path: PathLike,
    *,
    file_offset: int = 0,
    route: str = "auto",
    progress: ShownProgress = False,
    stream: Any = None,
    context: Context | None = None,
) -> Report:
    """Write the bytes of one tensor into a file, in place.

    Parameters
    ----------
    array
        Contiguous; its bytes are written as they lie in memory.
    path
        A file, made if it is missing. Bytes outside the range stay as they are. Where the write
        fails, the file has its old length again, but some of the range may be written.
    file_offset
        First byte to write; any value.
    route, progress, stream, context
        As for `save_file`.

    Returns
    -------
    Report
        The bytes are in the file, but storage may not have them yet (``durable`` is False).

    Raises
    ------
    BufferMismatch
        It is not contiguous, sparse, or no torch tensor.
    ValueError
        `file_offset` is negative, or `stream` is of another device.
    RouteUnavailable, DeviceError, OSError
        As `save_file`.
    """
    from headrace import saving
    from headrace.torch.library import Torch

    return saving.write(
        Torch(),
        array,
        path,
        file_offset=file_offset,
        route=route,
        progress=progress,
        stream=stream,
        context=context,
    )

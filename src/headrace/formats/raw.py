"""Files as plain bytes: open one, guess what it is, describe a stretch of it as one array."""

from __future__ import annotations

import os
import stat
from types import MappingProxyType
from typing import BinaryIO

from headrace.errors import FormatError, ShortRead
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.formats.dtypes import itembits, tensor_nbytes
from headrace.types import ByteRange

_KINDS = (
    (b"version https://git-lfs", "it is a git-LFS pointer, not the file itself: run git lfs pull"),
    (b"\x93numpy", "it starts like a .npy file"),
    (b"pk\x03\x04", "it starts like a zip archive (.npz, or .pt and .bin of torch)"),
    (b"gguf", "it starts like a GGUF file"),
    (b"<html", "it is a web page, so the download failed: download it again"),
    (b"<!doctype", "it is a web page, so the download failed: download it again"),
)
"""First bytes in lower case. Never so few that a sound safetensors header length has them too."""


def open_regular(path: str, fd: int | None = None) -> BinaryIO:
    """Open a regular file for reading its header; the caller closes it.

    With `fd`, it is the file behind that descriptor, whatever the path names by now: header and
    payload must not come from two files.

    Nothing is read ahead: the kernel would draw megabytes of payload into the page cache (8 MiB
    where ``read_ahead_kb`` is 8192), and what is resident decides how the payload is read.

    Raises
    ------
    FormatError
        It is a pipe, a socket or a device (and is not opened: opening a pipe would block).
    IsADirectoryError
        It is a directory.
    FileNotFoundError, PermissionError
        As the operating system says.
    """
    name = path
    if fd is not None and os.path.exists(f"/proc/self/fd/{fd}"):
        name = f"/proc/self/fd/{fd}"
    try:
        return _open_regular(path, name)
    except OSError as error:
        error.filename = path
        raise


def _open_regular(path: str, name: str) -> BinaryIO:
    mode = os.stat(name).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FormatError(
            f"{path} is no regular file but {stat.filemode(mode)}; "
            "copy its contents into a file first"
        )
    file = open(name, "rb")  # noqa: SIM115 (the caller's to close)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return file


def guess_kind(head: bytes) -> str:
    """Say what a file that its reader refused seems to be, and what to do.

    Parameters
    ----------
    head
        The first bytes of the file; 64 are enough.

    Returns
    -------
    str
        One clause for an error message; never empty.
    """
    for prefix, kind in _KINDS:
        if head.lower().startswith(prefix):
            return kind
    return "download or write it again"


def describe_raw(
    path: str,
    file_nbytes: int,
    *,
    dtype: str = "U8",
    shape: tuple[int, ...] | None = None,
    file_offset: int = 0,
    nbytes: int | None = None,
) -> Catalog:
    """Describe a stretch of a file as one array without a header; the file is not opened.

    Parameters
    ----------
    path
        The file.
    file_nbytes
        Its size in bytes.
    dtype
        A dtype as `TensorSpec.dtype` has it.
    shape
        Elements along each axis; None makes it one axis over `nbytes`.
    file_offset
        First byte of the array.
    nbytes
        Length in bytes; None takes what `shape` needs, or all up to the end of the file.

    Returns
    -------
    Catalog
        With one tensor, named "".

    Raises
    ------
    ValueError
        `file_offset`, `nbytes` or an axis is negative; `nbytes` (or the rest of the file) is no
        multiple of the item size, or not what `shape` needs.
    ShortRead
        The stretch ends behind the end of the file.
    FormatError
        The dtype is unknown.
    """
    if file_offset < 0:
        raise ValueError(f"file_offset is {file_offset}; it must be 0 or more")
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it must be 0 or more, or None")
    if shape is None:
        rest = max(file_nbytes - file_offset, 0) if nbytes is None else nbytes
        shape = (_count_items(dtype, rest),)
    wanted = tensor_nbytes(dtype, shape)
    if nbytes is not None and nbytes != wanted:
        raise ValueError(
            f"nbytes is {nbytes}, but shape {shape} of {dtype} takes {wanted}; give one of them"
        )
    stop = file_offset + wanted
    if stop > file_nbytes:
        raise ShortRead(
            f"{path} has {file_nbytes} bytes; {wanted} bytes from file_offset {file_offset} on "
            f"need {stop}; ask for less, or check that the file is complete"
        )
    spec = TensorSpec("", dtype, tuple(shape), ByteRange(file_offset, stop))
    return Catalog(path, (spec,), MappingProxyType({}))


def _count_items(dtype: str, nbytes: int) -> int:
    """Whole elements in so many bytes."""
    bits = itembits(dtype)
    if not bits:
        raise ValueError(f"dtype {dtype} has elements of 0 bytes; give shape as well")
    if nbytes * 8 % bits:
        raise ValueError(
            f"{nbytes} bytes are no multiple of the {bits} bits of one {dtype} element; "
            f"give nbytes, for example {_whole_nbytes(nbytes, bits)}"
        )
    return nbytes * 8 // bits


def _whole_nbytes(nbytes: int, bits: int) -> int:
    """Most bytes, at most `nbytes`, that whole elements fill."""
    while nbytes * 8 % bits:
        nbytes -= 1
    return nbytes

"""Safetensors: the header, read by the official library, becomes a `Catalog`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.formats.dtypes import tensor_nbytes
from headrace.formats.raw import guess_kind, open_regular
from headrace.types import ByteRange

LENGTH_NBYTES = 8
"""Little-endian length of the JSON header, at the start of the file."""
LONGEST_HEADER_NBYTES = 100_000_000
"""Without the length; the official reader refuses longer headers."""

_HEAD_NBYTES = 64


def read_catalog(path: str, fd: int | None = None) -> Catalog:
    """Read what a safetensors file holds; its payload is not touched.

    Parameters
    ----------
    path
        The file.
    fd
        A descriptor of it; None opens the path.

    Returns
    -------
    Catalog
        Tensors by rising file offset, empty ones before the one that starts at the same place.

    Raises
    ------
    FormatError
        The file is truncated, malformed, or no safetensors file at all.
    FileNotFoundError, PermissionError, IsADirectoryError
        As the operating system says.
    """
    # Imported only when a file is read: `import headrace` must cost next to nothing.
    import safetensors

    header, file_nbytes = _read_header(path, fd)
    head = header[:_HEAD_NBYTES]
    payload = LENGTH_NBYTES + int.from_bytes(head[:LENGTH_NBYTES], "little")
    try:
        with (
            _stand_in(path, header, file_nbytes) as name,
            safetensors.safe_open(name, framework="np") as opened,
        ):
            tensors = tuple(_place_tensors(opened, path, payload))
            metadata = MappingProxyType(dict(opened.metadata() or {}))
    except safetensors.SafetensorError as error:
        raise FormatError(
            f"{path} is no valid safetensors file: {error}; its first 8 bytes say that the tensors "
            f"start at byte {payload}, and it has {file_nbytes} bytes; {guess_kind(head)}"
        ) from error
    stop = tensors[-1].file_range.stop if tensors else payload
    if stop != file_nbytes:
        raise FormatError(
            f"{path} has {file_nbytes} bytes, but its tensors end at byte {stop}; it changed while "
            "its header was read, or is damaged: try again, then download or write it again"
        )
    return Catalog(path, tensors, metadata)


def _read_header(path: str, fd: int | None) -> tuple[bytes, int]:
    """Read the length and the header that it announces, and the size of the file in bytes."""
    with open_regular(path, fd) as file:
        file_nbytes = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD_NBYTES)
        length = int.from_bytes(head[:LENGTH_NBYTES], "little")
        rest = LENGTH_NBYTES + min(length, file_nbytes, LONGEST_HEADER_NBYTES) - len(head)
        header = head + file.read(max(rest, 0))
    if len(head) < LENGTH_NBYTES:
        raise FormatError(
            f"{path} has {file_nbytes} bytes; a safetensors file starts with {LENGTH_NBYTES} "
            f"bytes that tell the length of its header; {guess_kind(head)}"
        )
    return header, file_nbytes


@contextlib.contextmanager
def _stand_in(path: str, header: bytes, file_nbytes: int) -> Iterator[str]:
    """A file for the library: the header, and a hole in place of the payload.

    The library maps what it opens. A mapping of the file itself would draw payload into the page
    cache, would kill the process if the file were truncated meanwhile, and could be of another
    file than the one whose payload is read.
    """
    with contextlib.ExitStack() as stack:
        try:
            fd = os.memfd_create("safetensors header")
            stack.callback(os.close, fd)
            with open(fd, "wb", closefd=False) as copy:
                copy.write(header)
            os.ftruncate(fd, file_nbytes)
            name = f"/proc/self/fd/{fd}"
            os.close(os.open(name, os.O_RDONLY))  # the library calls any failure "no such file"
        except OSError as error:
            why = f"{os.strerror(error.errno or 0)}: its header is parsed through /proc/self/fd"
            raise OSError(error.errno, why, path) from error
        yield name


def _place_tensors(opened: Any, path: str, payload: int) -> Iterator[TensorSpec]:
    """Give each tensor its place: the library refuses files with holes or overlaps."""
    start = payload
    for name in opened.offset_keys():
        view = opened.get_slice(name)
        dtype, shape = view.get_dtype(), tuple(view.get_shape())
        try:
            stop = start + tensor_nbytes(dtype, shape)
        except FormatError as error:
            raise FormatError(f"{path}: tensor {name!r}: {error}") from error
        yield TensorSpec(name, dtype, shape, ByteRange(start, stop))
        start = stop

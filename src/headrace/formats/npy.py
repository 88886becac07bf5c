"""NumPy's .npy: the header, read by NumPy, becomes a `Catalog` of one array."""

from __future__ import annotations

import io
import os
import struct
import tokenize
from types import MappingProxyType

import numpy as np

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.formats.dtypes import dtype_name, tensor_nbytes
from headrace.formats.raw import guess_kind, open_regular
from headrace.types import ByteRange

_HEADER_CHARACTERS = 10_000
"""Longest header that `np.load` parses unless told to trust the file."""
HEAD_NBYTES = 12 + 65_535
"""Magic, length and the longest version 1 header; also the longest version 3 header parsed."""
_REFUSALS = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    LookupError,
    RecursionError,
    MemoryError,
)
"""What NumPy's header functions raise on malformed input; only the first is documented."""

_Header = tuple[tuple[int, ...], bool, np.dtype]


def read_catalog(path: str, fd: int | None = None) -> Catalog:
    """Read what a .npy file holds; its payload is not touched and nothing is unpickled.

    Parameters
    ----------
    path
        The file: format version 1, 2 or 3.
    fd
        A descriptor of it; None opens the path.

    Returns
    -------
    Catalog
        With one tensor, named "". As with `np.load`: bytes behind the array are accepted, headers
        of more than 10,000 characters are not, and arrays that were saved with types of `ml_dtypes`
        are plain bytes ("|V2"), for the format does not keep those types.

    Raises
    ------
    FormatError
        The file is truncated, malformed, no .npy file at all, or holds Python objects.
    FileNotFoundError, PermissionError, IsADirectoryError
        As the operating system says.
    """
    with open_regular(path, fd) as file:
        file_nbytes = os.fstat(file.fileno()).st_size
        # Bounded: a forged length of 4 GiB then allocates nothing.
        head = file.read(HEAD_NBYTES)
    return Catalog(path, (read_spec("", path, head, file_nbytes),), MappingProxyType({}))


def read_spec(name: str, label: str, head: bytes, file_nbytes: int) -> TensorSpec:
    """Read what the header of a .npy file says of its array.

    Parameters
    ----------
    name
        What to call the array.
    label
        What error messages call the file.
    head
        Its first `HEAD_NBYTES` bytes, or all of it if it is shorter.
    file_nbytes
        Its size in bytes.

    Raises
    ------
    FormatError
        As `read_catalog`.
    """
    text = io.BytesIO(head)
    try:
        shape, is_fortran, dtype = _read_header(text)
    except _REFUSALS as error:
        raise FormatError(
            f"{label} ({file_nbytes} bytes) is no valid .npy file: {str(error)[:500]}; "
            f"{guess_kind(head.removeprefix(np.lib.format.MAGIC_PREFIX))}"
        ) from error
    start = text.tell()
    try:
        type_name = dtype_name(dtype)
        stop = start + tensor_nbytes(type_name, shape)
    except FormatError as error:
        raise FormatError(f"{label}: {error}") from error
    if stop > file_nbytes:
        raise FormatError(
            f"{label} has {file_nbytes} bytes, but its header promises an array of {stop - start} "
            f"bytes from byte {start} on, so {stop}; it is truncated: download or write it again"
        )
    return TensorSpec(name, type_name, shape, ByteRange(start, stop), "F" if is_fortran else "C")


def _read_header(head: io.BytesIO) -> _Header:
    """Read shape, order and dtype; leaves `head` at the first byte of the array."""
    version = np.lib.format.read_magic(head)
    if version == (1, 0):
        header = np.lib.format.read_array_header_1_0(head)
    elif version == (2, 0):
        header = np.lib.format.read_array_header_2_0(head)
    elif version == (3, 0):
        header = _read_header_3_0(head)
    else:
        raise ValueError(f"format version {version} is not (1, 0), (2, 0) or (3, 0)")
    if any(isinstance(axis, bool) for axis in header[0]):
        raise ValueError(f"shape is not valid: {header[0]}")
    return header


def _read_header_3_0(head: io.BytesIO) -> _Header:
    """Version 3, for which NumPy has no public function: version 2 with UTF-8 in place of Latin-1.

    The header is a Python literal, so what Latin-1 lacks is written as escapes and the reader for
    version 2 takes it; the limit on its length grows by what the escapes add.
    """
    (nbytes,) = struct.unpack("<I", head.read(4).ljust(4, b"\0"))
    raw = head.read(nbytes)
    text = raw.decode("utf-8")
    escaped = text.encode("latin-1", "backslashreplace")
    limit = _HEADER_CHARACTERS + len(escaped) - len(text)
    # A header that ends early keeps its promised length, so that NumPy says what is missing.
    promised = struct.pack("<I", len(escaped) if len(raw) == nbytes else nbytes)
    return np.lib.format.read_array_header_2_0(io.BytesIO(promised + escaped), limit)

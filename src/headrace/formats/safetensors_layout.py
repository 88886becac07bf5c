"""The header of a safetensors file to be written, and the place of every tensor in it."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import FormatError
from headrace.formats.catalog import TensorSpec
from headrace.formats.dtypes import tensor_nbytes
from headrace.formats.safetensors import LENGTH_NBYTES, LONGEST_HEADER_NBYTES
from headrace.types import ByteRange

_METADATA = "__metadata__"
_PADDING_NBYTES = 8
_PAGE_NBYTES = 4096
_RANKED = (
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8"),
    *("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
"""The types of the format, as the official writer ranks them: the last come first in a file."""


@dataclass(frozen=True, slots=True)
class Described:
    """One tensor to be saved, without its bytes."""

    name: str
    """Name in the file; any text but ``__metadata__``."""
    dtype: str
    """Safetensors name ("F32", "BF16", "F8_E4M3", ...)."""
    shape: tuple[int, ...]
    """Elements along each axis, also for the packed types (F4: two elements in a byte)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A safetensors file without its payload."""

    header: bytes
    """Every byte before the payload: the length and the padded JSON."""
    tensors: tuple[TensorSpec, ...]
    """By rising file offset; together they fill the file from the header to the end, no holes."""

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.tensors[-1].file_range.stop if self.tensors else len(self.header)


def lay_out(
    tensors: Sequence[Described],
    metadata: Mapping[str, str] | None = None,
    *,
    align: bool = False,
) -> Layout:
    """Lay out a safetensors file, to the byte as the official writer does.

    Parameters
    ----------
    tensors
        In any order: the file has them by falling rank of their type, then by name.
    metadata
        Free text entries; an empty mapping is written and None is not.
    align
        Start the payload at a multiple of 4096 bytes, with the tensors first whose size is a
        multiple of 4096, so that each of those starts at one too. The file is as valid as without,
        but up to 4095 bytes longer, and no longer what the official writer makes.

    Returns
    -------
    Layout
        Without `align`, the header is what safetensors 0.8 writes. It differs in two cases. Several
        entries of metadata are sorted by key here and come in an order that changes from call to
        call there. And for no tensors with empty metadata the official writer makes a file that no
        reader takes; here it is a valid one.

    Raises
    ------
    FormatError
        A name occurs twice or is ``__metadata__``; a name or an entry of metadata has lone
        surrogates, which UTF-8 cannot express; the format lacks a dtype; a shape is impossible (see
        `tensor_nbytes`); or the header is longer than 100,000,000 bytes, which no reader takes.
    TypeError
        A name, or a key or value of metadata, is no str; an axis is no integer.
    """
    _check_names(tensors)
    _check_metadata(metadata)
    sized = [_size(tensor) for tensor in tensors]
    sized.sort(key=lambda item: (-_RANKED.index(item[0].dtype), item[0].name))
    if align:
        sized.sort(key=lambda item: item[1] % _PAGE_NBYTES != 0)
    ranges = _string_together([nbytes for _, nbytes in sized])
    document: dict[str, object] = {} if metadata is None else {_METADATA: _sorted(metadata)}
    for (tensor, _), place in zip(sized, ranges, strict=True):
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (place.start, place.stop),
        }
    header = _encode(document, align)
    specs = tuple(
        TensorSpec(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            ByteRange(len(header) + place.start, len(header) + place.stop),
        )
        for (tensor, _), place in zip(sized, ranges, strict=True)
    )
    return Layout(header, specs)


def _check_names(tensors: Sequence[Described]) -> None:
    for tensor in tensors:
        _check_text(tensor.name, "the name of a tensor")
    for name, times in Counter(tensor.name for tensor in tensors).most_common(1):
        if times > 1:
            raise FormatError(
                f"{times} of {len(tensors)} tensors to save are named {name!r}; names in a "
                "safetensors file are unique: rename all but one"
            )
    if any(tensor.name == _METADATA for tensor in tensors):
        raise FormatError(
            f"a tensor to save is named {_METADATA!r}, where a safetensors header keeps its "
            "metadata; rename it"
        )


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is {type(metadata).__name__}; give a mapping of str to str")
    for key, value in metadata.items():
        _check_text(key, "a key of metadata")
        _check_text(value, f"metadata[{key!r}]")


def _check_text(text: object, subject: str) -> None:
    if not isinstance(text, str):
        raise TypeError(
            f"{subject} is {str(text)[:80]!r}, of type {type(text).__name__}; a safetensors header "
            "takes str there: convert it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"{subject} has the lone surrogate {text[error.start]!r} at character {error.start} of "
            f"{len(text)}; a safetensors header is UTF-8, which has none: replace it"
        ) from error


def _size(tensor: Described) -> tuple[Described, int]:
    """Give the tensor with its shape in plain integers, and its size in bytes."""
    if tensor.dtype not in _RANKED:
        raise FormatError(
            f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which safetensors lacks; it has "
            f"{', '.join(_RANKED)}: convert the tensor, or view it as bytes (U8)"
        )
    # JSON of NumPy's integers and of True would be no number.
    shape = tuple(operator.index(axis) for axis in tensor.shape)
    try:
        nbytes = tensor_nbytes(tensor.dtype, shape)
    except FormatError as error:
        raise FormatError(f"tensor {tensor.name!r} to save: {error}") from error
    return Described(tensor.name, tensor.dtype, shape), nbytes


def _string_together(sizes: Sequence[int]) -> tuple[ByteRange, ...]:
    """Ranges of the payload, each from the end of the one before it."""
    ranges = []
    start = 0
    for nbytes in sizes:
        ranges.append(ByteRange(start, start + nbytes))
        start += nbytes
    return tuple(ranges)


def _sorted(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: metadata[key] for key in sorted(metadata)}


def _encode(document: Mapping[str, object], align: bool) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    padding = -(LENGTH_NBYTES + len(text)) % _PAGE_NBYTES if align else -len(text) % _PADDING_NBYTES
    nbytes = len(text) + padding
    if nbytes > LONGEST_HEADER_NBYTES:
        raise FormatError(
            f"the safetensors header takes {nbytes} bytes and readers refuse more than "
            f"{LONGEST_HEADER_NBYTES}; save fewer tensors in one file, or less metadata"
        )
    return nbytes.to_bytes(LENGTH_NBYTES, "little") + text + b" " * padding

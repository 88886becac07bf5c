"""Names of element types: safetensors' own, and NumPy's header text for what it lacks."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.errors import FormatError

_NUMPY = MappingProxyType(
    {
        "BOOL": "|b1",
        "U8": "|u1",
        "I8": "|i1",
        "U16": "<u2",
        "I16": "<i2",
        "F16": "<f2",
        "U32": "<u4",
        "I32": "<i4",
        "F32": "<f4",
        "U64": "<u8",
        "I64": "<i8",
        "F64": "<f8",
        "C64": "<c8",
    }
)
_ML_DTYPES = MappingProxyType(
    {
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }
)
_SUBBYTE_BITS = MappingProxyType({"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6})
_BITS = MappingProxyType(
    {
        **{name: int(text[2:]) * 8 for name, text in _NUMPY.items()},
        **dict.fromkeys(_ML_DTYPES, 8),
        "BF16": 16,
        **_SUBBYTE_BITS,
    }
)
_NAME_OF_NUMPY = MappingProxyType({text: name for name, text in _NUMPY.items()})
_NAME_OF_ML_DTYPE = MappingProxyType({text: name for name, text in _ML_DTYPES.items()})
# A byte order or a list: without this rule a future "U4" would be read as NumPy's 4-letter string.
_DESCRIPTOR_STARTS = ("<", ">", "|", "[")
_MOST_NBYTES = 2**63 - 1
_MOST_AXES = 64
_NOT_A_DESCRIPTOR = (
    ValueError,
    TypeError,
    SyntaxError,
    LookupError,
    RecursionError,
    MemoryError,
)


def itembits(name: str) -> int:
    """Tell how many bits one element takes in the file.

    Parameters
    ----------
    name
        A dtype as `TensorSpec.dtype` has it.

    Returns
    -------
    int
        Bits; no multiple of 8 for the packed types (`is_subbyte`), 0 for empty strings and records.

    Raises
    ------
    FormatError
        The name is unknown.
    """
    bits = _BITS.get(name)
    return numpy_dtype(name).itemsize * 8 if bits is None else bits


def is_subbyte(name: str) -> bool:
    """Tell whether elements are packed across byte borders, so that only raw bytes can be had.

    Raises
    ------
    FormatError
        The name is unknown.
    """
    return itembits(name) % 8 != 0


def tensor_nbytes(name: str, shape: Sequence[int]) -> int:
    """Tell how many bytes an array takes in its file.

    Parameters
    ----------
    name
        A dtype as `TensorSpec.dtype` has it.
    shape
        Elements along each axis.

    Raises
    ------
    FormatError
        The name is unknown; an axis is negative; the elements do not fill whole bytes; or the axes
        are so long that no framework can make such an array, which NumPy and torch decide without
        the axes of length 0 (so 2**62 x 8 x 0 is too long too).
    """
    bits = itembits(name)
    if len(shape) > _MOST_AXES:
        raise FormatError(f"shape of {len(shape)} axes; NumPy and torch take {_MOST_AXES} at most")
    if any(axis < 0 for axis in shape):
        raise FormatError(f"shape {_brief(shape)} has a negative axis")
    filled = math.prod(axis for axis in shape if axis) * bits
    if filled > _MOST_NBYTES * 8:
        raise FormatError(
            f"shape {_brief(shape)} of {name}: its axes, without those of length 0, span more "
            f"than {_MOST_NBYTES} bytes, which NumPy and torch cannot address"
        )
    total = 0 if 0 in shape else filled
    if total % 8:
        raise FormatError(
            f"shape {_brief(shape)} of {name} takes {total} bits, which are no whole bytes"
        )
    return total // 8


def numpy_dtype(name: str) -> np.dtype:
    """Give the NumPy dtype whose elements are the file's bytes.

    Parameters
    ----------
    name
        A safetensors name ("F32", "BF16", ...) or a NumPy header descriptor ("<c16",
        "[('x', '<f4')]").

    Returns
    -------
    np.dtype
        Little-endian for safetensors names, as that format is; one of `ml_dtypes` for BF16 and F8.

    Raises
    ------
    FormatError
        The name is unknown; it packs elements across bytes (F4, F6), which NumPy cannot; or it
        holds Python objects.
    """
    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    if name in _ML_DTYPES:
        return _ml_dtype(name)
    if name in _SUBBYTE_BITS:
        raise FormatError(
            f"dtype {name} packs elements of {_SUBBYTE_BITS[name]} bits across bytes and NumPy has "
            "no such type; these tensors come out as raw bytes (U8)"
        )
    return _described_dtype(name)


def dtype_name(dtype: np.dtype) -> str:
    """Name a NumPy dtype; the inverse of `numpy_dtype`.

    Returns
    -------
    str
        The safetensors name where there is one, else NumPy's header descriptor as text.

    Raises
    ------
    FormatError
        It holds Python objects, or NumPy's descriptors cannot express it (overlapping fields, a
        bare sub-array, types of other libraries).
    """
    if dtype.hasobject:
        raise FormatError(
            f"dtype {dtype} holds Python objects: a file has only pickles of them, which are never "
            "loaded; convert the array to a numeric or fixed-length type"
        )
    name = _NAME_OF_NUMPY.get(dtype.str)
    if name is None and dtype.isnative and dtype.type.__module__ == "ml_dtypes":
        name = _NAME_OF_ML_DTYPE.get(dtype.name)
    return _descriptor(dtype) if name is None else name


def _ml_dtype(name: str) -> np.dtype:
    # Imported only when such a tensor comes by: `import headrace` must cost next to nothing.
    import ml_dtypes

    scalar = getattr(ml_dtypes, _ML_DTYPES[name], None)
    if scalar is None:
        raise FormatError(
            f"dtype {name} needs ml_dtypes.{_ML_DTYPES[name]}, which ml_dtypes "
            f"{ml_dtypes.__version__} lacks; upgrade ml_dtypes"
        )
    dtype: np.dtype = np.dtype(scalar)
    return dtype


def _described_dtype(text: str) -> np.dtype:
    unknown = FormatError(
        f"dtype {text[:200]!r} is unknown; known are {', '.join(_BITS)} and NumPy header "
        "descriptors such as '<c16'; a newer headrace may know it"
    )
    if not text.startswith(_DESCRIPTOR_STARTS):
        raise unknown
    try:
        descr: Any = ast.literal_eval(text) if text.startswith("[") else text
        dtype = np.lib.format.descr_to_dtype(descr)
    except _NOT_A_DESCRIPTOR as error:
        raise unknown from error
    if dtype.hasobject:
        raise FormatError(f"dtype {text[:200]!r} holds Python objects (pickles): never loaded")
    return dtype


def _descriptor(dtype: np.dtype) -> str:
    try:
        descr = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(descr) == dtype:
            return descr if isinstance(descr, str) else repr(descr)
    except ValueError:  # NumPy: not defined for overlapping or out-of-order fields
        pass
    raise FormatError(
        f"dtype {dtype} is no type of safetensors, and .npy headers cannot describe it; view the "
        "array as bytes (uint8) or as another type"
    )


def _brief(shape: Sequence[int]) -> str:
    return str(tuple(shape))[:120]

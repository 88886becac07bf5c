"""The demo's file: tensors shaped like a language model's layers, filled with random bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST_NBYTES = 1 << 20
"""Below this the file would hold no layer worth the name."""

_LAYERS = 4  # at least; the width of a layer is chosen so that this many fit


@dataclass(frozen=True, slots=True)
class Model:
    """A safetensors file and what it must hold."""

    path: str
    """The file."""
    nbytes: int
    """Bytes of all tensors, without the header."""
    tensors: Mapping[str, NDArray[Any]]
    """The reference, in host memory."""


def make_model(nbytes: int, folder: Path) -> Model:
    """Write a model of about `nbytes` (never more) with the official safetensors writer.

    Raises
    ------
    OSError
        The file could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    tensors = _fill(nbytes)
    path = os.fspath(folder / "model.safetensors")
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(f"{path}: the demo's file could not be written: {error}") from error
    return Model(path, sum(tensor.nbytes for tensor in tensors.values()), tensors)


def _fill(nbytes: int) -> dict[str, NDArray[Any]]:
    """Random tensors that share one allocation."""
    words = np.random.default_rng().integers(0, 2**64, -(-nbytes // 8), dtype=np.uint64)
    payload, start = words.view(np.uint8), 0
    tensors: dict[str, NDArray[Any]] = {}
    for name, dtype, shape in model_layout(nbytes):
        stop = start + int(np.prod(shape)) * dtype.itemsize
        tensors[name] = payload[start:stop].view(dtype).reshape(shape)
        start = stop
    return tensors


def model_layout(nbytes: int) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Name, dtype and shape of each tensor: whole decoder layers, then an embedding as the rest."""
    from ml_dtypes import bfloat16

    half, single = np.dtype(bfloat16), np.dtype(np.float32)
    width = 4096
    while width > 64 and _layer_nbytes(width) * _LAYERS > nbytes:
        width //= 2
    layers, rest = divmod(nbytes, _layer_nbytes(width))
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for part, shape in _layer_shapes(width).items():
            yield prefix + part, single if len(shape) == 1 else half, shape
    rows = rest // (width * half.itemsize)
    if rows:
        yield "model.embed_tokens.weight", half, (rows, width)


def _layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer with grouped queries: one key for four query heads."""
    inner, keys = width * 11 // 4, width // 4
    return {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, width),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }


def _layer_nbytes(width: int) -> int:
    """Bytes of a layer: matrices of two bytes an element, norms of four."""
    shapes = _layer_shapes(width).values()
    return sum(int(np.prod(shape)) * (4 if len(shape) == 1 else 2) for shape in shapes)

"""Making the inputs: a file of random bytes, and a model of decoder layers in two shards."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RAW_NAME = "raw.bin"
MODEL_NAME = "model"

CHUNK_NBYTES = 16 << 20
"""Bytes that a thread takes at once."""

_VALUE_NBYTES = 2  # bf16
_MIN_LAYERS = 4
_SEED = 20261129


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, after the Llama 3 8B architecture."""

    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the feed-forward layer."""
    key_value: int
    """Width of keys and values together, over all their heads."""
    layers: int
    """Decoder layers."""
    vocabulary: int
    """Rows of the embedding and of the output head."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names, as Hugging Face has them, and shapes, in order of the layers."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, shape in self._layer_tensors():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _layer_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "input_layernorm", (self.hidden,)
        yield "mlp.down_proj", (self.hidden, self.intermediate)
        yield "mlp.gate_proj", (self.intermediate, self.hidden)
        yield "mlp.up_proj", (self.intermediate, self.hidden)
        yield "post_attention_layernorm", (self.hidden,)
        yield "self_attn.k_proj", (self.key_value, self.hidden)
        yield "self_attn.o_proj", (self.hidden, self.hidden)
        yield "self_attn.q_proj", (self.hidden, self.hidden)
        yield "self_attn.v_proj", (self.key_value, self.hidden)

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one decoder layer."""
        return _VALUE_NBYTES * sum(_count(shape) for _, shape in self._layer_tensors())


def fit_shape(nbytes: int) -> ModelShape:
    """Shape of a model whose tensors take `nbytes`, to within one row of the vocabulary.

    The width is halved from 4096 until four layers fit; the embedding and the head take what
    the layers leave.
    """
    hidden = 4096
    while hidden > 64 and _of_width(hidden).layer_nbytes * _MIN_LAYERS > nbytes:
        hidden //= 2
    shape = _of_width(hidden)
    layers = max(nbytes // shape.layer_nbytes, 1)
    rest = nbytes - layers * shape.layer_nbytes
    vocabulary = max(rest // (2 * _VALUE_NBYTES * hidden), 1)
    return _of_width(hidden, layers, vocabulary)


def _of_width(hidden: int, layers: int = 1, vocabulary: int = 1) -> ModelShape:
    return ModelShape(hidden, hidden * 7 // 2, hidden // 4, layers, vocabulary)


def write_raw(path: Path, nbytes: int) -> None:
    """Write random bytes, no two chunks alike, with several threads."""
    with path.open("wb") as file:
        file.truncate(nbytes)

        def write(start: int) -> None:
            count = min(CHUNK_NBYTES, nbytes - start)
            _write_all(file.fileno(), memoryview(_random_bytes(count, start)), start)

        for_each_chunk(nbytes, write)


def write_model(directory: Path, nbytes: int) -> int:
    """Write two shards and their index by the official writer.

    The values are windows of one pool of random bits, each at another offset, so that no two
    tensors are alike and no memory for the whole model is needed.

    Returns
    -------
    int
        Bytes of all tensors.
    """
    from safetensors.numpy import save_file

    directory.mkdir()
    tensors = dict(_random_tensors(fit_shape(nbytes)))
    total = sum(int(tensor.nbytes) for tensor in tensors.values())
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    shards = dict(zip(names, _split(tensors, total // 2), strict=True))
    for name, shard in shards.items():
        save_file(shard, directory / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def _random_tensors(shape: ModelShape) -> Iterator[tuple[str, Any]]:
    import ml_dtypes

    sizes = [_count(dimensions) for _, dimensions in shape.tensors()]
    step = 1009  # values between the windows: prime, so that no window is page-aligned to another
    pool_nbytes = _VALUE_NBYTES * (max(sizes) + step * len(sizes))
    pool = _random_bytes(pool_nbytes, 0).view(np.uint16).view(ml_dtypes.bfloat16)
    for i, (name, dimensions) in enumerate(shape.tensors()):
        yield name, pool[i * step : i * step + sizes[i]].reshape(dimensions)


def _split(tensors: dict[str, Any], limit: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill the first shard up to `limit` bytes, and put the rest into the second."""
    shards: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    used = 0
    for name, tensor in tensors.items():
        shards[used >= limit][name] = tensor
        used += int(tensor.nbytes)
    return shards


def copy_tree(source: Path, destination: Path, *, direct: bool = False) -> None:
    """Copy a file, or the files of a directory, with several threads.

    Parameters
    ----------
    source, destination
        Two paths of the same kind; `destination` does not exist.
    direct
        Write with O_DIRECT, leaving nothing in the page cache.
    """
    if source.is_file():
        _copy_file(source, destination, direct)
        return
    destination.mkdir()
    for file in sorted(source.iterdir()):
        _copy_file(file, destination / file.name, direct)


def _copy_file(source: Path, destination: Path, direct: bool) -> None:
    nbytes = source.stat().st_size
    local = threading.local()
    aligned = nbytes - nbytes % mmap.PAGESIZE if direct else nbytes
    with source.open("rb") as reader, destination.open("wb") as writer:
        os.posix_fallocate(writer.fileno(), 0, max(nbytes, 1))
        writer.truncate(nbytes)
        target = _open_direct(destination) if direct else os.dup(writer.fileno())

        def copy(start: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = mmap.mmap(-1, CHUNK_NBYTES)
            view = memoryview(local.buffer)[: min(CHUNK_NBYTES, aligned - start)]
            read_all(reader.fileno(), view, start)
            _write_all(target, view, start)

        try:
            for_each_chunk(aligned, copy)
            tail = os.pread(reader.fileno(), nbytes - aligned, aligned)
            os.pwrite(writer.fileno(), tail, aligned)
        finally:
            os.close(target)
        os.fsync(writer.fileno())


def _open_direct(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_DIRECT)


def _random_bytes(count: int, stream: int) -> Any:
    """`count` random bytes as a NumPy array, the same for the same `stream`."""
    generator = np.random.Generator(np.random.SFC64([_SEED, stream]))
    words = generator.integers(0, 1 << 64, -(-count // 8), dtype=np.uint64)
    return words.view(np.uint8)[:count]


def for_each_chunk(nbytes: int, do: Callable[[int], None]) -> None:
    """Call a function with the start of each chunk of so many bytes, from several threads."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(do, range(0, nbytes, CHUNK_NBYTES)):
            pass  # raises here what a thread raised


def read_all(fd: int, view: memoryview, offset: int) -> None:
    """Fill a view from a file.

    Raises
    ------
    EOFError
        The file ends first.
    """
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise EOFError(f"the file ends at {offset + done}")
        done += count


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))

"""Checkpoints of several files: which tensors go into which, and the index that says so."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence

from headrace.formats.dtypes import tensor_nbytes
from headrace.formats.safetensors_layout import Described


def split_shards(
    tensors: Sequence[Described], max_shard_nbytes: int
) -> tuple[tuple[Described, ...], ...]:
    """Deal tensors out to shards, in the given order, as huggingface_hub does.

    Parameters
    ----------
    tensors
        What to save.
    max_shard_nbytes
        Most bytes of payload in one shard. A larger tensor has a shard of its own, which stands
        before the one that was being filled when it came.

    Returns
    -------
    tuple[tuple[Described, ...], ...]
        Shards with at least one tensor each; every tensor is in exactly one.

    Raises
    ------
    ValueError
        `max_shard_nbytes` is below 1.
    FormatError
        A dtype is unknown, or a shape impossible (see `tensor_nbytes`).
    """
    if operator.index(max_shard_nbytes) < 1:
        raise ValueError(f"max_shard_nbytes is {max_shard_nbytes}; it must be 1 or more")
    shards: list[tuple[Described, ...]] = []
    filling: list[Described] = []
    filled_nbytes = 0
    for tensor in tensors:
        nbytes = tensor_nbytes(tensor.dtype, tensor.shape)
        if nbytes > max_shard_nbytes:
            shards.append((tensor,))
            continue
        if filled_nbytes + nbytes > max_shard_nbytes:
            shards.append(tuple(filling))
            filling, filled_nbytes = [], 0
        filling.append(tensor)
        filled_nbytes += nbytes
    if filling:
        shards.append(tuple(filling))
    return tuple(shards)


def shard_index(
    weight_map: Mapping[str, str],
    total_nbytes: int,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Write the index of a checkpoint, the contents of ``model.safetensors.index.json``.

    Parameters
    ----------
    weight_map
        Name of the shard, a file right beside the index, by name of tensor.
    total_nbytes
        Payload of all shards together.
    metadata
        Free text entries for the index; its ``total_size`` gives way to `total_nbytes`.

    Returns
    -------
    bytes
        The keys of huggingface_hub's index, which are ``metadata`` with ``total_size``, and
        ``weight_map``; sorted, so that equal checkpoints have equal indexes; indented by two
        spaces; with a newline at the end. ASCII: other characters are JSON escapes.
    """
    index = {
        "metadata": {**(metadata or {}), "total_size": total_nbytes},
        "weight_map": dict(weight_map),
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("ascii")

"""Checkpoints: a file, an index, a directory or a list becomes the catalogs of its shards."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog
from headrace.formats.raw import guess_kind, open_regular
from headrace.formats.safetensors import read_catalog

_SHARD = ".safetensors"
_INDEX = ".index.json"
DEFAULT_INDEX = "model.safetensors.index.json"
"""The index that decides in a directory."""
INTERIM = "headrace.interim"
"""Key in the metadata of an index that a save makes of files without one, until it is done."""

_INTERIM_REMEDY = (
    "the index is left of a save that was killed: save again, or load the files by their names"
)

_PathText = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The files of a checkpoint, and what its index says about them."""

    files: tuple[str, ...]
    """Shards, in the order of the catalogs."""
    index: str | None = None
    """The index file; None where there is none."""
    shard_of: Mapping[str, str] = field(default_factory=dict)
    """Path of the shard in which the index puts each tensor."""
    is_interim: bool = False
    """Whether the index is that of a save which did not end."""


def find_files(source: _PathText | Sequence[_PathText]) -> tuple[str, ...]:
    """Find the safetensors files of a checkpoint.

    Parameters
    ----------
    source
        A safetensors file; a ``*.index.json``; a directory; or a list of safetensors files. In a
        directory, ``model.safetensors.index.json`` decides, else its only
        ``*.safetensors.index.json``, else all of its ``*.safetensors`` belong to it.

    Returns
    -------
    tuple[str, ...]
        Sorted by name for an index and a directory, as given for a list. Shards that an index or
        a directory names exist; a file that was given is not looked at.

    Raises
    ------
    FileNotFoundError
        A directory holds no checkpoint; the index, or a shard that it names, is missing.
    FormatError
        A directory holds several indexes; an index is malformed, or names a file that is not
        right beside it.
    ValueError
        The list is empty.
    TypeError
        A path is neither text nor `os.PathLike` with text.
    """
    return _find_checkpoint(source).files


def read_checkpoint(
    source: _PathText | Sequence[_PathText], fds: Mapping[str, int] = MappingProxyType({})
) -> tuple[Catalog, ...]:
    """Read what all files of a checkpoint hold; no payload is touched.

    Parameters
    ----------
    source
        As for `find_files`.

    Returns
    -------
    tuple[Catalog, ...]
        One for each file, in the order of `find_files`. Tensors that an index does not mention
        are there too.

    Raises
    ------
    FormatError
        As `find_files`; a file is malformed; the same tensor is in two files; or a shard lacks a
        tensor that the index puts there.
    FileNotFoundError, ValueError, TypeError
        As `find_files`; a file is missing.
    """
    found = _find_checkpoint(source)
    catalogs = tuple(read_catalog(path, fds.get(path)) for path in found.files)
    holder: dict[str, str] = {}
    for catalog in catalogs:
        for spec in catalog.tensors:
            if spec.name in holder:
                raise FormatError(
                    f"tensor {spec.name!r} is in two files, {holder[spec.name]} and "
                    f"{catalog.path}; load them one by one, or remove one"
                )
            holder[spec.name] = catalog.path
    for name, shard in found.shard_of.items():
        if holder.get(name) != shard:
            remedy = "the files do not belong together: download them again"
            if found.is_interim:
                remedy = _INTERIM_REMEDY
            raise FormatError(
                f"{found.index} puts tensor {name!r} into {shard}, which lacks it (it is in "
                f"{holder.get(name, 'no shard')}); {remedy}"
            )
    return catalogs


def _find_checkpoint(source: _PathText | Sequence[_PathText]) -> _Checkpoint:
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes, bytearray)):
        if not source:
            raise ValueError("the list of files is empty; name at least one safetensors file")
        return _Checkpoint(tuple(_path_text(path) for path in source))
    path = _path_text(source)
    if os.path.isdir(path):
        return _search_directory(path)
    return _follow_index(path) if path.endswith(_INDEX) else _Checkpoint((path,))


def _path_text(path: object) -> str:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise TypeError(
            f"path {path!r} is {type(path).__name__}; a path is str or os.PathLike with text "
            "(os.fsdecode makes text of bytes)"
        )
    return text


def _search_directory(directory: str) -> _Checkpoint:
    with os.scandir(directory) as entries:
        # Not is_file(): a shard whose symbolic link is broken must be reported, not skipped.
        names = sorted(e.name for e in entries if not e.name.startswith(".") and not e.is_dir())
    indexes = [name for name in names if name.endswith(_SHARD + _INDEX)]
    if DEFAULT_INDEX in indexes:
        indexes = [DEFAULT_INDEX]
    if len(indexes) > 1:
        raise FormatError(
            f"{directory} holds {len(indexes)} indexes ({', '.join(indexes)}) and none is "
            f"{DEFAULT_INDEX}; name the index to load instead of the directory"
        )
    if indexes:
        return _follow_index(os.path.join(directory, indexes[0]))
    shards = tuple(os.path.join(directory, name) for name in names if name.endswith(_SHARD))
    if not shards:
        raise FileNotFoundError(
            errno.ENOENT,
            f"no {DEFAULT_INDEX}, *{_SHARD}{_INDEX} or *{_SHARD} among the {len(names)} files of",
            directory,
        )
    return _Checkpoint(shards)


def _follow_index(index: str) -> _Checkpoint:
    directory, read = os.path.dirname(index), read_index(index)
    shard_of = {name: os.path.join(directory, shard) for name, shard in read.weight_map.items()}
    files = tuple(sorted(set(shard_of.values())))
    is_interim = INTERIM in read.metadata
    remedy = _INTERIM_REMEDY if is_interim else "download it, or save again"
    for path in files:
        if not os.path.exists(path):
            raise FileNotFoundError(
                errno.ENOENT,
                f"shard is missing, though {index} names it; {remedy}",
                path,
            )
    return _Checkpoint(files, index, shard_of, is_interim)


@dataclass(frozen=True, slots=True)
class Index:
    """What the index of a checkpoint says."""

    weight_map: Mapping[str, str]
    """Name of the shard, a file right beside the index, by name of tensor; not empty."""
    metadata: Mapping[str, object]
    """Whatever else; empty where there is nothing."""


def read_index(index: str) -> Index:
    """Read the index of a checkpoint; its shards are not looked at.

    Raises
    ------
    FormatError
        It is malformed, maps no tensor, or names a file that is not right beside it.
    FileNotFoundError, PermissionError, IsADirectoryError
        As the operating system says.
    """
    with open_regular(index) as file:
        text = file.read()
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{index} ({len(text)} bytes) is no valid index: {error}; {guess_kind(text[:64])}"
        ) from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(
            f"{index} has no weight_map of tensor names to file names; it is no index of a "
            "checkpoint: name the safetensors files instead"
        )
    for name, shard in weight_map.items():
        _check_shard_name(index, name, shard)
    metadata = document.get("metadata")
    return Index(weight_map, metadata if isinstance(metadata, dict) else {})


def _check_shard_name(index: str, name: str, shard: object) -> None:
    """Refuse what could lead out of the directory of the index."""
    is_plain = (
        isinstance(shard, str)
        and os.path.basename(shard) == shard
        and shard not in ("", os.curdir, os.pardir)
        and "\0" not in shard
    )
    if not is_plain:
        raise FormatError(
            f"{index} puts tensor {name!r} into {shard!r}; an index may only name files right "
            "beside it, by plain file name: do not trust this index"
        )


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make the dict of a JSON object, without letting a later key win over an earlier one."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        (key, times), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {key!r} occurs {times} times")
    return unique

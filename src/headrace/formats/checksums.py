"""Checksums of tensors as entries in the metadata of their file."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog, TensorSpec

if TYPE_CHECKING:
    from headrace.formats.safetensors_layout import Described  # a load imports nothing of writing

_PREFIX = "headrace.xxh3_64."
_DIGEST = re.compile("[0-9a-f]{16}")
_ENTRY = re.compile(r"([0-9a-f]{16}) ([A-Z][A-Z0-9_]*) (\[(?:[0-9]+(?:, [0-9]+)*)?\])")
_NEXT_STEP = (
    "copy or download the file again, or do not verify where a program changed tensors and kept "
    "the metadata"
)


def store_checksums(
    metadata: Mapping[str, str] | None,
    tensors: Sequence[Described],
    digests: Mapping[str, str],
) -> dict[str, str]:
    """Add the checksums of tensors to the metadata of their file.

    Parameters
    ----------
    metadata
        Entries of the file; not changed. Checksums that it already has are left out of the result,
        for they are of a file that was written before.
    tensors
        All that the file will hold.
    digests
        XXH3-64 of each tensor's bytes by its name: 16 hexadecimal digits in small letters. Those
        of other tensors are left out.

    Returns
    -------
    dict[str, str]
        A new dict: `metadata`, and ``headrace.xxh3_64.<tensor name>`` for each tensor, with its
        digest, dtype and shape: ``"0123456789abcdef F32 [2, 3]"``. How long the entries are does
        not depend on the digests, so a header laid out with ``"0" * 16`` in place of them has its
        final length.

    Raises
    ------
    FormatError
        A digest is not 16 hexadecimal digits in small letters.
    TypeError
        An axis is no integer.
    """
    kept = {key: text for key, text in (metadata or {}).items() if not key.startswith(_PREFIX)}
    return kept | {
        _PREFIX + each.name: f"{_checked(each.name, digests[each.name])} {_kind(each)}"
        for each in tensors
    }


def stored_checksums(catalog: Catalog) -> dict[str, str]:
    """Find the checksums in the metadata of a file, and compare the rest of them with its header.

    Returns
    -------
    dict[str, str]
        XXH3-64 by name of tensor, as 16 hexadecimal digits in small letters: of all tensors, or of
        none where the file has no checksums.

    Raises
    ------
    FormatError
        An entry is malformed; it is of a tensor that the file lacks, or of one with another dtype
        or shape; or a tensor has none though the file has some.
    """
    entries = {
        key.removeprefix(_PREFIX): text
        for key, text in sorted(catalog.metadata.items())
        if key.startswith(_PREFIX)
    }
    specs = {spec.name: spec for spec in catalog.tensors}
    digests = {
        name: _read_entry(catalog.path, name, text, specs.get(name))
        for name, text in entries.items()
    }
    for name, spec in specs.items():
        if entries and name not in entries:
            raise FormatError(
                f"{catalog.path}: no checksum is stored for tensor {name!r}, which is "
                f"{_kind(spec)}, though {len(entries)} are in the file and it has {len(specs)} "
                f"tensors; the header is damaged: {_NEXT_STEP}"
            )
    return digests


@dataclass(frozen=True, slots=True)
class StoredChecksum:
    """The checksum of a wanted tensor, as its file has it."""

    index: int
    """Which of the wanted tensors it is, counted file after file."""
    path: str
    """The file."""
    name: str
    """The tensor."""
    digest: str
    """XXH3-64 as 16 hexadecimal digits in small letters."""


def find_checksums(
    catalogs: Sequence[Catalog], wanted: Sequence[Sequence[TensorSpec]]
) -> tuple[StoredChecksum, ...]:
    """Find the checksums of wanted tensors; those in files without any are left out.

    The entries of the other tensors are compared with the header of their file too.

    Parameters
    ----------
    catalogs
        The files.
    wanted
        Tensors of each.

    Raises
    ------
    FormatError
        As `stored_checksums`.
    """
    found: list[StoredChecksum] = []
    before = 0
    for catalog, specs in zip(catalogs, wanted, strict=True):
        stored = stored_checksums(catalog)
        found += [
            StoredChecksum(index, catalog.path, spec.name, stored[spec.name])
            for index, spec in enumerate(specs, before)
            if spec.name in stored
        ]
        before += len(specs)
    return tuple(found)


def compare_checksums(stored: Sequence[StoredChecksum], digests: Sequence[str]) -> None:
    """Compare stored checksums with those of the bytes that arrived, in the same order.

    Raises
    ------
    FormatError
        Some differ; the message names the files and each of the tensors.
    """
    damaged = [
        (each, digest)
        for each, digest in zip(stored, digests, strict=True)
        if each.digest != digest
    ]
    if not damaged:
        return
    files = "; ".join(
        f"{path}: "
        + ", ".join(
            f"tensor {each.name!r} has the XXH3-64 {digest} and {each.digest} is stored"
            for each, digest in those
        )
        for path, those in groupby(damaged, lambda pair: pair[0].path)
    )
    raise FormatError(
        f"{len(damaged)} of {len(stored)} tensors with a checksum are damaged: {files}; copy or "
        "download the damaged files again, or do not verify where a program changed tensors and "
        "kept the metadata"
    )


def _kind(tensor: Described | TensorSpec) -> str:
    """The dtype and shape, as an entry has them."""
    return f"{tensor.dtype} {json.dumps([operator.index(axis) for axis in tensor.shape])}"


def _read_entry(path: str, name: str, text: str, spec: TensorSpec | None) -> str:
    """The digest of an entry that fits the header."""
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise FormatError(
            f"{path}: the checksum of tensor {name!r} is {text[:80]!r} ({len(text)} characters), "
            "not 16 hexadecimal digits in small letters, the dtype and the shape, as in "
            f"'0123456789abcdef F32 [2, 3]'; the metadata entry {_PREFIX + name!r} is damaged: "
            "copy, download or write the file again, or do not verify"
        )
    digest, dtype, shape = match.groups()
    if spec is None:
        raise FormatError(
            f"{path}: a checksum is stored for tensor {name!r}, of {dtype} {shape}, and the file "
            f"has no such tensor; the header is damaged: {_NEXT_STEP}"
        )
    if f"{dtype} {shape}" != _kind(spec):
        raise FormatError(
            f"{path}: tensor {name!r} is {_kind(spec)} and its checksum is stored for {dtype} "
            f"{shape}; the header is damaged: {_NEXT_STEP}"
        )
    return digest


def _checked(name: str, digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise FormatError(
            f"the checksum of tensor {name!r} to save is {digest[:40]!r} ({len(digest)} "
            "characters), not 16 hexadecimal digits in small letters; give its XXH3-64"
        )
    return digest

"""Checksums of tensors as entries in the metadata of their file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog, TensorSpec

_PREFIX = "headrace.xxh3_64."
_DIGEST = re.compile("[0-9a-f]{16}")


def store_checksums(
    metadata: Mapping[str, str] | None, digests: Mapping[str, str]
) -> dict[str, str]:
    """Add the checksums of tensors to the metadata of their file.

    Parameters
    ----------
    metadata
        Entries of the file; not changed. Checksums that it already has are left out of the result,
        for they are of a file that was written before.
    digests
        XXH3-64 of each tensor's bytes by its name: 16 hexadecimal digits in small letters.

    Returns
    -------
    dict[str, str]
        A new dict: `metadata`, and ``headrace.xxh3_64.<tensor name>`` for each digest. How long the
        entries are depends on the names alone, so a header laid out with ``"0" * 16`` in place of
        digests has its final length.

    Raises
    ------
    FormatError
        A digest is not 16 hexadecimal digits in small letters.
    """
    kept = {key: text for key, text in (metadata or {}).items() if not key.startswith(_PREFIX)}
    return kept | {_PREFIX + name: _checked(name, digest) for name, digest in digests.items()}


def stored_checksums(metadata: Mapping[str, str]) -> dict[str, str]:
    """Find the checksums in the metadata of a file.

    Returns
    -------
    dict[str, str]
        XXH3-64 by name of tensor, as 16 hexadecimal digits in small letters; empty for files that
        have no checksums.

    Raises
    ------
    FormatError
        An entry is not 16 hexadecimal digits in small letters.
    """
    return {
        key.removeprefix(_PREFIX): _checked(key.removeprefix(_PREFIX), text)
        for key, text in metadata.items()
        if key.startswith(_PREFIX)
    }


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
    """Find the checksums of wanted tensors; those without one are left out.

    Parameters
    ----------
    catalogs
        The files.
    wanted
        Tensors of each.

    Raises
    ------
    FormatError
        An entry is not 16 hexadecimal digits in small letters.
    """
    found: list[StoredChecksum] = []
    before = 0
    for catalog, specs in zip(catalogs, wanted, strict=True):
        try:
            stored = stored_checksums(catalog.metadata)
        except FormatError as error:
            raise FormatError(f"{catalog.path}: {error}") from error
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
        "download the damaged files again, or pass verify=False where a program changed tensors "
        "and kept the metadata"
    )


def _checked(name: str, digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise FormatError(
            f"the checksum of tensor {name!r} is {digest[:40]!r} ({len(digest)} characters), not "
            f"16 hexadecimal digits in small letters; the metadata entry {_PREFIX + name!r} is "
            "damaged: write the file again"
        )
    return digest

"""Checksums of tensors as entries in the metadata of their file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.errors import FormatError

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


def _checked(name: str, digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise FormatError(
            f"the checksum of tensor {name!r} is {digest[:40]!r} ({len(digest)} characters), not "
            f"16 hexadecimal digits in small letters; the metadata entry {_PREFIX + name!r} is "
            "damaged: write the file again"
        )
    return digest

"""Many small wanted pieces become few stretches of one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.formats.catalog import TensorSpec
from headrace.planning.plan import Piece, cut
from headrace.storage.residency import Stretch
from headrace.types import ByteRange

GAP_NBYTES = 64 << 10
"""Unwanted bytes that are read along rather than split a stretch: the time of one more read."""


def place(specs: Iterable[TensorSpec], first_buffer: int) -> tuple[Piece, ...]:
    """Send each tensor to the start of its own buffer; empty tensors need no bytes.

    Parameters
    ----------
    specs
        Tensors of one file.
    first_buffer
        Index of the buffer of the first one; the others follow.
    """
    pieces = (
        Piece(spec.file_range.start, spec.file_range.nbytes, first_buffer + index, 0)
        for index, spec in enumerate(specs)
        if spec.file_range.nbytes
    )
    return tuple(sorted(pieces, key=lambda piece: piece.file_offset))


def stretches_of(pieces: tuple[Piece, ...]) -> tuple[ByteRange, ...]:
    """Ranges of the file that hold the pieces, joined where the gap between two is small."""
    joined: list[ByteRange] = []
    for piece in pieces:
        if joined and piece.file_offset - joined[-1].stop <= GAP_NBYTES:
            joined[-1] = ByteRange(joined[-1].start, piece.file_stop)
        else:
            joined.append(ByteRange(piece.file_offset, piece.file_stop))
    return tuple(joined)


def split(
    pieces: tuple[Piece, ...], stretches: Iterable[Stretch]
) -> Iterator[tuple[Stretch, tuple[Piece, ...]]]:
    """Pieces of each stretch; those that span two are cut. A stretch of gaps alone is left out."""
    for stretch in stretches:
        inside = tuple(cut(pieces, stretch.file_range.start, stretch.file_range.stop))
        if inside:
            yield stretch, inside

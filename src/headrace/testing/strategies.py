"""Hypothesis strategies: files, requests, pieces and options, with a liking for the odd cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from headrace.options import PAGE_NBYTES, Options
from headrace.planning.plan import Piece
from headrace.types import ByteRange

_STEPS = (1, 512, PAGE_NBYTES, 16 * PAGE_NBYTES)
_DTYPES = (
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
    *("F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2"),
)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A stretch of a file of a given size."""

    file_nbytes: int
    """Size of the file."""
    file_offset: int
    """First byte wanted; at most the size."""
    nbytes: int
    """Bytes wanted; they end within the file."""


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A stretch to write, of a file that there may be."""

    file_nbytes: int | None
    """Size of the file before; None where there is none."""
    file_offset: int
    """First byte to write; it may lie past the end."""
    nbytes: int
    """Bytes to write."""


def sizes(max_nbytes: int = 1 << 20, min_nbytes: int = 0) -> st.SearchStrategy[int]:
    """Draw lengths or offsets, often at or one off a multiple of a sector, page or block."""

    def around(step: int) -> st.SearchStrategy[int]:
        multiples = st.integers(0, max_nbytes // step).map(lambda count: count * step)
        near = st.tuples(multiples, st.sampled_from((-1, 0, 1))).map(sum)
        return near.map(lambda value: min(max(value, min_nbytes), max_nbytes))

    return st.one_of(*(around(step) for step in _STEPS))


@st.composite
def byte_ranges(draw: st.DrawFn, max_stop: int = 1 << 20, min_nbytes: int = 0) -> ByteRange:
    """Draw a range of at least `min_nbytes` that ends at `max_stop` at the latest."""
    start = draw(sizes(max_stop - min_nbytes))
    return ByteRange(start, draw(sizes(max_stop, start + min_nbytes)))


@st.composite
def read_requests(draw: st.DrawFn, max_nbytes: int = 1 << 20) -> ReadRequest:
    """Draw a file size of at most `max_nbytes`, and a stretch inside such a file."""
    file_nbytes = draw(sizes(max_nbytes))
    part = draw(byte_ranges(file_nbytes))
    return ReadRequest(file_nbytes, part.start, part.nbytes)


@st.composite
def write_requests(draw: st.DrawFn, max_nbytes: int = 1 << 18) -> WriteRequest:
    """Draw a file of at most `max_nbytes`, or none, and a stretch in, over or past its end."""
    part = draw(byte_ranges(max_nbytes))
    return WriteRequest(draw(st.none() | sizes(max_nbytes)), part.start, part.nbytes)


@st.composite
def tunings(draw: st.DrawFn, max_block_nbytes: int = 1 << 16, max_workers: int = 8) -> Options:
    """Draw options with small blocks, and a page-locked budget from one block up."""
    pages = draw(st.integers(1, max_block_nbytes // PAGE_NBYTES))
    blocks = draw(st.integers(1, 2 * max_workers))
    return Options(
        workers=draw(st.integers(1, max_workers)),
        block_nbytes=pages * PAGE_NBYTES,
        pinned_nbytes=blocks * pages * PAGE_NBYTES + draw(st.sampled_from((0, 1))),
        policy=draw(st.sampled_from(("speed", "cpu", "auto"))),
        reuse=draw(st.sampled_from(("auto", "once", "many"))),
    )


@st.composite
def piece_lists(
    draw: st.DrawFn, file_nbytes: int = 1 << 20, max_pieces: int = 20, max_buffers: int = 4
) -> tuple[Piece, ...]:
    """Draw pieces as a `Transfer` holds them.

    They are in file order and do not overlap, with gaps or without. In each buffer they follow
    one another, from its start, in an order that need not be the file's.
    """
    cuts = draw(st.lists(sizes(file_nbytes), max_size=2 * max_pieces, unique=True).map(sorted))
    found = [ByteRange(start, stop) for start, stop in pairwise(cuts)]
    kept = draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)))
    ranges = [part for part, keep in zip(found, kept, strict=True) if keep][:max_pieces]
    filled = [0] * max_buffers
    pieces = []
    for part in draw(st.permutations(ranges)):
        buffer = draw(st.integers(0, max_buffers - 1))
        pieces.append(Piece(part.start, part.nbytes, buffer, filled[buffer]))
        filled[buffer] += part.nbytes
    return tuple(sorted(pieces, key=lambda piece: piece.file_offset))


def dtypes() -> st.SearchStrategy[str]:
    """Draw the safetensors name of an element type of whole bytes."""
    return st.sampled_from(_DTYPES)


def shapes(max_dims: int = 4, max_elements: int = 1 << 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes: no axes, axes of 0 and 1, at most `max_elements` elements."""
    axes = st.one_of(st.integers(0, 3), st.integers(0, 64))
    drawn = st.lists(axes, max_size=max_dims).map(tuple)
    return drawn.filter(lambda shape: math.prod(shape) <= max_elements)

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.planning.plan import Piece, Plan, Rejection, Transfer, cut
from headrace.testing.strategies import piece_lists
from headrace.types import ByteRange, Route

REJECTION = Rejection(Route.GDS, "nvidia-fs is not loaded", "load nvidia-fs")


def places(pieces: tuple[Piece, ...]) -> list[tuple[int, int, int]]:
    """Every byte of some pieces: where it is in the file, and which place it goes to."""
    return [
        (piece.file_offset + byte, piece.buffer, piece.buffer_offset + byte)
        for piece in pieces
        for byte in range(piece.nbytes)
    ]


@st.composite
def small_pieces(draw: st.DrawFn) -> tuple[Piece, ...]:
    """Few bytes and many pieces, so that each byte can be looked at."""
    pieces, offset = [], 0
    for buffer in range(draw(st.integers(0, 6))):
        offset += draw(st.integers(0, 5))
        nbytes = draw(st.integers(1, 9))
        pieces.append(Piece(offset, nbytes, buffer, draw(st.integers(0, 20))))
        offset += nbytes
    return tuple(pieces)


@given(pieces=small_pieces(), start=st.integers(0, 80), nbytes=st.integers(0, 80))
def test_cut_gives_the_bytes_inside_the_window_and_no_other(
    pieces: tuple[Piece, ...], start: int, nbytes: int
) -> None:
    window = ByteRange(start, start + nbytes)
    inside = tuple(cut(pieces, window.start, window.stop))
    expected = [place for place in places(pieces) if window.start <= place[0] < window.stop]
    assert places(inside) == expected
    assert all(piece.nbytes > 0 for piece in inside)


@given(pieces=small_pieces(), cuts=st.sets(st.integers(0, 100)))
def test_windows_side_by_side_share_the_pieces_out(
    pieces: tuple[Piece, ...], cuts: set[int]
) -> None:
    bounds = [0, *sorted(cuts), 101]
    parts = [piece for first, stop in pairwise(bounds) for piece in cut(pieces, first, stop)]
    assert places(tuple(parts)) == places(pieces)


@given(pieces=piece_lists())
def test_window_over_everything_leaves_the_pieces_whole(pieces: tuple[Piece, ...]) -> None:
    assert tuple(cut(pieces, 0, 1 << 20)) == pieces


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (14, 20), (4, 4), (8, 8), (30, 40)])
def test_window_beside_the_pieces_is_empty(start: int, stop: int) -> None:
    assert list(cut((Piece(4, 10, 0, 0),), start, stop)) == []
    assert list(cut((Piece(4, 10, 0, 0), Piece(20, 5, 1, 0)), start, stop)) == []


def test_transfer_spans_its_pieces_but_counts_wanted_bytes_only() -> None:
    transfer = Transfer(0, Route.HOST, "why", (Piece(10, 5, 0, 0), Piece(20, 5, 1, 0)))
    assert transfer.file_range == ByteRange(10, 25)
    assert transfer.nbytes == 10


def test_rejection_prints_with_its_remedy_if_there_is_one() -> None:
    assert str(REJECTION) == "gds: nvidia-fs is not loaded (load nvidia-fs)"
    assert str(Rejection(Route.HOST, "no", "")) == "host: no"


def test_downgraded_plan_reports_one_more_rejection_and_stays_the_same_otherwise() -> None:
    plan = Plan((), (Rejection(Route.HOST, "no", ""),), (), 7)
    after = plan.downgraded(REJECTION)
    assert after.rejected == (*plan.rejected, REJECTION)
    assert after.downgrades == (REJECTION,)
    assert (after.transfers, after.resident_nbytes) == ((), 7)
    assert plan.downgrades == ()

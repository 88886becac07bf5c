from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.formats.catalog import TensorSpec
from headrace.planning.coalesce import GAP_NBYTES, place, split, stretches_of
from headrace.planning.plan import Piece, cut
from headrace.storage.residency import Stretch
from headrace.testing.strategies import piece_lists
from headrace.types import ByteRange

GAPS = (0, 1, GAP_NBYTES - 1, GAP_NBYTES, GAP_NBYTES + 1, 10 * GAP_NBYTES)


def spec(start: int, nbytes: int) -> TensorSpec:
    return TensorSpec(f"at {start}", "U8", (nbytes,), ByteRange(start, start + nbytes))


@given(
    lengths=st.lists(st.integers(0, 50), max_size=12),
    order=st.randoms(use_true_random=False),
    first=st.integers(0, 5),
)
def test_each_tensor_goes_to_the_start_of_its_own_buffer_in_file_order(
    lengths: list[int], order: st.DataObject, first: int
) -> None:
    specs, offset = [], 0
    for nbytes in lengths:
        specs.append(spec(offset, nbytes))
        offset += nbytes
    order.shuffle(specs)  # type: ignore[attr-defined]
    pieces = place(specs, first)
    expected = {
        (each.file_range.start, each.file_range.nbytes, first + index, 0)
        for index, each in enumerate(specs)
        if each.file_range.nbytes
    }
    found = [(p.file_offset, p.nbytes, p.buffer, p.buffer_offset) for p in pieces]
    assert set(found) == expected
    assert len(found) == len(expected)
    assert found == sorted(found)


def test_empty_tensors_need_no_bytes_but_keep_their_buffer() -> None:
    assert place([spec(8, 0), spec(8, 3), spec(11, 0)], 0) == (Piece(8, 3, 1, 0),)
    assert place([spec(0, 0)], 0) == ()


@given(
    steps=st.lists(st.tuples(st.sampled_from(GAPS), st.integers(1, 99)), max_size=12),
)
def test_stretches_hold_every_piece_and_join_over_small_gaps_only(
    steps: list[tuple[int, int]],
) -> None:
    pieces, offset = [], 0
    for gap, nbytes in steps:
        offset += gap
        pieces.append(Piece(offset, nbytes, 0, 0))
        offset += nbytes
    stretches = stretches_of(tuple(pieces))
    for piece in pieces:
        holders = [s for s in stretches if s.start <= piece.file_offset < s.stop]
        assert len(holders) == 1
        assert piece.file_stop <= holders[0].stop
    for before, after in pairwise(stretches):
        assert after.start - before.stop > GAP_NBYTES
    for stretch in stretches:
        inside = [p for p in pieces if stretch.start <= p.file_offset < stretch.stop]
        assert (inside[0].file_offset, inside[-1].file_stop) == (stretch.start, stretch.stop)
        assert all(b.file_offset - a.file_stop <= GAP_NBYTES for a, b in pairwise(inside))


def test_nothing_wanted_has_no_stretches() -> None:
    assert stretches_of(()) == ()
    assert list(split((), [Stretch(ByteRange(0, 9), True)])) == []


def inside_of(pieces: tuple[Piece, ...], stretch: Stretch) -> tuple[Piece, ...]:
    return tuple(cut(pieces, stretch.file_range.start, stretch.file_range.stop))


@given(data=st.data(), pieces=piece_lists())
def test_split_deals_every_piece_to_the_stretches_that_hold_it(
    data: st.DataObject, pieces: tuple[Piece, ...]
) -> None:
    stretches = []
    for whole in stretches_of(pieces):
        inner = data.draw(st.sets(st.integers(whole.start, whole.stop), max_size=5))
        bounds = sorted({whole.start, *inner, whole.stop})
        stretches += [
            Stretch(ByteRange(first, stop), data.draw(st.booleans()))
            for first, stop in pairwise(bounds)
        ]
    parts = list(split(pieces, stretches))
    for stretch, inside in parts:
        assert inside
        assert inside == inside_of(pieces, stretch)
    dealt = {id(stretch) for stretch, _ in parts}
    for stretch in stretches:
        if id(stretch) not in dealt:
            assert inside_of(pieces, stretch) == ()
    total = sum(piece.nbytes for _, inside in parts for piece in inside)
    assert total == sum(piece.nbytes for piece in pieces)


def test_stretch_of_a_gap_alone_is_left_out() -> None:
    pieces = (Piece(0, 10, 0, 0), Piece(100, 10, 1, 0))
    gap = Stretch(ByteRange(10, 100), False)
    ends = [Stretch(ByteRange(0, 10), True), gap, Stretch(ByteRange(100, 110), True)]
    assert [stretch for stretch, _ in split(pieces, ends)] == [ends[0], ends[2]]

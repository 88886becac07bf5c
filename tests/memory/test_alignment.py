from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.memory.alignment import align_down, align_outward, align_up
from headrace.types import ByteRange

values = st.integers(0, 1 << 40)
alignments = st.one_of(st.integers(1, 100), st.sampled_from([512, 4096, 1 << 16, 1 << 22]))


@given(value=st.integers(0, 400), alignment=st.integers(1, 64))
def test_rounding_gives_the_nearest_multiple_on_its_side(value: int, alignment: int) -> None:
    multiples = range(0, value + alignment + 1, alignment)
    assert align_down(value, alignment) == max(each for each in multiples if each <= value)
    assert align_up(value, alignment) == min(each for each in multiples if each >= value)


@given(value=values, alignment=alignments)
def test_rounding_up_is_rounding_down_but_for_one_step(value: int, alignment: int) -> None:
    down, up = align_down(value, alignment), align_up(value, alignment)
    assert up - down == (0 if value % alignment == 0 else alignment)
    assert down <= value <= up


@given(start=values, nbytes=st.integers(0, 1 << 24), alignment=alignments)
def test_aligned_range_covers_the_wanted_one_with_less_than_a_step_to_spare(
    start: int, nbytes: int, alignment: int
) -> None:
    wanted = ByteRange(start, start + nbytes)
    wide = align_outward(wanted, alignment)
    assert (wide.start % alignment, wide.stop % alignment) == (0, 0)
    assert 0 <= wanted.start - wide.start < alignment
    assert 0 <= wide.stop - wanted.stop < alignment


@given(start=values, nbytes=st.integers(1, 1 << 24), alignment=alignments)
def test_aligning_twice_changes_nothing(start: int, nbytes: int, alignment: int) -> None:
    once = align_outward(ByteRange(start, start + nbytes), alignment)
    assert align_outward(once, alignment) == once

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.memory.alignment import align_down, align_up

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


@given(value=values, alignment=alignments)
def test_aligned_value_stays_as_it_is(value: int, alignment: int) -> None:
    aligned = value * alignment
    assert align_down(aligned, alignment) == align_up(aligned, alignment) == aligned

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RouteUnavailable
from headrace.options import Options
from headrace.planning.coalesce import stretches_of
from headrace.planning.plan import Piece, Plan
from headrace.planning.planner import FileFacts, make_plan
from headrace.planning.route import SMALL_NBYTES
from headrace.storage.residency import Residency, Stretch
from headrace.testing.strategies import piece_lists
from headrace.types import HOST, ByteRange, Device, Route
from tests.support import CUDA, make_facts

GIB = 1 << 30


@st.composite
def residencies(draw: st.DrawFn, pieces: tuple[Piece, ...], scale: int = 1) -> Residency:
    """Any state of the page cache over the ranges that some pieces need."""
    stretches: list[Stretch] = []
    for whole in stretches_of(pieces):
        inner = draw(st.sets(st.integers(whole.start, whole.stop), max_size=4))
        states = draw(st.lists(st.booleans(), min_size=5, max_size=5))
        for state, (first, stop) in zip(
            states, pairwise(sorted({whole.start, *inner, whole.stop})), strict=False
        ):
            stretches.append(Stretch(ByteRange(first, stop), state))
    resident = sum(s.file_range.nbytes for s in stretches if s.resident)
    return Residency(tuple(stretches), resident * scale, "cachestat", "made up")


@st.composite
def files(draw: st.DrawFn) -> list[FileFacts]:
    """Some files with wanted pieces, each in any state."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        pieces = draw(piece_lists(file_nbytes=64 << 20))
        residency = draw(residencies(pieces))
        direct = draw(st.booleans())
        found.append(FileFacts(pieces, residency, make_facts(direct=direct)))
    return found


def whole_file(nbytes: int, *, resident: bool, **facts: Any) -> FileFacts:
    """One tensor that is a whole file."""
    stretch = Stretch(ByteRange(0, nbytes), resident)
    residency = Residency((stretch,), nbytes if resident else 0, "cachestat", "made up")
    return FileFacts((Piece(0, nbytes, 0, 0),), residency, make_facts(**facts))


def routes(plan: Plan) -> list[str]:
    return [str(transfer.route) for transfer in plan.transfers]


@settings(deadline=None)
@given(
    wanted=files(),
    device=st.sampled_from([HOST, CUDA]),
    reuse=st.sampled_from(["auto", "once", "many"]),
)
def test_every_wanted_byte_is_in_one_transfer_and_goes_to_its_place(
    wanted: list[FileFacts], device: Device, reuse: Any
) -> None:
    plan = make_plan(wanted, device, Options(reuse=reuse), None)
    for source, file in enumerate(wanted):
        parts = [
            piece
            for transfer in plan.transfers
            if transfer.source == source
            for piece in transfer.pieces
        ]
        offsets = [piece.file_offset for piece in parts]
        assert offsets == sorted(offsets)
        assert _glue(tuple(parts)) == _glue(file.pieces)


def _glue(pieces: tuple[Piece, ...]) -> list[Piece]:
    """Join pieces that go on where the last one ended, in the file and in the buffer."""
    glued: list[Piece] = []
    for piece in pieces:
        if glued and (
            glued[-1].file_stop == piece.file_offset
            and glued[-1].buffer == piece.buffer
            and glued[-1].buffer_offset + glued[-1].nbytes == piece.buffer_offset
        ):
            last = glued.pop()
            piece = Piece(
                last.file_offset, last.nbytes + piece.nbytes, last.buffer, last.buffer_offset
            )
        glued.append(piece)
    return glued


@settings(deadline=None)
@given(
    wanted=files(),
    device=st.sampled_from([HOST, CUDA]),
    reuse=st.sampled_from(["auto", "once", "many"]),
)
def test_each_transfer_is_one_stretch_by_the_route_that_suits_its_state(
    wanted: list[FileFacts], device: Device, reuse: Any
) -> None:
    plan = make_plan(wanted, device, Options(reuse=reuse), None)
    buffered = Route.HOST if device.is_host else Route.CACHED
    for transfer in plan.transfers:
        file = wanted[transfer.source]
        (stretch,) = [
            each
            for each in file.residency.stretches
            if each.file_range.start <= transfer.file_range.start
            and transfer.file_range.stop <= each.file_range.stop
        ]
        if stretch.resident or not file.facts.volume.direct.holds or reuse == "many":
            assert transfer.route == buffered
        assert transfer.keep_clean == (reuse == "once" and not stretch.resident)
        assert transfer.why
    assert plan.resident_nbytes == sum(
        min(file.residency.resident_nbytes, sum(piece.nbytes for piece in file.pieces))
        for file in wanted
    )
    assert set(plan.downgrades) <= set(plan.rejected)
    assert len(set(plan.rejected)) == len(plan.rejected)


def test_half_resident_file_has_two_transfers_by_two_routes() -> None:
    half = Residency(
        (Stretch(ByteRange(0, GIB), True), Stretch(ByteRange(GIB, 2 * GIB), False)),
        GIB,
        "cachestat",
        "made up",
    )
    plan = make_plan(
        [FileFacts((Piece(0, 2 * GIB, 0, 0),), half, make_facts())], HOST, Options(), None
    )
    assert routes(plan) == ["host", "direct"]
    assert [transfer.file_range for transfer in plan.transfers] == [
        ByteRange(0, GIB),
        ByteRange(GIB, 2 * GIB),
    ]


def test_many_small_shards_count_together_against_the_free_memory() -> None:
    shards = [whole_file(GIB, resident=False, available=8 * GIB) for _ in range(10)]
    many = Options(reuse="many")
    assert routes(make_plan(shards[:4], HOST, many, None)) == ["host"] * 4
    assert routes(make_plan(shards, HOST, many, None)) == ["direct"] * 10


def test_little_that_is_missing_beside_much_that_is_resident_goes_through_the_page_cache() -> None:
    little = whole_file(SMALL_NBYTES - 1, resident=False)
    plan = make_plan([whole_file(GIB, resident=True), little], CUDA, Options(), None)
    assert routes(plan) == ["cached", "cached"]


def test_downgrade_of_many_files_for_one_cause_is_told_once() -> None:
    shards = [whole_file(GIB, resident=False, direct=False) for _ in range(5)]
    plan = make_plan(shards, HOST, Options(), None)
    assert routes(plan) == ["host"] * 5
    assert [str(each.route) for each in plan.downgrades] == ["direct"]


def test_resident_file_has_no_downgrade_where_o_direct_is_refused() -> None:
    plan = make_plan([whole_file(GIB, resident=True, direct=False)], HOST, Options(), None)
    assert plan.downgrades == ()


def test_strict_plan_refuses_the_downgrade_of_any_file() -> None:
    shards = [whole_file(GIB, resident=True), whole_file(GIB, resident=False, direct=False)]
    with pytest.raises(RouteUnavailable, match="strict=True forbids host in place of direct"):
        make_plan(shards, HOST, Options(strict=True), None)


def test_forced_route_is_that_of_every_stretch() -> None:
    shards = [whole_file(GIB, resident=True), whole_file(GIB, resident=False)]
    assert routes(make_plan(shards, CUDA, Options(), Route.DIRECT)) == ["direct", "direct"]
    assert routes(make_plan(shards, CUDA, Options(), Route.CACHED)) == ["cached", "cached"]


def test_nothing_wanted_is_an_empty_plan_on_any_machine() -> None:
    nothing = FileFacts((), Residency((), 0, "cachestat", "made up"), make_facts(gpu=False))
    assert make_plan([nothing], CUDA, Options(), Route.GDS).transfers == ()
    assert make_plan([], HOST, Options(), None) == Plan((), (), (), 0)

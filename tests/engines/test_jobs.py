"""Jobs: how transfers are cut into windows, and which copies a window needs."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.base import Job, Jobs
from headrace.memory.buffer import Buffer
from headrace.planning.plan import Piece, Transfer
from headrace.testing.strategies import piece_lists
from headrace.types import Device, Route


def taken(transfers: list[Transfer], block_nbytes: int) -> Iterator[Job]:
    jobs = Jobs(transfers, block_nbytes)
    while (job := jobs.take()) is not None:
        yield job


def transfer_of(pieces: tuple[Piece, ...]) -> Transfer:
    return Transfer(0, Route.CACHED, "", pieces)


def transfers() -> st.SearchStrategy[Transfer]:
    return piece_lists().filter(bool).map(transfer_of)


@given(transfer=transfers(), block_nbytes=st.integers(1 << 12, 1 << 18))
def test_jobs_share_a_transfer_out_at_the_multiples_of_the_block_size(
    transfer: Transfer, block_nbytes: int
) -> None:
    jobs = list(taken([transfer], block_nbytes))
    whole = transfer.file_range
    inner = [job.stop for job in jobs[:-1]]
    assert [job.start for job in jobs] == [whole.start, *inner]
    assert jobs[-1].stop == whole.stop
    assert all(not stop % block_nbytes for stop in inner)
    assert all(0 < job.stop - job.start <= block_nbytes for job in jobs)


@given(drawn=st.lists(transfers(), max_size=3))
def test_jobs_come_transfer_after_transfer(drawn: list[Transfer]) -> None:
    together = list(taken(drawn, 1 << 14))
    assert together == [job for transfer in drawn for job in taken([transfer], 1 << 14)]


@given(
    transfer=transfers(), block_nbytes=st.integers(1 << 12, 1 << 18), base=st.integers(0, 1 << 47)
)
def test_copies_of_a_job_are_its_pieces_from_the_block_to_their_buffers(
    transfer: Transfer, block_nbytes: int, base: int
) -> None:
    count = 1 + max(piece.buffer for piece in transfer.pieces)
    buffers = [Buffer(n << 40, 1 << 20, Device("cuda"), None) for n in range(1, count + 1)]
    for job in taken([transfer], block_nbytes):
        expected = [
            (buffers[p.buffer].pointer + p.buffer_offset, base + p.file_offset, p.nbytes)
            for p in job.pieces()
        ]
        assert job.copies(buffers, base) == expected
        assert job.copies_out(buffers, base) == [(host, gpu, n) for gpu, host, n in expected]


def test_no_job_is_given_out_after_the_stop() -> None:
    jobs = Jobs([transfer_of((Piece(0, 10, 0, 0),))], 2)
    assert len(jobs) == 5
    jobs.stop()
    assert jobs.take() is None

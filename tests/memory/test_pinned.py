from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.memory.pinned import Block, PinnedPool
from headrace.testing import FakeCuda
from tests.support import PAGE, TIMEOUT_S, ends_in_time


def make_pool(blocks: int, cuda: FakeCuda | None = None) -> tuple[PinnedPool, FakeCuda]:
    cuda = cuda or FakeCuda()
    return PinnedPool(cuda, PAGE, blocks * PAGE), cuda


def test_nothing_is_page_locked_before_it_is_needed() -> None:
    pool, cuda = make_pool(8)
    assert (pool.nbytes, cuda.pinned_nbytes, pool.capacity) == (0, 0, 8)


def test_block_is_a_page_of_page_locked_writable_memory() -> None:
    pool, cuda = make_pool(1)
    block = pool.take()
    assert (block.pinned, len(block.view), block.pointer % PAGE) == (True, PAGE, 0)
    block.view[:] = b"x" * PAGE
    assert cuda.pinned_nbytes == pool.nbytes == PAGE


def test_budget_is_rounded_down_to_whole_blocks() -> None:
    cuda = FakeCuda()
    pool = PinnedPool(cuda, PAGE, 4 * PAGE - 1)
    blocks = [pool.try_take() for _ in range(6)]
    assert [block is not None for block in blocks] == [True] * 3 + [False] * 3
    assert cuda.peak_pinned_nbytes == 3 * PAGE


def test_block_that_was_given_back_is_used_again() -> None:
    pool, cuda = make_pool(8)
    first = pool.take()
    pool.give_back(first)
    for _ in range(20):
        block = pool.take()
        assert block is first
        pool.give_back(block)
    assert cuda.peak_pinned_nbytes == PAGE


@settings(deadline=None)
@given(budget=st.integers(1, 5), steps=st.lists(st.booleans(), max_size=40))
def test_blocks_in_use_are_never_shared_and_never_above_the_budget(
    budget: int, steps: list[bool]
) -> None:
    pool, cuda = make_pool(budget)
    taken: list[Block] = []
    most = 0
    for take in steps:
        if take:
            block = pool.try_take()
            assert (block is None) == (len(taken) == budget)
            if block is not None:
                assert block.pointer not in [other.pointer for other in taken]
                taken.append(block)
        elif taken:
            pool.give_back(taken.pop(0))
        most = max(most, len(taken))
    # As few as were needed at the same time.
    assert cuda.peak_pinned_nbytes == pool.nbytes == most * PAGE
    for block in taken:
        pool.give_back(block)
    pool.close()
    assert (cuda.pinned_nbytes, cuda.errors) == (0, [])


def test_take_waits_until_a_block_is_given_back() -> None:
    pool, _ = make_pool(1)
    block = pool.take()
    got: list[Block] = []
    waiter = threading.Thread(target=lambda: got.append(pool.take()), daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    pool.give_back(block)
    waiter.join(TIMEOUT_S)
    assert got == [block]


def test_every_waiter_gets_its_turn() -> None:
    pool, _ = make_pool(1)

    def work() -> None:
        for _ in range(20):
            pool.give_back(pool.take())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)


def test_many_threads_share_few_blocks_without_meeting_in_one() -> None:
    pool, cuda = make_pool(3)
    busy: set[int] = set()
    guard = threading.Lock()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(50):
            block = pool.take()
            with guard:
                assert block.pointer not in busy
                busy.add(block.pointer)
            if dice.random() < 0.1:
                time.sleep(0.0005)
            with guard:
                busy.remove(block.pointer)
            pool.give_back(block)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, seed) for seed in range(8)]:
            done.result(TIMEOUT_S)
    assert cuda.peak_pinned_nbytes <= 3 * PAGE
    pool.close()
    assert cuda.errors == []


def test_closing_unlocks_every_block_and_closing_again_is_safe() -> None:
    pool, cuda = make_pool(4)
    blocks = [pool.take() for _ in range(4)]
    for block in blocks:
        pool.give_back(block)
    pool.close()
    pool.close()
    assert (cuda.pinned_nbytes, pool.nbytes, cuda.errors) == (0, 0, [])


def test_preparing_makes_one_block_and_only_once() -> None:
    pool, cuda = make_pool(4)
    for _ in range(2):
        pool.prepare()
        assert pool.failure is None
    assert cuda.peak_pinned_nbytes == PAGE


# Where the system gives no page-locked memory, or less than the budget.


def test_system_that_locks_no_page_gives_one_block_of_ordinary_memory_and_its_reason() -> None:
    pool, cuda = make_pool(4, FakeCuda(pinned_limit_nbytes=0))
    pool.prepare()
    assert "cudaErrorMemoryAllocation" in (pool.failure or "")
    block = pool.take()
    assert (block.pinned, pool.nbytes, cuda.pinned_nbytes) == (False, 0, 0)
    block.view[:] = b"x" * PAGE
    assert pool.try_take() is None
    pool.give_back(block)
    pool.close()
    assert cuda.errors == []


def test_system_that_locks_less_than_the_budget_gives_what_there_is() -> None:
    pool, cuda = make_pool(8, FakeCuda(pinned_limit_nbytes=3 * PAGE))
    blocks = [pool.try_take() for _ in range(8)]
    assert [block is not None for block in blocks] == [True] * 3 + [False] * 5
    assert all(block.pinned for block in blocks if block)
    pool.prepare()
    assert pool.failure is None
    assert cuda.pinned_nbytes == 3 * PAGE


def test_waiter_is_served_after_its_own_block_could_not_be_made() -> None:
    pool, _ = make_pool(8, FakeCuda(pinned_limit_nbytes=PAGE))
    first = pool.take()
    got: list[Block] = []
    waiter = threading.Thread(target=lambda: got.append(pool.take()), daemon=True)
    waiter.start()
    waiter.join(0.05)
    pool.give_back(first)
    waiter.join(TIMEOUT_S)
    assert got == [first]


def test_threads_that_all_meet_the_limit_at_once_still_get_their_turns() -> None:
    class Slow(FakeCuda):
        def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
            time.sleep(0.005)
            super().register_host(pointer, nbytes, read_only=read_only)

    for limit in (0, PAGE, 2 * PAGE):
        pool, cuda = make_pool(16, Slow(pinned_limit_nbytes=limit))

        def work(pool: PinnedPool = pool) -> None:
            for _ in range(5):
                pool.give_back(pool.take())

        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert cuda.pinned_nbytes == limit
        pool.close()
        assert cuda.errors == []


class FailsOnce(FakeCuda):
    """The first page lock fails as it is told to; later ones work."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure: Exception | None = failure

    def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        super().register_host(pointer, nbytes, read_only=read_only)


def attempt(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 (given back to be looked at)
        return error
    return None


def test_block_that_could_not_be_made_does_not_count_against_the_budget() -> None:
    pool, _ = make_pool(1, FailsOnce(MemoryError("no memory for the mapping")))
    assert isinstance(attempt(pool.take), MemoryError)
    assert ends_in_time(pool.take, 0.5)

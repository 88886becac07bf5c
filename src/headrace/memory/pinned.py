"""A bounded pool of page-locked blocks, each allocated when it is first needed."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

from headrace.bindings.cuda import Cuda
from headrace.bindings.pymemory import address_of, map_pages
from headrace.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Block:
    """Host memory through which bytes bounce on their way to a GPU."""

    pointer: int
    """Address; a multiple of the page size."""
    view: memoryview
    """All of its bytes, writable."""
    pinned: bool
    """Whether it is page-locked; if not, the driver copies its bytes once more on the way."""


class PinnedPool:
    """Blocks of one size, within a budget, shared by all transfers of a context.

    A worker that holds a block must not wait in `take` for another: it gives its own back first.
    Transfers that share a small pool can then never wait for each other.

    Parameters
    ----------
    cuda
        Allocates and frees the blocks.
    block_nbytes
        Size of each block; a multiple of the page size.
    budget_nbytes
        Most bytes that may be held.
    """

    def __init__(self, cuda: Cuda, block_nbytes: int, budget_nbytes: int) -> None:
        self._cuda = cuda
        self._block_nbytes = block_nbytes
        self._capacity = budget_nbytes // block_nbytes
        self._reserved = 0
        self._made: list[Block] = []
        self._free: list[Block] = []
        self._failure: str | None = None
        self._changed = threading.Condition()
        # Also for a context that nobody closed: memory that is unmapped while it is still locked
        # would make the next lock of the same address fail.
        weakref.finalize(self, _unlock, cuda, self._made).atexit = False

    @property
    def capacity(self) -> int:
        """Blocks that may exist at the same time."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Page-locked bytes held now; they are kept for later transfers until `close`."""
        # Without the lock: in a forked child, whoever held it may never give it back.
        return sum(len(block.view) for block in tuple(self._made) if block.pinned)

    @property
    def failure(self) -> str | None:
        """Why the system gives no page-locked memory at all; None while there is some."""
        with self._changed:
            none = not any(block.pinned for block in self._made)
        return self._failure if none else None

    def prepare(self) -> None:
        """Make sure that there is a block; `failure` then tells whether it is page-locked."""
        with self._changed:
            made = bool(self._made)
        if not made:
            self.give_back(self.take())

    def try_take(self) -> Block | None:
        """Take a block if one is free or may still be made; never waits for other workers."""
        with self._changed:
            if self._free:
                return self._free.pop()
            if self._reserved >= self._capacity:
                return None
            self._reserved += 1
        # Outside the lock: locking pages takes milliseconds, and other workers go on meanwhile.
        return self._make()

    def take(self) -> Block:
        """Take a block, waiting until another worker gives one back if need be."""
        while (block := self.try_take()) is None:
            with self._changed:
                self._changed.wait_for(lambda: self._free or self._reserved < self._capacity)
        return block

    def give_back(self, block: Block) -> None:
        """Return a block that nothing reads or writes any more."""
        with self._changed:
            self._free.append(block)
            self._changed.notify()

    def close(self) -> None:
        """Unlock and drop all blocks; every one must have been given back."""
        with self._changed:
            self._free.clear()
            self._reserved = 0
            _unlock(self._cuda, self._made)

    def _make(self) -> Block | None:
        """Make the block that was reserved, or settle for those that exist."""
        block: Block | None = None
        try:
            view = map_pages(self._block_nbytes)
            pointer, _ = address_of(view)
            pinned = self._lock_pages(pointer)
            with self._changed:
                if pinned or not self._made:
                    block = Block(pointer, view, pinned)
                    self._made.append(block)
        finally:
            if block is None:
                self._give_up()
        return block

    def _give_up(self) -> None:
        """Return a reservation: there will be no more blocks than those that exist."""
        with self._changed:
            self._reserved -= 1
            self._capacity = max(self._reserved, 1)
            self._changed.notify_all()

    def _lock_pages(self, pointer: int) -> bool:
        if self._failure is None:
            try:
                self._cuda.register_host(pointer, self._block_nbytes)
            except DeviceError as error:
                self._failure = str(error)
        return self._failure is None


def _unlock(cuda: Cuda, blocks: list[Block]) -> None:
    while blocks:
        block = blocks.pop()
        if block.pinned:
            cuda.unregister_host(block.pointer)

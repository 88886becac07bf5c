"""A neighbour that wants a whole core: ``python -m benchmarks.busy FILE SLOT PARENT``.

It counts its loops in its slot of a mapped file until its parent raises the flag there, or dies.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

SLOT_WORDS = 8
"""Words of 8 bytes of a slot: a cache line, so that neighbours do not slow one another down.

The first is the count of loops, the second the CPU time in ns; slot 0 begins with the flag. A word
is written at once, so that nobody reads half of it.
"""

_LOOPS = 20_000  # between two entries: about a millisecond


def main(arguments: list[str]) -> None:
    """Loop."""
    path, slot, parent = arguments[0], int(arguments[1]), int(arguments[2])
    with open(path, "r+b") as file:
        board = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    loops, place = 0, slot * SLOT_WORDS
    while not board[0] and os.getppid() == parent:
        for _ in range(_LOOPS):
            pass
        loops += _LOOPS
        board[place] = loops
        board[place + 1] = time.process_time_ns()


if __name__ == "__main__":
    main(sys.argv[1:])

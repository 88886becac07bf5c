"""What an engine is, and how its workers share the jobs of a transfer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple, Protocol, TypeVar

from headrace.bindings.cuda import Copy
from headrace.engines.lanes import Fence
from headrace.memory.alignment import align_down
from headrace.memory.buffer import Buffer
from headrace.planning.plan import Piece, Rejection, Transfer, cut
from headrace.storage.sink import Sink
from headrace.storage.source import Source
from headrace.types import Device, Route

_PROGRESS_INTERVAL_S = 0.1

OnMoved = Callable[[int], None]
"""Told the wanted bytes that were moved so far."""


class Job(NamedTuple):
    """One window of one transfer: what a worker does at a time.

    A tuple: tens of thousands are made each second, with the interpreter lock held.
    """

    transfer: Transfer
    """The stretch that it is a part of."""
    start: int
    """First byte of its part of the file."""
    stop: int
    """End of its part of the file, exclusive."""

    def pieces(self) -> list[Piece]:
        """Wanted bytes of the window, and where they go."""
        return cut(self.transfer.pieces, self.start, self.stop)

    def copies_out(self, buffers: Sequence[Buffer], base: int) -> list[Copy]:
        """Copies from the GPU, into host memory in which file offset 0 would lie at `base`."""
        return [(host, gpu, nbytes) for gpu, host, nbytes in self.copies(buffers, base)]

    def copies(self, buffers: Sequence[Buffer], base: int) -> list[Copy]:
        """Copies to the GPU, out of host memory in which file offset 0 would lie at `base`."""
        transfer, start, stop = self
        if len(transfer.pieces) == 1:  # nothing to search, as for each of the blocks of a raw file
            piece = transfer.pieces[0]
            gpu = buffers[piece.buffer].pointer + piece.buffer_offset
            return [(gpu + start - piece.file_offset, base + start, stop - start)]
        return [
            (buffers[buffer].pointer + buffer_offset, base + file_offset, nbytes)
            for file_offset, nbytes, buffer, buffer_offset in self.pieces()
        ]


@dataclass(slots=True)
class Tally:
    """What one worker has done so far; only that worker writes to it."""

    moved_nbytes: int = 0
    """Wanted bytes that were moved."""
    unaligned_nbytes: int = 0
    """Wanted bytes whose offset, length or address was not aligned for the route."""
    file_seconds: float = 0.0
    """Wall seconds inside calls that read or write the file."""
    cpu_seconds: float = 0.0
    """User and system seconds of the worker's thread."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What an engine did."""

    route: Route
    """The engine's route."""
    nbytes: int
    """Wanted bytes that arrived."""
    evidence: str
    """How we know which way they went."""
    file_seconds: float
    """Wall seconds in calls that read or write files, summed over the workers."""
    cpu_seconds: float
    """User and system seconds of the workers."""
    unaligned_nbytes: int = 0
    """Wanted bytes whose offset, length or address was not aligned for the route."""
    bounce: str = ""
    """What the bytes bounced through on their way; "" where they went straight."""
    mode: str = ""
    """A name that tells more than the route's own, such as "gds (cuFile compatibility mode)"."""
    downgrades: tuple[Rejection, ...] = ()
    """What did not go as the route promises, and what would change it."""
    beside: tuple[Stats, ...] = ()
    """What went other ways meanwhile, to be done sooner; not in `nbytes`."""


@dataclass(frozen=True, slots=True)
class Cargo:
    """All that an engine needs to move bytes."""

    transfers: Sequence[Transfer]
    """The stretches to move, all of the engine's own route."""
    sources: Sequence[Source]
    """Files to read from, by `Transfer.source`; () for a write."""
    buffers: Sequence[Buffer]
    """By `Piece.buffer`; those that the transfers name are all on one device."""
    workers: int
    """Most threads to use."""
    block_nbytes: int
    """Most bytes of one read or write; they are cut at its multiples in the file."""
    sinks: Sequence[Sink] = ()
    """Files to write to, by `Transfer.source`; () for a read."""
    fence: Fence = field(default_factory=Fence)
    """The copies come after it."""
    stream: int | None = None
    """CUDA stream of the caller, on which copies may be left under way; None for none."""
    on_progress: OnMoved | None = None
    """Called now and then, in the calling thread, with the bytes moved so far."""

    @property
    def device(self) -> Device:
        """Where the memory is that the transfers name; there must be one transfer."""
        return self.buffers[self.transfers[0].pieces[0].buffer].device

    @property
    def nbytes(self) -> int:
        """Wanted bytes of all transfers."""
        return sum(transfer.nbytes for transfer in self.transfers)


class Engine(Protocol):
    """Moves bytes by one route, one way: from files into memory, or from memory into files.

    `run` returns when every byte of the cargo is in place and visible to any stream, or will be in
    the order of `Cargo.stream`; or it raises when no thread and no copy of its own touches the
    buffers any more.
    """

    @property
    def route(self) -> Route:
        """The route that the engine serves."""

    def run(self, cargo: Cargo) -> Stats:
        """Move all bytes.

        Raises
        ------
        ShortRead, SourceChanged, OSError
            The file could not be read, or not be written.
        DeviceError
            The GPU refused.
        """


class Jobs:
    """Jobs that workers take one after the other, until there are none or one of them failed.

    Transfers are cut at the multiples of the block size in the file. What waits is a triple for
    each job, made without a line of Python, so that the first read starts at once; a deque gives
    each triple to one thread only.
    """

    def __init__(self, transfers: Iterable[Transfer], block_nbytes: int) -> None:
        self._waiting: deque[tuple[Transfer, int, int]] = deque()
        for transfer in transfers:
            whole = transfer.file_range
            second = align_down(whole.start, block_nbytes) + block_nbytes
            cuts = range(second, whole.stop, block_nbytes)
            starts, stops = chain([whole.start], cuts), chain(cuts, [whole.stop])
            self._waiting.extend(zip(repeat(transfer), starts, stops))

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> Job | None:
        """Give out the next job; None when there are no more."""
        try:
            return Job(*self._waiting.popleft())
        except IndexError:
            return None

    def stop(self) -> None:
        """Give out no more jobs."""
        self._waiting.clear()


Work = Callable[[Jobs, Tally], None]
"""What one worker does: take jobs until there are no more, and tally them."""


class Tasks(Protocol):
    """What workers share out among themselves, such as `Jobs`."""

    def __len__(self) -> int:
        """How many tasks wait."""

    def stop(self) -> None:
        """Give out no more of them."""


TasksT = TypeVar("TasksT", bound=Tasks)


class _Crew:
    """Workers on the same tasks.

    A worker signs on before it touches any memory, and nobody signs on once the tasks are stopped:
    so when nobody is at work after `stop`, nothing writes any more. Joining the threads could not
    tell: an interrupted `Thread.join` takes a running thread for an ended one (before Python 3.13),
    and an interrupted `Thread.start` leaves it open whether there is a thread.
    """

    def __init__(self, work: Callable[[Tally], None], tasks: Tasks) -> None:
        self._work = work
        self._tasks = tasks
        self._at_work = 0
        self._stopped = False
        self._changed = threading.Condition()
        self.tallies: list[Tally] = []
        self.failures: list[BaseException] = []

    def moved_nbytes(self) -> int:
        """Wanted bytes that the workers have read so far."""
        return sum(tally.moved_nbytes for tally in self.tallies)

    def labour(self) -> None:
        """Work in a thread of its own."""
        began = time.thread_time()
        tally = self.labour_here()
        tally.cpu_seconds = time.thread_time() - began

    def labour_here(self) -> Tally:
        """Work in the calling thread."""
        tally = Tally()
        with self._changed:
            if self._stopped:
                return tally
            self._at_work += 1
            self.tallies.append(tally)
        try:
            self._work(tally)
        except BaseException as failure:  # noqa: BLE001 (raised again by the thread that waits)
            self.failures.append(failure)
            self.stop()
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()
        return tally

    def stop(self) -> None:
        """Give out no more tasks, and let nobody else sign on."""
        with self._changed:
            self._stopped = True
            self._tasks.stop()

    def wait(self, count: int, on_progress: OnMoved | None) -> None:
        """Wait until `count` workers have come and all have gone, or all have gone after `stop`."""
        interval = _PROGRESS_INTERVAL_S if on_progress else None
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._all_gone(count), interval):
                    return
            if on_progress:
                on_progress(self.moved_nbytes())

    def _all_gone(self, count: int) -> bool:
        return not self._at_work and (self._stopped or len(self.tallies) == count)

    def take_failure(self) -> BaseException | None:
        """The first failure; the crew forgets it, so that its traceback holds no cycle."""
        failure = self.failures[0] if self.failures else None
        self.failures.clear()
        return failure


def run_workers(work: Work, cargo: Cargo) -> list[Tally]:
    """Let threads work off the cargo's jobs, and wait for all of them.

    Parameters
    ----------
    work
        Body of each worker.
    cargo
        Its jobs, worker limit and progress callback are used.

    Raises
    ------
    BaseException
        The first failure of a worker, or KeyboardInterrupt, once nobody is at work any more.
    """
    return share_out(work, Jobs(cargo.transfers, cargo.block_nbytes), cargo)


def share_out(work: Callable[[TasksT, Tally], None], tasks: TasksT, cargo: Cargo) -> list[Tally]:
    """Let threads work off tasks of any kind; see `run_workers`.

    Parameters
    ----------
    work
        Body of each worker: take tasks until there are no more, and tally them.
    tasks
        What to do; there are no more workers than tasks.
    cargo
        Its worker limit and progress callback are used.
    """
    crew = _Crew(partial(work, tasks), tasks)
    count = min(cargo.workers, len(tasks))
    if count == 1 and not cargo.on_progress:
        crew.labour_here()  # a thread would only add to the latency of a small read
    else:
        _labour_together(crew, count, cargo.on_progress)
    failure = crew.take_failure()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure
    if cargo.on_progress:
        cargo.on_progress(crew.moved_nbytes())
    return crew.tallies


def _labour_together(crew: _Crew, count: int, on_progress: OnMoved | None) -> None:
    threads: list[threading.Thread] = []
    try:
        _start(threads, crew, count)
        if threads:
            crew.wait(len(threads), on_progress)
        else:
            crew.labour_here()
    finally:
        _end(crew)
    for thread in threads:
        thread.join()


def _start(threads: list[threading.Thread], crew: _Crew, count: int) -> None:
    """Start as many threads as the system gives; fewer are slower, and as good."""
    for _ in range(count):
        thread = threading.Thread(target=crew.labour, name="headrace")
        try:
            thread.start()
        except RuntimeError:  # a limit of threads or memory, or the interpreter is ending
            return
        threads.append(thread)


def _end(crew: _Crew) -> None:
    """See to it that nobody is at work, whatever signals say: they write into others' memory."""
    while True:
        try:
            crew.stop()
            return crew.wait(0, None)
        except BaseException:  # noqa: BLE001 (one is under way to the caller already)
            continue


def total(
    route: Route, tallies: Sequence[Tally], evidence: str, bounce: str = "", mode: str = ""
) -> Stats:
    """Add up what the workers did."""
    return Stats(
        route=route,
        nbytes=sum(tally.moved_nbytes for tally in tallies),
        evidence=evidence,
        file_seconds=sum(tally.file_seconds for tally in tallies),
        cpu_seconds=sum(tally.cpu_seconds for tally in tallies),
        unaligned_nbytes=sum(tally.unaligned_nbytes for tally in tallies),
        bounce=bounce,
        mode=mode,
    )

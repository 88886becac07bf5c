"""Reads in the order of a stream: how soon the call returns, and whether later work sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.contestants import HeadraceParticipant, Participant
from benchmarks.memory import Arrays, Memory
from benchmarks.needs import Need
from benchmarks.places import Residency
from benchmarks.result import Reading, Role
from benchmarks.rounds import Clock, Limits, cpu_seconds, run_rounds
from benchmarks.save.result import DELAYED, SaveRow, Timing
from benchmarks.save.writing import TIMEOUT_S, make_row
from headrace.bindings.posix import PosixFiles

KIND = "stream"
"""`Row.kind` of these rows."""

KEPT, SUBMITTED = "headrace read_into(stream=)", "headrace submit_read(stream=)"
"""How the names of the contestants begin."""

_DELAY_CYCLES = 100_000_000  # about 0.05 s of an H200's clock


class Lane(Protocol):
    """A stream of a device."""

    handle: Any
    """What goes to ``stream=``."""

    def delay(self) -> None:
        """Queue work that takes a while."""

    def run(self, do: Callable[[], object]) -> None:
        """Queue the device's work of a function."""

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""


class TorchLane:
    """`Lane` of a torch stream beside the default one, which does not block it."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self.handle = torch.cuda.Stream(device)

    def delay(self) -> None:
        """See `Lane.delay`."""
        self.run(lambda: self._torch.cuda._sleep(_DELAY_CYCLES))  # noqa: SLF001  no public one

    def run(self, do: Callable[[], object]) -> None:
        """See `Lane.run`."""
        with self._torch.cuda.stream(self.handle):
            do()

    def synchronize(self) -> None:
        """See `Lane.synchronize`."""
        self.handle.synchronize()


class StreamReader(Participant):
    """One way to read a file in the order of a stream."""

    def begin(self, target: Any, source: Path, stream: Any) -> Callable[[float], object]:
        """Ask for the read; what it gives waits until the stream is ordered after it."""
        raise NotImplementedError


class HeadraceStreamReader(HeadraceParticipant, StreamReader):
    """headrace: its call receives target, source and ``stream=``, and gives what waits."""

    def begin(self, target: Any, source: Path, stream: Any) -> Callable[[float], object]:
        """See `StreamReader.begin`."""
        wait: Callable[[float], object] = self.call(target, source, stream=stream)
        return wait


def stream_readers(memory: Memory, nbytes: int) -> Sequence[StreamReader]:
    """Give a read from a registration that is kept, and one by a future.

    Parameters
    ----------
    memory
        Where the bytes go.
    nbytes
        Size of the file.
    """

    def read_into(
        namespace: Any, target: Any, source: Path, **given: Any
    ) -> Callable[[float], object]:
        del namespace
        import headrace

        headrace.read_into(target, source, **given)
        return lambda _: None

    def submit_read(
        namespace: Any, target: Any, source: Path, *, context: Any, **given: Any
    ) -> Callable[[float], object]:
        del namespace
        wait: Callable[[float], object] = context.submit_read(target, source, **given).result
        return wait

    kept = {"mapped_nbytes": 2 * nbytes}
    return (
        HeadraceStreamReader(
            f"{KEPT}, registration kept", memory, read_into, Role.OURS, options=kept,
            needs=(Need("headrace", "read_into", "stream"),),
        ),
        HeadraceStreamReader(
            f'{SUBMITTED}, route="cached"', memory, submit_read, Role.OURS, route="cached",
            options={}, needs=(Need("headrace", "Context.submit_read", "stream"),),
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamContest:
    """Reads of one resident file in the order of one stream."""

    state: str
    """``"idle"`` or ``"delayed"``: what the stream has to do before."""
    source: Path
    """The file."""
    memory: Memory
    """Destination."""
    lane: Lane
    """The stream."""
    reference: Arrays
    """What later work on the stream must see."""
    target: Any
    """Array that is read into."""
    seen: Any
    """Array that later work on the stream copies it to."""
    repeats: int
    """Measured rounds."""
    budget_s: float
    """Seconds of reads after which a contestant leaves."""


def run_streams(
    contest: StreamContest,
    readers: Sequence[StreamReader],
    clock: Clock,
    tell: Callable[[str], object],
) -> list[SaveRow]:
    """Run all rounds; see `rounds.run_rounds`."""
    limits = Limits(contest.repeats, contest.budget_s, slow_s=TIMEOUT_S)
    entries = run_rounds(limits, readers, partial(_try_read, contest), clock, tell)
    nbytes = int(contest.target.nbytes)
    return [make_row(entry, KIND, contest.state, nbytes) for entry in entries]


def _try_read(
    contest: StreamContest, reader: StreamReader, number: int
) -> tuple[Reading, str | None]:
    """Time one read between work on the stream that it must neither overtake nor miss."""
    memory, lane, target = contest.memory, contest.lane, contest.target
    with reader.session(contest.source):
        resident = Residency(PosixFiles()).prepare(contest.source, cold=False)
        memory.poison(contest.seen)
        memory.synchronize()
        memory.reset_peak()
        if contest.state == DELAYED:
            lane.delay()
            # Bytes that arrive before their turn are lost under this.
            lane.run(lambda: memory.poison(target))
        else:
            lane.run(lambda: memory.poison(target))
            lane.synchronize()
        cpu, start = cpu_seconds(), time.perf_counter()
        wait = reader.begin(target, contest.source, lane.handle)
        free = time.perf_counter() - start
        wait(TIMEOUT_S)
        lane.run(lambda: contest.seen.__setitem__(slice(None), target))
        lane.synchronize()
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    fault = memory.find_difference({"": contest.seen}, contest.reference)
    return Timing(number, seconds, cpu, resident, memory.peak_nbytes(), free, None), fault

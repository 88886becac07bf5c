"""Lanes: the streams that workers put their copies on, kept between transfers."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.bindings.cuda import Cuda

DEPTH = 2
"""Streams of one lane: while one carries copies, the next ones are prepared. A third gained
nothing."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What one worker orders its copies with."""

    streams: tuple[int, ...]
    """CUDA streams, used in turn."""
    event: int
    """For waiting asleep until the streams are done."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A moment on the streams of others: a transfer comes after what was queued there before."""

    events: tuple[int, ...] = ()
    """CUDA events, recorded on those streams."""


class Lanes:
    """Lanes of one context, for all of its devices.

    Parameters
    ----------
    cuda
        The calls to make.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._spare: dict[int, list[Lane]] = {}
        self._lock = threading.Lock()
        self._destroy = weakref.finalize(self, _destroy, cuda, self._spare)
        self._destroy.atexit = False  # the process takes all of it along, the driver included

    @contextlib.contextmanager
    def borrow(self, device: int, fence: Fence) -> Iterator[Lane]:
        """A lane for one worker, on `device`, ordered after a fence.

        Within the block, the device is the thread's current one. On the way out, nothing is under
        way on the lane.
        """
        with self.on_device(device):
            with self._lock:
                spare = self._spare.setdefault(device, [])
                lane = spare.pop() if spare else None
            lane = lane or self._create()
            try:
                self._follow(lane, fence)
                yield lane
            finally:
                self._drain(lane)
                with self._lock:
                    spare.append(lane)

    def fence(self, device: int, streams: Iterable[int]) -> Fence:
        """Mark what is queued now on streams of a device; `forget` it after the last use."""
        events: list[int] = []
        with contextlib.ExitStack() as undo, self.on_device(device):
            for stream in streams:
                events.append(self._cuda.create_event())
                undo.callback(self._cuda.destroy_event, events[-1])
                self._cuda.record_event(events[-1], stream)
            undo.pop_all()
        return Fence(tuple(events))

    def forget(self, fence: Fence) -> None:
        """Destroy the events of a fence; streams that were told to wait for them still do."""
        for event in fence.events:
            self._cuda.destroy_event(event)

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make a device the thread's current one, and its own again on the way out."""
        before = self._cuda.current_device()
        self._cuda.set_device(device)
        try:
            yield
        finally:
            if before != device:
                self._cuda.set_device(before)

    def close(self) -> None:
        """Destroy the streams; no lane may be borrowed. Safe to call again."""
        self._destroy()

    def _follow(self, lane: Lane, fence: Fence) -> None:
        for event in fence.events:
            for follower in lane.streams:
                self._cuda.wait_event(follower, event)

    def sleep(self, lane: Lane) -> None:
        """Wait for what is on a lane without a busy CPU: for waits that are long."""
        for stream in lane.streams:
            self._cuda.record_event(lane.event, stream)
            self._cuda.synchronize_event(lane.event)

    def _drain(self, lane: Lane) -> None:
        with contextlib.ExitStack() as stack:  # each stream, even when the driver fails for one
            for stream in lane.streams:
                stack.callback(self._cuda.synchronize_stream, stream)

    def _create(self) -> Lane:
        with contextlib.ExitStack() as undo:
            streams = []
            for _ in range(DEPTH):
                streams.append(self._cuda.create_stream())
                undo.callback(self._cuda.destroy_stream, streams[-1])
            lane = Lane(tuple(streams), self._cuda.create_event())
            undo.pop_all()
        return lane


def _destroy(cuda: Cuda, spare: dict[int, list[Lane]]) -> None:
    for lane in itertools.chain.from_iterable(spare.values()):
        cuda.destroy_event(lane.event)
        for stream in lane.streams:
            cuda.destroy_stream(stream)
    spare.clear()

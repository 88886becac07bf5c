"""Mapped engine: the GPU copies straight out of the page cache, without the CPU.

A window of the file is mapped, its resident pages are registered with the GPU, and the copies read
them where they lie. One thread does this: the driver serialises registrations, and more threads
are slower (FACTS). The CPU never touches the mapping, so that a file which is truncated meanwhile
cannot kill the process.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from headrace.bindings.cuda import Cuda
from headrace.engines.base import Cargo, Job, Jobs, Stats, Tally, run_workers, total
from headrace.engines.lanes import Lane, Lanes
from headrace.errors import DeviceError, RouteUnavailable
from headrace.memory.alignment import align_down, align_up
from headrace.memory.mappings import Mappings, Window, WindowKey
from headrace.options import PAGE_NBYTES
from headrace.types import Route

WINDOW_NBYTES = 256 << 20
"""Bytes registered at a time; 64 and 128 MiB were slower."""


class MappedEngine:
    """`Engine` for destinations on a GPU, out of the page cache.

    Parameters
    ----------
    cuda
        The calls to make.
    lanes
        Where the streams come from.
    mappings
        Where the windows come from, and go to.
    """

    route = Route.MAPPED

    def __init__(self, cuda: Cuda, lanes: Lanes, mappings: Mappings) -> None:
        self._cuda = cuda
        self._lanes = lanes
        self._mappings = mappings

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`.

        Raises
        ------
        RouteUnavailable
            Not even one window can be registered; what was moved so far is void.
        """
        device = cargo.device.index
        for index in {transfer.source for transfer in cargo.transfers}:
            self._mappings.forget_older(cargo.sources[index].identity)
        if cargo.stream is not None and self._mappings.keeps(cargo.nbytes):
            return self._enqueue(cargo, device, cargo.stream)
        counts = {"registered": 0, "kept": 0}

        def work(jobs: Jobs, tally: Tally) -> None:
            in_use: list[Window] = []
            # The lane is drained before the windows left by a failure are released.
            with self._releasing(in_use), self._lanes.borrow(device, cargo.fence) as lane:
                for stream in itertools.cycle(lane.streams):
                    job = jobs.take()
                    if job is None:
                        break
                    window = self._take_or_make_room(
                        cargo, job, tally, lambda: self._finish(in_use, lane)
                    )
                    in_use.append(window)
                    counts["kept" if window.kept else "registered"] += 1
                    tally.moved_nbytes += self._copy(cargo, job, window, stream)
                self._finish(in_use, lane)

        tallies = run_workers(work, replace(cargo, workers=1, block_nbytes=WINDOW_NBYTES))
        windows = ", ".join(f"{count} {how}" for how, count in counts.items() if count)
        return total(self.route, tallies, f"the GPU read the page cache itself; windows: {windows}")

    def _enqueue(self, cargo: Cargo, device: int, stream: int) -> Stats:
        """Leave the copies to the caller's stream; windows stay registered until they are done."""
        tally = Tally()
        with self._lanes.on_device(device):
            try:
                self._enqueue_all(cargo, stream, tally)
            except BaseException:
                self._cuda.synchronize_stream(stream)  # no copy may be left where nobody knows
                raise
        evidence = "copies of registered pages, enqueued on the caller's stream and not waited for"
        return total(self.route, [tally], evidence, mode="mapped (enqueued)")

    def _enqueue_all(self, cargo: Cargo, stream: int, tally: Tally) -> None:
        in_use: list[Window] = []

        def leave() -> None:
            self._mappings.leave(in_use, stream)

        try:
            jobs = Jobs(cargo.transfers, WINDOW_NBYTES)
            while (job := jobs.take()) is not None:
                window = self._take_or_make_room(cargo, job, tally, leave)
                in_use.append(window)
                tally.moved_nbytes += self._copy(cargo, job, window, stream)
        finally:
            leave()

    def _copy(self, cargo: Cargo, job: Job, window: Window, stream: int) -> int:
        """Enqueue the copies of a job; how many bytes they move."""
        copies = job.copies(cargo.buffers, window.pointer - window.key.start)
        self._cuda.copy_to_device(copies, stream)
        return sum(nbytes for _, _, nbytes in copies)

    def _take_or_make_room(
        self, cargo: Cargo, job: Job, tally: Tally, finish: Callable[[], None]
    ) -> Window:
        """A window around a job; where no more can be registered, in place of all others.

        What `finish` gives back is among these.
        """
        try:
            return self._take(cargo, job, tally)
        except DeviceError as error:
            finish()
            self._mappings.close()
            try:
                return self._take(cargo, job, tally)
            except DeviceError:
                raise RouteUnavailable(f"route 'mapped' cannot serve: {error}") from error

    def _take(self, cargo: Cargo, job: Job, tally: Tally) -> Window:
        """A window around a job, cut like that of any other load of the same bytes."""
        source = cargo.sources[job.transfer.source]
        stop = min(align_up(job.stop, PAGE_NBYTES), source.nbytes)
        key = WindowKey(source.identity, align_down(job.start, PAGE_NBYTES), stop)
        began = time.perf_counter()
        try:
            window = self._mappings.take(source.fd, key)
        except (ValueError, OSError, DeviceError) as error:
            source.verify_unchanged()  # a file that was truncated explains it better
            if isinstance(error, OSError):
                error.filename = source.path
            raise
        tally.file_seconds += time.perf_counter() - began
        return window

    def _finish(self, in_use: list[Window], lane: Lane) -> None:
        """Sleep until all copies are done, and give the windows back.

        Not before: to release one window while another is copied makes the driver wait, and
        costs a third of the speed.
        """
        self._lanes.sleep(lane)
        while in_use:
            self._mappings.give_back(in_use.pop(0))

    @contextlib.contextmanager
    def _releasing(self, in_use: list[Window]) -> Iterator[None]:
        """Release, on the way out, the windows that a failure left in use."""
        try:
            yield
        finally:
            while in_use:
                self._mappings.drop(in_use.pop())

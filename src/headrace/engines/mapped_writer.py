"""Mapped writer: the GPU writes into the pages of a file that lives in memory.

A window of the file is mapped and backed with pages, these are registered with the GPU, and the
copies land where the file keeps its bytes: no copy by the CPU, and no lock on the file, behind
which writes to one file of tmpfs queue. Since one thread of such writes waits for nobody, one
worker may go that way meanwhile. The CPU never touches the mapping, so that a file which is
truncated meanwhile cannot kill the process.

Only for file systems in memory: elsewhere the kernel writes pages out, and must know when one
changes, which a GPU does not tell.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from headrace.bindings.cuda import Cuda
from headrace.bindings.posix import Mapping
from headrace.engines.base import Cargo, Engine, Job, Jobs, Stats, Tally, share_out, total
from headrace.engines.lanes import Lanes
from headrace.errors import DeviceError, RouteUnavailable
from headrace.memory.alignment import align_down, align_up
from headrace.options import PAGE_NBYTES
from headrace.storage.sink import Sink
from headrace.types import Route

WINDOW_NBYTES = 64 << 20
"""Bytes mapped at a time by each worker."""

MAPPERS = 4
"""Most workers that map: they take pages from one file, and more of them wait for each other."""

FindEngine = Callable[[], Engine | None]
"""Gives an engine, or None where there is none."""


class MappedWriter:
    """`Engine` from a GPU into files that live in memory.

    Parameters
    ----------
    cuda
        The calls to make.
    lanes
        Where the streams come from.
    beside
        Gives what writes, without mapping, the part that one of the workers takes, or None to have
        all mapped; asked only where there is enough for every worker.
    """

    route = Route.MAPPED

    def __init__(self, cuda: Cuda, lanes: Lanes, beside: FindEngine = lambda: None) -> None:
        self._cuda = cuda
        self._lanes = lanes
        self._beside = beside

    def run(self, cargo: Cargo) -> Stats:
        """See `Engine.run`.

        Raises
        ------
        RouteUnavailable
            The kernel cannot back a mapping with pages, or CUDA cannot register them.
        """
        for transfer in cargo.transfers:  # pages can only be mapped inside of a file
            cargo.sinks[transfer.source].extend(transfer.file_range.stop)
        jobs = Jobs(cargo.transfers, WINDOW_NBYTES)
        workers = min(MAPPERS + 1, cargo.workers)
        beside = self._beside() if 1 < workers < len(jobs) else None
        numbers, mapped, others = itertools.count(1), list[Tally](), list[tuple[Tally, Stats]]()

        def work(jobs: Jobs, tally: Tally) -> None:
            # The last to come, so that all is mapped where the system gives too few threads.
            if next(numbers) == workers and beside is not None:
                others.extend(_write_beside(beside, cargo, jobs, tally))
            else:
                mapped.append(tally)
                self._write_mapped(cargo, jobs, tally)

        share_out(work, jobs, replace(cargo, workers=workers))
        done = total(self.route, mapped, "the GPU wrote into the pages of the file itself")
        told = (replace(stats, cpu_seconds=tally.cpu_seconds) for tally, stats in others)
        return replace(done, beside=tuple(told))

    def _write_mapped(self, cargo: Cargo, jobs: Jobs, tally: Tally) -> None:
        windows: list[Mapping] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self._release, windows)  # after the lane is drained
            lane = stack.enter_context(self._lanes.borrow(cargo.device.index, cargo.fence))
            for stream in itertools.cycle(lane.streams):
                job = jobs.take()
                if job is None:
                    break
                base = self._map(cargo.sinks[job.transfer.source], job, windows, tally)
                self._cuda.copy_to_host(job.copies_out(cargo.buffers, base), stream)
                tally.moved_nbytes += job.stop - job.start
            self._lanes.sleep(lane)

    def _map(self, sink: Sink, job: Job, windows: list[Mapping], tally: Tally) -> int:
        """Map and register a job's window; where file offset 0 would lie in memory."""
        start, stop = align_down(job.start, PAGE_NBYTES), job.stop
        began = time.perf_counter()
        mapping = _map_window(sink, start, stop - start)
        try:
            self._cuda.register_host(mapping.pointer, align_up(stop - start, PAGE_NBYTES))
        except BaseException as error:
            mapping.close()
            if isinstance(error, DeviceError):
                raise RouteUnavailable(f"route 'mapped' cannot serve: {error}") from error
            raise
        windows.append(mapping)
        tally.file_seconds += time.perf_counter() - began
        return mapping.pointer - start

    def _release(self, windows: list[Mapping]) -> None:
        with contextlib.ExitStack() as stack:  # each window, even when the driver fails for one
            while windows:
                mapping = windows.pop()
                stack.callback(mapping.close)
                stack.callback(self._cuda.unregister_host, mapping.pointer)


def _write_beside(
    engine: Engine, cargo: Cargo, jobs: Jobs, tally: Tally
) -> Iterator[tuple[Tally, Stats]]:
    """Let another engine write what this worker takes; what it did, if it did anything."""
    done: Stats | None = None
    while (job := jobs.take()) is not None:
        part = replace(job.transfer, route=engine.route, pieces=tuple(job.pieces()))
        done = engine.run(replace(cargo, transfers=(part,), workers=1, on_progress=None))
        tally.moved_nbytes += done.nbytes
        tally.file_seconds += done.file_seconds
    if done is not None:
        evidence = f"{done.evidence}, beside what was mapped: no other thread writes to the file"
        seconds = tally.file_seconds
        yield (
            tally,
            replace(done, nbytes=tally.moved_nbytes, evidence=evidence, file_seconds=seconds),
        )


def _map_window(sink: Sink, start: int, nbytes: int) -> Mapping:
    try:
        return _map_once(sink, start, nbytes)
    except OSError as error:
        # A file that is truncated meanwhile, and made long again beside this, answers so too.
        if error.errno != errno.ENOSPC:
            raise
    return _map_once(sink, start, nbytes)


def _map_once(sink: Sink, start: int, nbytes: int) -> Mapping:
    try:
        return sink.files.map_for_writing(sink.fd, start, nbytes)
    except (OSError, ValueError) as error:
        sink.check_holds(start + nbytes)  # a file that was truncated explains it
        if isinstance(error, ValueError):  # truncated and extended again
            raise OSError(errno.ESTALE, f"{error}; write it again", sink.path) from error
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.ENODEV):
            raise RouteUnavailable(f"route 'mapped' cannot serve: mmap: {error}") from error
        error.filename = sink.path
        raise

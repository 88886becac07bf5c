"""Stretches of the page cache that are registered with the GPU, some of them kept between calls."""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.bindings.cuda import Cuda
from headrace.bindings.posix import Files, FileStatus, Mapping
from headrace.memory.alignment import align_up
from headrace.options import PAGE_NBYTES
from headrace.types import ByteRange

MOST_WINDOWS = 1024
"""Windows that are kept at most: each is a mapping, of which Linux gives a process 65,530."""


class WindowKey(NamedTuple):
    """Which bytes of which file, as it was at which moment; a tuple is looked up fast."""

    identity: FileStatus
    """The file, with its size and times."""
    start: int
    """First byte; a multiple of the page size."""
    stop: int
    """End, exclusive."""


class Mark:
    """A CUDA event after the copies of one transfer, shared by the windows that they read.

    Parameters
    ----------
    event
        The event.
    windows
        How many share it; the last one that lets go destroys it.
    """

    def __init__(self, event: int, windows: int) -> None:
        self.event = event
        self._windows = windows
        self._lock = threading.Lock()

    def let_go(self, cuda: Cuda) -> None:
        """One window less needs it."""
        with self._lock:
            self._windows -= 1
            is_last = not self._windows
        if is_last:
            cuda.destroy_event(self.event)


@dataclass(frozen=True, slots=True)
class Window:
    """A registered stretch of a file: the GPU reads it at `pointer`."""

    key: WindowKey
    """What it holds."""
    mapping: Mapping = field(repr=False)
    """What keeps it mapped."""
    kept: bool = False
    """Whether it was registered in an earlier call."""
    marks: tuple[Mark, ...] = ()
    """Each after copies that may still read it."""

    @property
    def pointer(self) -> int:
        """Address of the byte at `WindowKey.start`."""
        return self.mapping.pointer

    @property
    def nbytes(self) -> int:
        """Memory that is registered for it: whole pages."""
        return align_up(self.key.stop - self.key.start, PAGE_NBYTES)


class Mappings:
    """Windows of one context; the least recently used of those that it keeps leave first.

    A window in use belongs to its user alone: another transfer of the same bytes makes its own.

    Parameters
    ----------
    cuda
        Registers and releases the memory.
    files
        Maps the files.
    budget_nbytes
        Most bytes of windows that are kept while nobody uses them; whole pages.
    """

    def __init__(self, cuda: Cuda, files: Files, budget_nbytes: int) -> None:
        self._cuda = cuda
        self._files = files
        self._budget = align_up(budget_nbytes, PAGE_NBYTES)
        self._kept: OrderedDict[WindowKey, Window] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _drop_kept, cuda, self._kept).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of kept windows, which the kernel cannot reclaim."""
        return self._nbytes

    def take(self, fd: int, key: WindowKey) -> Window:
        """A window for one user, kept from an earlier call or new.

        `forget_older` comes first: it releases windows of another state of the file.

        Raises
        ------
        ValueError, OSError
            The file is shorter by now, or cannot be mapped.
        DeviceError
            CUDA cannot register the pages.
        """
        with self._lock:
            kept = self._kept.pop(key, None)
            self._nbytes -= kept.nbytes if kept else 0
        if kept is not None:
            return self._take_again(kept)
        mapping = self._files.map_shared(fd, key.start, key.stop - key.start)
        window = Window(key, mapping)
        try:
            self._cuda.register_host(window.pointer, window.nbytes, read_only=True)
        except BaseException:
            mapping.close()
            raise
        return window

    def keeps(self, nbytes: int) -> bool:
        """Whether so many bytes are within what is kept between calls."""
        return 0 < nbytes <= self._budget

    def covers(self, identity: FileStatus, wanted: Sequence[ByteRange]) -> bool:
        """Whether all of some ranges of a file are kept: they are in memory, and stay there."""
        with self._lock:
            kept = sorted((key.start, key.stop) for key in self._kept if key.identity == identity)
        starts: list[int] = []
        stops: list[int] = []
        for start, stop in kept:
            if stops and start <= stops[-1]:
                stops[-1] = max(stop, stops[-1])
            else:
                starts.append(start)
                stops.append(stop)
        places = [bisect.bisect_right(starts, part.start) - 1 for part in wanted]
        return all(
            place >= 0 and part.stop <= stops[place]
            for part, place in zip(wanted, places, strict=True)
        )

    def give_back(self, window: Window) -> None:
        """Keep a window, or release it where it does not fit.

        No copy may read it any more, other than those that `Window.marks` are after.
        """
        leaving: list[Window] = []
        with self._lock:
            if window.key in self._kept or window.nbytes > self._budget:
                leaving.append(window)
            else:
                self._kept[window.key] = window
                self._nbytes += window.nbytes
                while self._nbytes > self._budget or len(self._kept) > MOST_WINDOWS:
                    leaving.append(self._pop(next(iter(self._kept))))
        _drop_all(self._cuda, leaving)

    def leave(self, windows: list[Window], stream: int) -> None:
        """As `give_back` for all, which it takes out of the list, while copies may still read them.

        Those copies are on the stream.

        Raises
        ------
        DeviceError
            CUDA cannot mark them; they are done, and the windows are released.
        """
        if not windows:
            return
        left, windows[:] = tuple(windows), []
        try:
            mark = Mark(self._cuda.create_event(), len(left))
            left = tuple(Window(w.key, w.mapping, w.kept, (*w.marks, mark)) for w in left)
            self._cuda.record_event(mark.event, stream)
        except BaseException:
            self._cuda.synchronize_stream(stream)
            _drop_all(self._cuda, left)
            raise
        with contextlib.ExitStack() as stack:  # each, even where CUDA fails to release one
            for window in reversed(left):
                stack.callback(self.give_back, window)

    def drop(self, window: Window) -> None:
        """Release a window that no copy reads any more."""
        _drop(self._cuda, window)

    def forget_older(self, identity: FileStatus) -> None:
        """Release kept windows of the same file in another state: they may hold old bytes."""
        self._forget(lambda kept: kept.is_same_file(identity) and kept != identity)

    def forget_file(self, identity: FileStatus) -> None:
        """Release every kept window of a file."""
        self._forget(identity.is_same_file)

    def _forget(self, is_stale: Callable[[FileStatus], bool]) -> None:
        with self._lock:
            stale = [key for key in self._kept if is_stale(key.identity)]
            windows = [self._pop(key) for key in stale]
        _drop_all(self._cuda, windows)

    def _take_again(self, kept: Window) -> Window:
        """A kept window, less the marks that have happened; released where CUDA fails."""
        pending = list(kept.marks)
        try:
            for mark in kept.marks:
                if self._cuda.event_is_done(mark.event):
                    pending.remove(mark)
                    mark.let_go(self._cuda)
        except BaseException:
            self.drop(Window(kept.key, kept.mapping, True, tuple(pending)))
            raise
        return Window(kept.key, kept.mapping, True, tuple(pending))

    def _pop(self, key: WindowKey) -> Window:
        window = self._kept.pop(key)
        self._nbytes -= window.nbytes
        return window

    def close(self) -> None:
        """Release every window that is kept; those in use stay. Safe to call again."""
        with self._lock:
            windows = [self._pop(key) for key in tuple(self._kept)]
        _drop_all(self._cuda, windows)


def _drop(cuda: Cuda, window: Window) -> None:
    """Wait for the copies that read a window, and release it; where CUDA cannot wait, it stays."""
    for mark in window.marks:
        cuda.synchronize_event(mark.event)
    with contextlib.ExitStack() as stack:  # all of it, even where CUDA fails
        stack.callback(window.mapping.close)
        stack.callback(cuda.unregister_host, window.pointer)
        for mark in window.marks:
            stack.callback(mark.let_go, cuda)


def _drop_all(cuda: Cuda, windows: Iterable[Window]) -> None:
    with contextlib.ExitStack() as stack:
        for window in windows:
            stack.callback(_drop, cuda, window)


def _drop_kept(cuda: Cuda, kept: OrderedDict[WindowKey, Window]) -> None:
    windows = tuple(kept.values())
    kept.clear()
    _drop_all(cuda, windows)

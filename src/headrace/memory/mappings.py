"""Stretches of the page cache that are registered with the GPU, some of them kept between calls."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from headrace.bindings.cuda import Cuda
from headrace.bindings.posix import Files, FileStatus, Mapping
from headrace.memory.alignment import align_up
from headrace.options import PAGE_NBYTES


@dataclass(frozen=True, slots=True)
class WindowKey:
    """Which bytes of which file, as it was at which moment."""

    identity: FileStatus
    """The file, with its size and times."""
    start: int
    """First byte; a multiple of the page size."""
    stop: int
    """End, exclusive."""


@dataclass(frozen=True, slots=True)
class Window:
    """A registered stretch of a file: the GPU reads it at `pointer`."""

    key: WindowKey
    """What it holds."""
    mapping: Mapping = field(repr=False)
    """What keeps it mapped."""
    kept: bool = False
    """Whether it was registered in an earlier call."""

    @property
    def pointer(self) -> int:
        """Address of the byte at `WindowKey.start`."""
        return self.mapping.pointer

    @property
    def nbytes(self) -> int:
        """Length."""
        return self.key.stop - self.key.start


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
        Most bytes of windows that are kept while nobody uses them.
    """

    def __init__(self, cuda: Cuda, files: Files, budget_nbytes: int) -> None:
        self._cuda = cuda
        self._files = files
        self._budget = budget_nbytes
        self._kept: OrderedDict[WindowKey, Window] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _drop_all, cuda, self._kept).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of kept windows, which the kernel cannot reclaim."""
        with self._lock:
            return sum(window.nbytes for window in self._kept.values())

    def take(self, fd: int, key: WindowKey) -> Window:
        """A window for one user, kept from an earlier call or new.

        Raises
        ------
        ValueError, OSError
            The file is shorter by now, or cannot be mapped.
        DeviceError
            CUDA cannot register the pages.
        """
        self.forget_older(key.identity)
        with self._lock:
            kept = self._kept.pop(key, None)
        if kept is not None:
            return replace(kept, kept=True)
        mapping = self._files.map_shared(fd, key.start, key.stop - key.start)
        window = Window(key, mapping)
        try:
            whole_pages = align_up(window.nbytes, PAGE_NBYTES)
            self._cuda.register_host(window.pointer, whole_pages, read_only=True)
        except BaseException:
            mapping.close()
            raise
        return window

    def give_back(self, window: Window) -> None:
        """Keep a window that no copy reads any more, or release it where it does not fit."""
        leaving: list[Window] = []
        with self._lock:
            if window.key in self._kept or window.nbytes > self._budget:
                leaving.append(window)
            else:
                self._kept[window.key] = window
                while sum(each.nbytes for each in self._kept.values()) > self._budget:
                    leaving.append(self._kept.popitem(last=False)[1])
        for each in leaving:
            _drop(self._cuda, each)

    def drop(self, window: Window) -> None:
        """Release a window that no copy reads any more."""
        _drop(self._cuda, window)

    def forget_older(self, identity: FileStatus) -> None:
        """Release kept windows of the same file in another state: they may hold old bytes."""
        same = (identity.device, identity.inode)
        with self._lock:
            stale = [
                key
                for key in self._kept
                if (key.identity.device, key.identity.inode) == same and key.identity != identity
            ]
            windows = [self._kept.pop(key) for key in stale]
        for window in windows:
            _drop(self._cuda, window)

    def close(self) -> None:
        """Release every window that is kept; those in use stay. Safe to call again."""
        with self._lock:
            _drop_all(self._cuda, self._kept)


def _drop(cuda: Cuda, window: Window) -> None:
    cuda.unregister_host(window.pointer)
    window.mapping.close()


def _drop_all(cuda: Cuda, kept: OrderedDict[WindowKey, Window]) -> None:
    while kept:
        _drop(cuda, kept.popitem()[1])

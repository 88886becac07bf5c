"""The half of `FaultyFiles` that writes, and what both halves stand on."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NoReturn

from headrace.bindings.posix import Files, PosixFiles
from headrace.bindings.posix import Mapping as Mapped
from headrace.memory.alignment import align_down

_SECTOR_NBYTES = 512
_WRITING_CALLS = frozenset(
    (
        *(
            "open_write",
            "create",
            "pwritev",
            "map_for_writing",
            "allocate",
            "resize",
            "sync",
            "sync_directory",
        ),
        *("rename", "remove", "lock", "set_mode", "list_directory"),
    )
)


class Killed(BaseException):
    """The process is gone, as far as these files know: nothing done to them has any effect."""


@dataclass(slots=True, eq=False)
class WritingFaults:
    """Open descriptors, the calls that write, their faults and their counters."""

    inner: Files = field(default_factory=PosixFiles)
    """What does the work."""
    _: KW_ONLY
    eintr_every: int | None = None
    """Each so many-th read, and each so many-th write, raises InterruptedError before a byte is
    moved; at least 2."""
    refuse_direct: bool = False
    """Opening with O_DIRECT raises OSError(EINVAL), as file systems without it do."""
    short_writes: int | None = None
    """No write takes more bytes than this; with O_DIRECT, than its next lower multiple of the
    alignment that the file demands."""
    write_eio_at: int | None = None
    """A write that covers this file offset raises OSError(EIO)."""
    enospc_after: int | None = None
    """Bytes that can be written in total. The write that would exceed them ends early, and the
    next raises OSError(ENOSPC); so does an allocation, after it took the space that is left."""
    no_allocate: bool = False
    """`allocate` raises OSError(EOPNOTSUPP), as file systems without fallocate do."""
    fail: Mapping[str, int] | None = None
    """Error number that each call named here raises: of `sync`, `rename`, any that writes."""
    die_at: int | None = None
    """The so many-th call that writes, from 1, has no effect and raises `Killed`, and so does
    every later call of any kind; locks are gone at once, and `close` still closes."""

    opens: int = field(default=0, init=False)
    """Descriptors that were opened."""
    writes: int = field(default=0, init=False)
    """Calls of `pwritev`, failed ones too."""
    writing_calls: int = field(default=0, init=False)
    """Calls that `die_at` counts."""
    buffered_written_nbytes: int = field(default=0, init=False)
    """Bytes written through the page cache."""
    direct_written_nbytes: int = field(default=0, init=False)
    """Bytes written with O_DIRECT."""
    mapped_written_nbytes: int = field(default=0, init=False)
    """Bytes mapped for a GPU to write."""
    allocated_nbytes: int = field(default=0, init=False)
    """Bytes in the ranges that were reserved."""
    synced: list[str] = field(default_factory=list, init=False)
    """What was synced, in order: the path of each file as it was opened, and ``"directory"``."""
    _taken: int = field(default=0, init=False)
    _dead: bool = field(default=False, init=False)
    _open: dict[int, tuple[str, bool]] = field(default_factory=dict, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def __post_init__(self) -> None:
        if self.eintr_every is not None and self.eintr_every < 2:
            raise ValueError(f"eintr_every is {self.eintr_every}; below 2 none ever succeeds")
        if unknown := set(self.fail or ()) - _WRITING_CALLS:
            known = ", ".join(sorted(_WRITING_CALLS))
            raise ValueError(f"fail names {sorted(unknown)}; the calls that can fail are {known}")

    @property
    def written_nbytes(self) -> int:
        """Bytes written in total."""
        written = self.buffered_written_nbytes + self.direct_written_nbytes
        return written + self.mapped_written_nbytes

    @property
    def open_descriptors(self) -> tuple[int, ...]:
        """Descriptors that were opened here and not closed."""
        return tuple(self._open)

    def close(self, fd: int) -> None:
        """See `Files.close`; OSError(EBADF) for a descriptor that is not open here."""
        with self._lock:
            if fd not in self._open:
                refuse(errno.EBADF, f"descriptor {fd}")
            # Before the real close: the number may be given away again at once.
            del self._open[fd]
        self.inner.close(fd)
        self._live()

    def open_write(self, path: str, *, direct: bool = False, create: bool = False) -> int:
        """See `Files.open_write`."""
        self._begin("open_write", path)
        inner = self.inner
        return self._keep(
            path, direct, lambda: inner.open_write(path, direct=direct, create=create)
        )

    def create(self, path: str, mode: int) -> int:
        """See `Files.create`."""
        self._begin("create", path)
        return self._keep(path, False, lambda: self.inner.create(path, mode))

    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        """See `Files.pwritev`."""
        nbytes = sum(view.nbytes for view in views)
        taken = self.begin_write(fd, file_offset, nbytes)
        done = 0
        try:
            if taken or not nbytes:
                done = self.inner.pwritev(fd, cut_views(views, taken), file_offset)
        finally:
            self.end_write(fd, taken, done)
        return done

    def begin_write(
        self, fd: int, file_offset: int, nbytes: int, *, call: str = "pwritev", unit: int = 1
    ) -> int:
        """Bring its faults to a write to a descriptor, also to one that somebody else makes.

        Parameters
        ----------
        fd
            A descriptor that was opened here.
        file_offset, nbytes
            What is to be written.
        call
            Who writes, for the messages.
        unit
            What the bytes must stay a multiple of, where the file demands less.

        Returns
        -------
        int
            How many of the bytes to write; tell `end_write` afterwards how many they were.

        Raises
        ------
        OSError
            The write is to fail, with EINTR, EIO or ENOSPC; or EBADF for a descriptor not open
            here.
        """
        unit = max(unit, self._unit(fd))
        self._begin("pwritev")
        with self._lock:
            self.writes += 1
            if self.eintr_every is not None and self.writes % self.eintr_every == 0:
                refuse(errno.EINTR, f"{call} number {self.writes}")
        nbytes = shorten(nbytes, self.short_writes, unit)
        self._refuse_bad_write(call, file_offset, nbytes)
        return self._take(nbytes, unit, call)

    def end_write(self, fd: int, taken: int, done: int) -> None:
        """Count the bytes that a write took, of those that it was to take."""
        _, direct = self._find(fd)
        with self._lock:
            self._taken -= taken - done
            self.direct_written_nbytes += done if direct else 0
            self.buffered_written_nbytes += 0 if direct else done

    def map_for_writing(self, fd: int, file_offset: int, nbytes: int) -> Mapped:
        """See `Files.map_for_writing`; it counts as a write of the range, with a write's faults."""
        self._find(fd)
        self._begin("map_for_writing")
        self._refuse_bad_write("mmap", file_offset, nbytes)
        if self._take(nbytes, 1, "mmap") < nbytes:
            refuse(errno.ENOSPC, f"mmap of [{file_offset}, {file_offset + nbytes})")
        mapping = self.inner.map_for_writing(fd, file_offset, nbytes)
        with self._lock:
            self.mapped_written_nbytes += nbytes
        return mapping

    def allocate(self, fd: int, file_offset: int, nbytes: int) -> None:
        """See `Files.allocate`."""
        self._find(fd)
        self._begin("allocate")
        if self.no_allocate:
            refuse(errno.EOPNOTSUPP, "fallocate")
        with self._lock:
            room = nbytes if self.enospc_after is None else self.enospc_after - self._taken
        if room < nbytes:
            if room > 0:  # ext4 keeps what it got
                self.inner.allocate(fd, file_offset, room)
            refuse(errno.ENOSPC, f"fallocate of [{file_offset}, {file_offset + nbytes})")
        self.inner.allocate(fd, file_offset, nbytes)
        with self._lock:
            self.allocated_nbytes += nbytes

    def resize(self, fd: int, nbytes: int) -> None:
        """See `Files.resize`."""
        self._find(fd)
        self._begin("resize")
        self.inner.resize(fd, nbytes)

    def sync(self, fd: int) -> None:
        """See `Files.sync`."""
        path, _ = self._find(fd)
        self._begin("sync")
        self.inner.sync(fd)
        self.synced.append(path)

    def sync_directory(self, path: str) -> None:
        """See `Files.sync_directory`."""
        self._begin("sync_directory", path)
        self.inner.sync_directory(path)
        self.synced.append("directory")

    def rename(self, old: str, new: str) -> None:
        """See `Files.rename`."""
        self._begin("rename", old)
        self.inner.rename(old, new)

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        self._begin("remove", path)
        self.inner.remove(path)

    def lock(self, fd: int) -> bool:
        """See `Files.lock`."""
        self._find(fd)
        self._begin("lock")
        return self.inner.lock(fd)

    def unlock(self, fd: int) -> None:
        """See `Files.unlock`."""
        self._find(fd)
        self._live()
        self.inner.unlock(fd)

    def set_mode(self, fd: int, mode: int) -> None:
        """See `Files.set_mode`."""
        self._find(fd)
        self._begin("set_mode")
        self.inner.set_mode(fd, mode)

    def list_directory(self, path: str) -> list[str]:
        """See `Files.list_directory`."""
        self._begin("list_directory", path)
        return self.inner.list_directory(path)

    def _begin(self, call: str, path: str | None = None) -> None:
        """Count a call that writes; die or fail if that is due."""
        with self._lock:
            self._live()
            self.writing_calls += 1
            if self.writing_calls == self.die_at:
                self._dead = True
                for fd in self._open:
                    fcntl.flock(fd, fcntl.LOCK_UN)
                self._live()
        code = (self.fail or {}).get(call)
        if code is not None and path is not None:
            raise OSError(code, os.strerror(code), path)
        if code is not None:
            refuse(code, call)

    def _live(self) -> None:
        if self._dead:
            raise Killed(f"these files died at writing call {self.die_at}")

    def _find(self, fd: int) -> tuple[str, bool]:
        self._live()
        with self._lock:
            if fd not in self._open:
                refuse(errno.EBADF, f"descriptor {fd}")
            return self._open[fd]

    def _keep(self, path: str, direct: bool, open_it: Callable[[], int]) -> int:
        """Open and remember a descriptor."""
        self._live()
        if direct and self.refuse_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        fd = open_it()
        with self._lock:
            self.opens += 1
            self._open[fd] = (path, direct)
        return fd

    def _refuse_bad_write(self, call: str, file_offset: int, nbytes: int) -> None:
        stop = file_offset + nbytes
        if self.write_eio_at is not None and file_offset <= self.write_eio_at < stop:
            refuse(errno.EIO, f"{call} of [{file_offset}, {stop})")

    def _take(self, nbytes: int, unit: int, call: str) -> int:
        """Take space for a write of `nbytes`, or for its beginning; OSError(ENOSPC) for none."""
        with self._lock:
            if self.enospc_after is not None and self._taken + nbytes > self.enospc_after:
                nbytes = align_down(self.enospc_after - self._taken, unit)
                if nbytes <= 0:
                    refuse(errno.ENOSPC, f"{call} after {self._taken} bytes")
            self._taken += nbytes
        return nbytes

    def _unit(self, fd: int) -> int:
        """What reads and writes of a descriptor are a multiple of."""
        if not self._find(fd)[1]:
            return 1
        demanded = self.inner.direct_alignment(fd)
        return max(_SECTOR_NBYTES, demanded.offset if demanded else 0)


def shorten(nbytes: int, limit: int | None, unit: int) -> int:
    """How many of `nbytes` move where faults want `limit` at most: whole units, at least one."""
    return nbytes if limit is None else min(nbytes, max(align_down(limit, unit), unit))


def cut_views(views: Sequence[memoryview], limit: int | None) -> list[memoryview]:
    """Keep the first `limit` bytes of the views."""
    kept: list[memoryview] = []
    for view in views:
        part = view if limit is None else view.cast("B")[:limit]
        kept.append(part)
        if limit is not None:
            limit -= part.nbytes
            if not limit:
                break
    return kept


def refuse(code: int, call: str) -> NoReturn:
    """Raise what the kernel says, which for calls on a descriptor knows no file name."""
    raise OSError(code, f"{call}: {errno.errorcode[code]}: {os.strerror(code)}")

"""FaultyFiles: real files that go wrong in the ways that files do."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.bindings.posix import DirectAlignment, FileStatus, Mapping
from headrace.testing.faulty_writing import WritingFaults, cut_views, refuse, shorten

_CHUNK_NBYTES = 1 << 20
_INVERSE = bytes(range(255, -1, -1))


@dataclass(slots=True, eq=False, kw_only=True)
class FaultyFiles(WritingFaults):
    """`headrace.bindings.posix.Files` over real files, with faults and counters.

    ``truncate_after``, ``rewrite_after`` and ``replace_after`` change the real file, once, when
    that many bytes were read in total; 0 does it before the first byte.
    """

    short_reads: int | None = None
    """No read gives more bytes than this; with O_DIRECT, than its next lower multiple of the
    alignment that the file demands."""
    eio_at: int | None = None
    """A read that covers this file offset raises OSError(EIO)."""
    truncate_after: int | None = None
    """Cut the file to `to` bytes after so many bytes; its mtime stays, as if all had happened
    within one tick of the file system's clock."""
    to: int = 0
    """Size after `truncate_after`, in bytes."""
    rewrite_after: int | None = None
    """Invert the bytes of the file in place after so many bytes; its mtime changes."""
    replace_after: int | None = None
    """Rename another file, of the same size and with inverted bytes, over the path after so many
    bytes."""
    no_cachestat: bool = False
    """`cached_pages` raises OSError(ENOSYS), as kernels before Linux 6.5 do."""
    deny_cachestat: bool = False
    """`cached_pages` raises OSError(EPERM), as it does for files of somebody else."""
    no_mincore: bool = False
    """`mapped_pages` raises OSError(ENOSYS)."""
    no_dioalign: bool = False
    """`direct_alignment` gives None, as kernels before Linux 6.1 do."""
    resident: Callable[[int, int], int] | None = None
    """Pages that the page cache is said to hold of (file_offset, nbytes), such as `pages_where`
    makes; None for the truth."""

    buffered_nbytes: int = field(default=0, init=False)
    """Bytes read through the page cache."""
    direct_nbytes: int = field(default=0, init=False)
    """Bytes read with O_DIRECT."""
    mapped_nbytes: int = field(default=0, init=False)
    """Bytes mapped for a GPU to read."""
    reads: int = field(default=0, init=False)
    """Calls of `begin_read`, which `preadv` makes too; also those that it let fail."""
    forgotten_nbytes: int = field(default=0, init=False)
    """Bytes in the ranges that `forget` was told to drop."""

    @property
    def nbytes_read(self) -> int:
        """Bytes read in total, and bytes mapped for the GPU to read."""
        return self.buffered_nbytes + self.direct_nbytes + self.mapped_nbytes

    def open(self, path: str, *, direct: bool = False) -> int:
        """See `Files.open`."""
        return self._keep(path, direct, lambda: self.inner.open(path, direct=direct))

    def status(self, fd: int) -> FileStatus:
        """See `Files.status`."""
        self._live()
        return self.inner.status(fd)

    def path_status(self, path: str) -> FileStatus:
        """See `Files.path_status`."""
        self._live()
        return self.inner.path_status(path)

    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        """See `Files.preadv`."""
        limit = self.begin_read(fd, file_offset, sum(view.nbytes for view in views))
        done = self.inner.preadv(fd, cut_views(views, limit), file_offset)
        self.end_read(fd, done)
        return done

    def begin_read(self, fd: int, file_offset: int, nbytes: int, *, call: str = "preadv") -> int:
        """Bring its faults to a read of a descriptor, also to one that somebody else makes.

        Parameters
        ----------
        fd
            A descriptor from `open`.
        file_offset, nbytes
            What is to be read.
        call
            Who reads, for the messages.

        Returns
        -------
        int
            How many of the bytes to read; tell `end_read` afterwards how many they were.

        Raises
        ------
        OSError
            The read is to fail, with EINTR or EIO; or EBADF for a descriptor not open here.
        """
        path, _ = self._find(fd)
        with self._lock:
            self.reads += 1
            self._change(path)
            if self.eintr_every is not None and self.reads % self.eintr_every == 0:
                refuse(errno.EINTR, f"{call} number {self.reads}")
        nbytes = shorten(nbytes, self.short_reads, self._unit(fd))
        self._refuse_bad(call, file_offset, nbytes)
        return nbytes

    def end_read(self, fd: int, nbytes: int) -> None:
        """Count the bytes that a read gave, and change the file if that is due now."""
        path, direct = self._find(fd)
        with self._lock:
            self.direct_nbytes += nbytes if direct else 0
            self.buffered_nbytes += 0 if direct else nbytes
            self._change(path)

    def forget(self, fd: int, file_offset: int, nbytes: int) -> None:
        """See `Files.forget`."""
        self._live()
        with self._lock:
            self.forgotten_nbytes += nbytes
        self.inner.forget(fd, file_offset, nbytes)

    def map_shared(self, fd: int, file_offset: int, nbytes: int) -> Mapping:
        """See `Files.map_shared`; it counts as a read of the range, with a read's faults."""
        path, _ = self._find(fd)
        self._refuse_bad("mmap", file_offset, nbytes)
        mapping = self.inner.map_shared(fd, file_offset, nbytes)
        with self._lock:
            self.mapped_nbytes += nbytes
            self._change(path)
        return mapping

    def expect_random(self, fd: int) -> None:
        """See `Files.expect_random`."""
        self._live()
        self.inner.expect_random(fd)

    def is_cached(self, fd: int, file_offset: int) -> bool:
        """See `Files.is_cached`; refused like `mapped_pages`, answered by `resident` if given."""
        self._find(fd)
        if self.no_mincore:
            raise OSError(errno.EOPNOTSUPP, "preadv2(RWF_NOWAIT)")
        if self.resident is not None:
            return self.resident(file_offset - file_offset % mmap.PAGESIZE, 1) > 0
        return self.inner.is_cached(fd, file_offset)

    def cached_pages(self, fd: int, file_offset: int, nbytes: int) -> int:
        """See `Files.cached_pages`."""
        self._find(fd)
        if self.no_cachestat:
            refuse(errno.ENOSYS, "cachestat")
        if self.deny_cachestat:
            refuse(errno.EPERM, "cachestat")
        if self.resident is not None:
            return self.resident(file_offset, nbytes)
        return self.inner.cached_pages(fd, file_offset, nbytes)

    def mapped_pages(self, fd: int, file_offset: int, nbytes: int) -> int:
        """See `Files.mapped_pages`."""
        self._find(fd)
        if self.no_mincore:
            refuse(errno.ENOSYS, "mincore")
        if self.resident is not None:
            return self.resident(file_offset, nbytes)
        return self.inner.mapped_pages(fd, file_offset, nbytes)

    def next_data(self, fd: int, file_offset: int) -> int | None:
        """See `Files.next_data`."""
        self._find(fd)
        return self.inner.next_data(fd, file_offset)

    def stored_nbytes(self, fd: int) -> int:
        """See `Files.stored_nbytes`."""
        self._find(fd)
        return self.inner.stored_nbytes(fd)

    def next_hole(self, fd: int, file_offset: int) -> int | None:
        """See `Files.next_hole`."""
        self._find(fd)
        return self.inner.next_hole(fd, file_offset)

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        """See `Files.direct_alignment`."""
        self._live()
        return None if self.no_dioalign else self.inner.direct_alignment(fd)

    def _refuse_bad(self, call: str, file_offset: int, nbytes: int) -> None:
        stop = file_offset + nbytes
        if self.eio_at is not None and file_offset <= self.eio_at < stop:
            refuse(errno.EIO, f"{call} of [{file_offset}, {stop})")

    def _change(self, path: str) -> None:
        """Do to the file what is due by now; each change only once."""
        if self.truncate_after is not None and self.nbytes_read >= self.truncate_after:
            self.truncate_after = None
            _truncate(path, self.to)
        if self.rewrite_after is not None and self.nbytes_read >= self.rewrite_after:
            self.rewrite_after = None
            _invert(path, path)
        if self.replace_after is not None and self.nbytes_read >= self.replace_after:
            self.replace_after = None
            _invert(path, f"{path}.new")
            os.rename(f"{path}.new", path)


def pages_where(held: Callable[[int], bool]) -> Callable[[int, int], int]:
    """Make a page cache that holds those pages of a file whose number `held` accepts."""

    def count(file_offset: int, nbytes: int) -> int:
        first, stop = file_offset // mmap.PAGESIZE, -(-(file_offset + nbytes) // mmap.PAGESIZE)
        return sum(map(held, range(first, stop)))

    return count


def _truncate(path: str, nbytes: int) -> None:
    before = os.stat(path)
    os.truncate(path, nbytes)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _invert(path: str, target: str) -> None:
    """Write the inverted bytes of one file to another, or to itself, and move its mtime."""
    with open(path, "rb") as source, open(target, "r+b" if path == target else "wb") as changed:
        later = os.fstat(source.fileno()).st_mtime_ns + 1_000_000
        while chunk := source.read(_CHUNK_NBYTES):
            changed.write(chunk.translate(_INVERSE))
    # A clock tick of the kernel may be longer than the test, so that the time would stay the same.
    os.utime(target, ns=(later, later))

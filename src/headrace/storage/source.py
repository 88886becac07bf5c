"""Source: an open file that knows who it was when it was opened."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from headrace.bindings.posix import Files, FileStatus
from headrace.errors import ShortRead, SourceChanged
from headrace.memory.alignment import align_down
from headrace.options import PAGE_NBYTES

_IOV_MAX = 1024  # most buffers of one preadv(2) on Linux


class Source:
    """A file opened for reading; owns its descriptors.

    Parameters
    ----------
    path
        The file.
    files
        The calls to make.

    Raises
    ------
    FileNotFoundError, PermissionError, IsADirectoryError
        As the operating system says.
    OSError
        The path is neither a regular file nor a directory (a pipe, a device).
    """

    def __init__(self, path: str, files: Files) -> None:
        self.path = path
        self._files = files
        self._fd = -1
        self._direct_fd: int | None = None
        # A look before the open: opening a pipe would wait for its writer.
        mode = files.path_status(path).mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        self._fd = files.open(path)
        try:
            self._opened = files.status(self._fd)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Size when it was opened, in bytes."""
        return self._opened.nbytes

    @property
    def identity(self) -> FileStatus:
        """Which file it was, with which size and times, when it was opened."""
        return self._opened

    @property
    def owner_uid(self) -> int:
        """User who owns the file."""
        return self._opened.uid

    @property
    def fd(self) -> int:
        """Descriptor for buffered reads."""
        return self._fd

    @property
    def files(self) -> Files:
        """The calls that this source makes."""
        return self._files

    def open_direct(self) -> None:
        """Open the same file once more with O_DIRECT, for `read_aligned`.

        Raises
        ------
        OSError
            The file system refuses O_DIRECT (EINVAL), or the path names another file by now.
        """
        if self._direct_fd is not None:
            return
        fd = self._files.open(self.path, direct=True)
        try:
            opened = self._files.status(fd)
            if (opened.device, opened.inode) != (self._opened.device, self._opened.inode):
                raise self._changed("it was replaced by another file")
        except BaseException:
            self._files.close(fd)
            raise
        self._direct_fd = fd

    def read(self, views: Sequence[memoryview], file_offset: int) -> None:
        """Fill the views, one after the other, through the page cache.

        Raises
        ------
        ShortRead
            The file ends first.
        SourceChanged
            It ends first because it was truncated since it was opened.
        OSError
            A read failed.
        """
        if len(views) == 1 and self._preadv(self._fd, views, file_offset) == len(views[0]):
            return  # nearly every read is one block that arrives whole
        for first in range(0, len(views), _IOV_MAX):
            group = list(views[first : first + _IOV_MAX])
            file_offset = self._fill(group, file_offset)

    def read_aligned(
        self, view: memoryview, file_offset: int, needed_nbytes: int, alignment: int
    ) -> None:
        """Fill a view through O_DIRECT.

        Parameters
        ----------
        view
            Memory whose address and length satisfy the file's alignment; it may reach past the
            end of the file.
        file_offset
            Where the view begins in the file; aligned.
        needed_nbytes
            How many bytes from the start of the view must arrive.
        alignment
            What O_DIRECT demands of offsets, in bytes.

        Raises
        ------
        ShortRead, SourceChanged, OSError
            As for `read`.
        """
        if self._direct_fd is None:
            raise ValueError(f"{self.path}: call open_direct() before read_aligned()")
        done = 0
        while done < needed_nbytes:
            count = self._preadv(self._direct_fd, [view[done:]], file_offset + done)
            if count == 0:
                raise self._ended(file_offset + done, file_offset + needed_nbytes)
            if done + count >= needed_nbytes:
                return
            # After a short count O_DIRECT goes on from the last aligned offset, or, where the
            # kernel itself stopped short of one, from where it stopped.
            resumed = align_down(done + count, alignment)
            done = resumed if resumed > done else done + count

    def expect_random(self) -> None:
        """Let buffered reads draw nothing else into the page cache."""
        self._files.expect_random(self._fd)

    def holds_nothing(self, start: int, stop: int) -> bool:
        """Whether the page cache is known to hold nothing of a stretch that others may need.

        mincore is asked, since cachestat sees no page of an overlay; to those who may not know, it
        says that everything is there.
        """
        first = align_down(start, PAGE_NBYTES)
        try:
            return self._files.mapped_pages(self._fd, first, stop - first) == 0
        except (OSError, ValueError):
            return False

    def forget(self, start: int, stop: int) -> None:
        """Drop a stretch from the page cache, as far as the kernel likes to."""
        self._files.forget(self._fd, start, stop - start)

    def verify_unchanged(self) -> None:
        """Check that path and file are still what was opened.

        Raises
        ------
        SourceChanged
            The file was truncated, extended, rewritten, replaced or removed.
        """
        now = self._files.status(self._fd)
        was = self._opened
        if now.nbytes != was.nbytes:
            raise self._changed(f"its size went from {was.nbytes} to {now.nbytes} bytes")
        try:
            named = self._files.path_status(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise self._changed("it was removed") from None
        if (named.device, named.inode) != (was.device, was.inode):
            raise self._changed("it was replaced by another file")
        if (now.mtime_ns, now.ctime_ns) != (was.mtime_ns, was.ctime_ns):
            raise self._changed("it was written to, or its attributes were changed")

    def __del__(self) -> None:
        self.close()  # an interrupt may come between the opening and whoever closes

    def close(self) -> None:
        """Close the descriptors; safe to call again."""
        fds, self._fd, self._direct_fd = (self._fd, self._direct_fd), -1, None
        for fd in fds:
            if fd is not None and fd >= 0:
                self._files.close(fd)

    def _fill(self, views: list[memoryview], file_offset: int) -> int:
        stop = file_offset + sum(len(view) for view in views)
        while file_offset < stop:
            count = self._preadv(self._fd, views, file_offset)
            if count == 0:
                raise self._ended(file_offset, stop)
            file_offset += count
            if file_offset < stop:
                _drop_front(views, count)
        return stop

    def _preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        while True:
            try:
                return self._files.preadv(fd, views, file_offset)
            except InterruptedError:
                continue
            except OSError as error:
                error.filename = self.path
                raise

    def _ended(self, file_offset: int, wanted_stop: int) -> ShortRead | SourceChanged:
        now = self._files.status(self._fd).nbytes
        if now < self._opened.nbytes:
            return self._changed(f"it was truncated from {self._opened.nbytes} to {now} bytes")
        return ShortRead(
            f"{self.path}: the file ends at byte {file_offset}, but bytes up to {wanted_stop} "
            "were wanted; ask for fewer bytes, or check that the file is whole"
        )

    def _changed(self, what: str) -> SourceChanged:
        return SourceChanged(
            errno.ESTALE, f"{what} while it was read; read it again once it is at rest", self.path
        )


def _drop_front(views: list[memoryview], count: int) -> None:
    """Remove `count` bytes, already filled, from the front of the views, in place."""
    while count >= len(views[0]):
        count -= len(views.pop(0))
    views[0] = views[0][count:]

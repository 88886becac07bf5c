"""Sink: an open file that bytes are written to."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from headrace.bindings.posix import Files
from headrace.storage.open_file import OpenFile, regular_status


class Sink(OpenFile):
    """A file opened for writing, as it is or new; owns its descriptors.

    Parameters
    ----------
    path
        The file; symbolic links are followed. It is made if it is missing and never truncated.
    files
        The calls to make.
    fd
        A descriptor of that file, open for writing, which the sink takes over and closes, also
        where it raises; None to open the path.

    Raises
    ------
    FileNotFoundError, PermissionError, IsADirectoryError
        As the operating system says.
    OSError
        The path is neither a regular file nor a directory (a pipe, a device).
    """

    def __init__(self, path: str, files: Files, *, fd: int | None = None) -> None:
        self._created = False
        super().__init__(path, files, lambda: self._open() if fd is None else fd)

    @property
    def created(self) -> bool:
        """Whether the file was missing and this sink made it."""
        return self._created

    def write(self, views: Sequence[memoryview], file_offset: int) -> None:
        """Write all bytes of the views, one after the other, through the page cache.

        Raises
        ------
        OSError
            A write failed (ENOSPC, EIO), or wrote nothing (EIO).
        """
        self._move(self._files.pwritev, views, file_offset)

    def write_aligned(self, view: memoryview, file_offset: int, alignment: int) -> None:
        """Write all bytes of a view through O_DIRECT.

        Parameters
        ----------
        view
            Memory whose address and length satisfy the file's alignment.
        file_offset
            Where it goes in the file; aligned.
        alignment
            What O_DIRECT demands of offsets, in bytes.

        Raises
        ------
        ValueError
            `open_direct` was not called.
        OSError
            As for `write`.
        """
        self._move_aligned(self._files.pwritev, view, file_offset, len(view), alignment)

    def allocate(self, start: int, stop: int) -> bool:
        """Reserve space for a stretch, and grow the file to its end if that is beyond it.

        Nobody may write to the file meanwhile: what it grew by is cut off again on failure.

        Returns
        -------
        bool
            False where the file system cannot reserve space.

        Raises
        ------
        OSError
            There is no room (ENOSPC); the file has the size that it had before.
        """
        if start == stop:
            return True
        before = self._files.status(self._fd).nbytes
        try:
            self._named(self._files.allocate, self._fd, start, stop - start)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            if stop > before:
                self.resize(before)  # part of the space may have been had
            raise
        return True

    def resize(self, nbytes: int) -> None:
        """Cut the file to a size, or extend it by a hole, in bytes.

        Raises
        ------
        OSError
            As the operating system says.
        """
        self._named(self._files.resize, self._fd, nbytes)

    def sync(self) -> None:
        """Wait until storage has the file's bytes and size.

        Raises
        ------
        OSError
            Bytes written earlier did not reach storage (EIO, ENOSPC).
        """
        self._named(self._files.sync, self._fd)

    def _open(self) -> int:
        try:
            regular_status(self.path, self._files)
        except FileNotFoundError:
            return self._make()
        return self._files.open_write(self.path)

    def _make(self) -> int:
        try:
            # What a dangling link names is made there, and made by us if by anybody.
            fd = self._files.create(os.path.realpath(self.path), 0o666)
        except FileExistsError:
            return self._files.open_write(self.path, create=True)
        self._created = True
        return fd

    def _reopen_direct(self) -> int:
        return self._files.open_write(self.path, direct=True)

    def _changed(self, what: str) -> OSError:
        return OSError(
            errno.ESTALE,
            f"{what} while it was written; write it again once it is at rest",
            self.path,
        )

    def _stopped(self, file_offset: int, wanted_stop: int) -> OSError:
        return OSError(
            errno.EIO,
            f"a write at byte {file_offset} of {wanted_stop} wrote nothing; check the file system",
            self.path,
        )

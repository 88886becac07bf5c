"""Sink: an open file that bytes are written to."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress

from headrace.bindings.posix import Files
from headrace.memory.alignment import align_down, align_up
from headrace.options import PAGE_NBYTES
from headrace.storage.open_file import OpenFile, regular_status

_KEEPS_ZEROS = ("ext4", "tmpfs")
# File systems on which a hole in a stretch that was written means that it was truncated since:
# looked at on these. Others make holes of zeros that are written (ZFS).


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
        self._least = 0
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
        self._check_length(self._least)

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
        self._check_length(self._least)

    def allocate(self, start: int, stop: int) -> bool:
        """Reserve space for a stretch, and grow the file to its end if that is beyond it.

        Returns
        -------
        bool
            False where the file system cannot reserve space.

        Raises
        ------
        OSError
            There is no room (ENOSPC); the file may have grown by a part, which `restore` undoes.
        """
        if start == stop:
            return True
        try:
            self._named(self._files.allocate, self._fd, start, stop - start)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            raise
        return True

    def extend(self, nbytes: int) -> None:
        """Make the file at least so long, whoever else makes it longer meanwhile.

        Its last byte is overwritten if it is as long by now: the caller is about to write it.

        Raises
        ------
        OSError
            As for `write`.
        """
        if self._files.status(self._fd).nbytes < nbytes:
            self.write([memoryview(b"\0")], nbytes - 1)
        self.expect(nbytes)

    def expect(self, stop: int) -> None:
        """From now on, take the file for truncated where a write finds it shorter than now.

        Only bytes below `stop` count. A later write makes it long again, with zeros in between.
        """
        self._least = max(self._least, min(self._files.status(self._fd).nbytes, stop))

    def check_holds(self, stop: int) -> None:
        """Check, after writing up to `stop`, that the bytes are where readers of the path look.

        Raises
        ------
        OSError
            The file was truncated, replaced or removed meanwhile (ESTALE).
        """
        self._check_length(stop)
        self._check_named()

    def check_whole(self, start: int, stop: int, file_system: str) -> None:
        """Check that nothing is missing in a stretch that was written, where holes tell.

        Parameters
        ----------
        start, stop
            The stretch, in bytes.
        file_system
            Its type, as in ``/proc/self/mountinfo``.

        Raises
        ------
        OSError
            The file was truncated meanwhile, and made long again (ESTALE).
        """
        if file_system not in _KEEPS_ZEROS or start == stop:
            return
        # To look for a hole in tmpfs takes 9 ms for each GiB; that there is none is known at once.
        if file_system != "tmpfs" or self._is_sparse():
            hole = self._named(self._files.next_hole, self._fd, start)
            if hole is None or hole < stop:
                raise self._changed("it was truncated and made longer again")

    def restore(self, start: int, stop: int) -> None:
        """Undo what writing into a stretch did to the file's length; its old bytes may be gone.

        The file gets its old length back, or is removed if it was made here. What others wrote
        meanwhile, between the old end and the stretch or behind it, stays, and so does the length.

        Raises
        ------
        OSError
            As the operating system says.
        """
        now, end = self._files.status(self._fd).nbytes, self.nbytes
        if self._created and not now:
            self._remove()
        elif max(start, end) < now <= stop:  # else it is not we who made it so long
            if self._others_wrote(end, start):
                end = start
            if self._created and not end:
                self._remove()
            else:
                self.resize(end)

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

    def _is_sparse(self) -> bool:
        return self._files.stored_nbytes(self._fd) < self._files.status(self._fd).nbytes

    def _check_length(self, least: int) -> None:
        if least and (now := self._files.status(self._fd).nbytes) < least:
            raise self._changed(f"it was truncated to {now} bytes")

    def _others_wrote(self, start: int, stop: int) -> bool:
        """Whether a stretch that was not there, and into which nothing was written here, has data.

        Pages of it count if they are in no hole; parts of a page, which it shares with what was
        there or was written here, if a byte is not 0.
        """
        if start >= stop:
            return False
        lower, upper = align_up(start, PAGE_NBYTES), align_down(stop, PAGE_NBYTES)
        if lower < upper:
            found = self._named(self._files.next_data, self._fd, lower)
            if found is not None and found < upper:
                return True
        parts = ((start, min(lower, stop)), (max(upper, start), stop))
        return any(self._holds_bytes(first, end) for first, end in parts)

    def _holds_bytes(self, start: int, stop: int) -> bool:
        block = bytearray(max(stop - start, 0))
        return self._named(self._files.preadv, self._fd, [memoryview(block)], start) > 0 and any(
            block
        )

    def _remove(self) -> None:
        """Remove the file, unless somebody did, or put another one there."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if self.identity.is_same_file(self._files.path_status(self.path)):
                self._files.remove(os.path.realpath(self.path))

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

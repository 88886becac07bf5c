"""OpenFile: what a file that is read and a file that is written have in common."""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

from headrace.bindings.posix import Files, FileStatus
from headrace.memory.alignment import align_down

_IOV_MAX = 1024  # most buffers of one preadv(2) or pwritev(2) on Linux

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")
_Move = Callable[[int, Sequence[memoryview], int], int]


class OpenFile(ABC):
    """A regular file and its descriptors, which it owns; moves all bytes or raises."""

    _fd = -1  # of the class, for an interrupt may come before anything else is there
    _direct_fd: int | None = None

    def __init__(self, path: str, files: Files, open_it: Callable[[], int]) -> None:
        self.path = path
        self._files = files
        self._fd = open_it()
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
    def fd(self) -> int:
        """Descriptor that goes through the page cache."""
        return self._fd

    @property
    def direct_fd(self) -> int | None:
        """Descriptor that goes around the page cache; None before `open_direct`."""
        return self._direct_fd

    @property
    def files(self) -> Files:
        """The calls that it makes."""
        return self._files

    def open_direct(self) -> None:
        """Open the same file once more with O_DIRECT, for the aligned calls.

        Raises
        ------
        OSError
            The file system refuses O_DIRECT (EINVAL); or the path names another file by now, or
            none (ESTALE).
        """
        if self._direct_fd is not None:
            return
        try:
            fd = self._reopen_direct()
        except OSError:
            self._check_named()  # what came in its place may not open, or not so
            raise
        try:
            self._check_same(self._files.status(fd))
        except BaseException:
            self._files.close(fd)
            raise
        self._direct_fd = fd

    def __del__(self) -> None:
        self.close()  # an interrupt may come between the opening and whoever closes

    def close(self) -> None:
        """Close the descriptors; safe to call again."""
        fds, self._fd, self._direct_fd = (self._direct_fd, self._fd), -1, None
        try:
            if fds[0] is not None:
                self._files.close(fds[0])
        finally:
            if fds[1] >= 0:
                self._files.close(fds[1])

    def _check_named(self) -> None:
        """Check that the path still names the open file."""
        try:
            named = self._files.path_status(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise self._changed("it was removed") from None
        self._check_same(named)

    def _check_same(self, found: FileStatus) -> None:
        if not self._opened.is_same_file(found):
            raise self._changed("it was replaced by another file")

    @abstractmethod
    def _reopen_direct(self) -> int:
        """Open the path with O_DIRECT."""

    @abstractmethod
    def _changed(self, what: str) -> OSError:
        """Make the error of a path that does not name the open file any more."""

    @abstractmethod
    def _stopped(self, file_offset: int, wanted_stop: int) -> Exception:
        """Make the error of a call that moved no byte at an offset."""

    def _move(self, call: _Move, views: Sequence[memoryview], file_offset: int) -> None:
        """Move all bytes of the views, one after the other, through the page cache."""
        if len(views) == 1 and self._named(call, self._fd, views, file_offset) == len(views[0]):
            return  # nearly every call is one block that goes whole
        for first in range(0, len(views), _IOV_MAX):
            group = list(views[first : first + _IOV_MAX])
            file_offset = self._move_group(call, group, file_offset)

    def _move_group(self, call: _Move, views: list[memoryview], file_offset: int) -> int:
        stop = file_offset + sum(len(view) for view in views)
        while file_offset < stop:
            count = self._named(call, self._fd, views, file_offset)
            if count == 0:
                raise self._stopped(file_offset, stop)
            file_offset += count
            if file_offset < stop:
                _drop_front(views, count)
        return stop

    def _move_aligned(
        self, call: _Move, view: memoryview, file_offset: int, needed_nbytes: int, alignment: int
    ) -> None:
        """Move at least the needed bytes from the start of a view around the page cache."""
        if self._direct_fd is None:
            raise ValueError(f"{self.path}: call open_direct() before an aligned read or write")
        done = 0
        while done < needed_nbytes:
            count = self._named(call, self._direct_fd, [view[done:]], file_offset + done)
            if count == 0:
                raise self._stopped(file_offset + done, file_offset + needed_nbytes)
            if done + count >= needed_nbytes:
                return
            # After a short count O_DIRECT goes on from the last aligned offset, or, where the
            # kernel itself stopped short of one, from where it stopped.
            resumed = align_down(done + count, alignment)
            done = resumed if resumed > done else done + count

    def _named(self, call: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> _Result:
        """Make a call until no signal interrupts it; an error of it names the file."""
        while True:
            try:
                return call(*arguments)
            except InterruptedError:
                continue
            except OSError as error:
                error.filename = self.path
                raise


def regular_status(path: str, files: Files) -> FileStatus:
    """Look at a path before it is opened: opening a pipe would wait for its other end.

    Raises
    ------
    IsADirectoryError
        The path is a directory.
    OSError
        The path is neither a regular file nor a directory (EINVAL), or as the system says.
    """
    status = files.path_status(path)
    if stat.S_ISDIR(status.mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return status


def _drop_front(views: list[memoryview], count: int) -> None:
    """Remove `count` bytes, already moved, from the front of the views, in place."""
    while count >= len(views[0]):
        count -= len(views.pop(0))
    views[0] = views[0][count:]

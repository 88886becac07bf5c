"""Source: an open file that knows who it was when it was opened."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from headrace.bindings.posix import Files
from headrace.errors import ShortRead, SourceChanged
from headrace.memory.alignment import align_down
from headrace.options import PAGE_NBYTES
from headrace.storage.open_file import OpenFile, regular_status


class Source(OpenFile):
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
        The path is neither a regular file nor a directory (a pipe, a device); or its content is
        made as it is read, and its size unknown (``/proc``).
    """

    def __init__(self, path: str, files: Files) -> None:
        def open_it() -> int:
            regular_status(path, files)
            return files.open(path)

        super().__init__(path, files, open_it)
        if not self.nbytes:
            self._refuse_hidden_content()

    @property
    def owner_uid(self) -> int:
        """User who owns the file."""
        return self._opened.uid

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
        self._move(self._files.preadv, views, file_offset)

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
        self._move_aligned(self._files.preadv, view, file_offset, needed_nbytes, alignment)

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
        self._check_named()
        if (now.mtime_ns, now.ctime_ns) != (was.mtime_ns, was.ctime_ns):
            raise self._changed("it was written to, or its attributes were changed")

    def _refuse_hidden_content(self) -> None:
        """Tell an empty file from one whose size says nothing."""
        try:
            holds_some = self._named(self._files.preadv, self._fd, [memoryview(bytearray(1))], 0)
            if holds_some and not self._files.status(self._fd).nbytes:
                what = "its size is unknown until it is read; copy its content into a file first"
                raise OSError(errno.EINVAL, what, self.path)
        except BaseException:
            self.close()
            raise

    def _reopen_direct(self) -> int:
        return self._files.open(self.path, direct=True)

    def _stopped(self, file_offset: int, wanted_stop: int) -> ShortRead | SourceChanged:
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

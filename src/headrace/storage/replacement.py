"""Replacement: a new file that takes the place of a path, whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from headrace.bindings.posix import Files
from headrace.storage.open_file import regular_status
from headrace.storage.sink import Sink

_NAME_MAX = 255  # bytes of one name, on nearly every file system of Linux
_RANDOM_NBYTES = 8
_SUFFIX = ".headrace"
_TEMPORARY = re.compile(rf"\.(.+)\.[0-9a-f]{{{2 * _RANDOM_NBYTES}}}{re.escape(_SUFFIX)}", re.DOTALL)
_ATTEMPTS = 16
CANNOT_LOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of a file system where nobody can lock."""


class Replacement:
    """A file beside the target, to be written and then renamed over it.

    Readers of the target see the old bytes or the new ones, never a part, also where the writer
    is killed. What a killed writer leaves behind is removed by the next replacement of the same
    target. Of several at once the last rename wins.

    The new file belongs to who writes it and has the permissions of the old one, or, where there
    was none, those that the umask leaves. Other hard links to the old file keep the old bytes.

    Parameters
    ----------
    path
        The target; symbolic links are followed, and a dangling one has its target made.
    files
        The calls to make.
    follow
        False replaces a link that the path itself is.
    like
        File whose permissions the new one takes where there is no old one.

    Raises
    ------
    IsADirectoryError
        The target is a directory.
    OSError
        The target is neither a regular file nor a directory (EINVAL), or no file can be made
        beside it.
    """

    def __init__(
        self, path: str, files: Files, *, follow: bool = True, like: str | None = None
    ) -> None:
        folder, last = os.path.split(path)
        self.path = (
            os.path.realpath(path) if follow else os.path.join(os.path.realpath(folder), last)
        )
        """The target, links resolved."""
        self._files = files
        self._mode = _permissions(path, files)
        if self._mode is None and like is not None:
            self._mode = _permissions(like, files)
        self._directory, name = os.path.split(self.path)
        self._shown_name = _shorten(name)
        self._temporary: str | None = None
        self._in_place = False
        try:
            # Files can be made in some directories that cannot be listed.
            with suppress(PermissionError):
                remove_stale(self._directory, lambda name: name == self._shown_name, files)
            self._sink = self._make()
        except BaseException as error:
            self._clean_up_after(error, self._discard)
            raise

    @property
    def temporary(self) -> str | None:
        """Path of the new file until it is renamed; None once it is, or is gone."""
        return self._temporary

    @property
    def sink(self) -> Sink:
        """The new file, empty at first; closed by `commit` and `abandon`."""
        return self._sink

    def sync(self) -> None:
        """Wait until storage has the new file, before it is renamed.

        Raises
        ------
        OSError
            Bytes written earlier did not reach storage.
        """
        self._set_permissions()
        self._sink.sync()

    def rename(self) -> None:
        """Put the new file in the place of the target.

        Raises
        ------
        ValueError
            It was renamed or abandoned before.
        OSError
            As the operating system says; the target is as it was.
        """
        if self._temporary is None:
            raise ValueError(f"{self.path}: rename() after the new file was renamed or abandoned")
        self._set_permissions()
        self._files.rename(self._temporary, self.path)
        self._temporary, self._in_place = None, True

    def sync_directory(self) -> None:
        """Wait until storage has the new name, after `rename`.

        Raises
        ------
        ValueError
            It was not renamed.
        OSError
            The new file is in place, but may not survive a power cut.
        """
        if not self._in_place:
            raise ValueError(f"{self.path}: call rename() before sync_directory()")
        try:
            self._files.sync_directory(self._directory)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the new file is in place, but its directory could not be synced "
                f"({error.strerror}), so that it may not survive a power cut; run sync(1)",
                self.path,
            ) from error

    def commit(self, *, fsync: bool) -> None:
        """Put the new file in place, and close it.

        Parameters
        ----------
        fsync
            Whether to wait until storage has the bytes, and then the name. Without it a power cut
            may take the new file and the old one, and a file system that writes when a file is
            closed (NFS) can report an error once the new file is in place.

        Raises
        ------
        ValueError, OSError
            As for `sync`, `rename` and `sync_directory`.
        """
        if fsync:
            self.sync()
        self.rename()
        if fsync:
            self.sync_directory()
        self._sink.close()

    def is_in_place(self) -> bool:
        """Whether the target is the new file, also where an interrupt came as it was renamed."""
        try:
            return self._sink.identity.is_same_file(self._files.path_status(self.path))
        except FileNotFoundError:
            return False

    def abandon(self) -> None:
        """Remove the new file, unless it is in place, and close it; safe to call again.

        Raises
        ------
        OSError
            It could not be removed.
        """
        try:
            self._discard()
        finally:
            self._sink.close()

    def leave(self) -> None:
        """Close the new file, and leave it to the next replacement of the target to remove it."""
        self._temporary = None
        self._sink.close()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.abandon()
        else:
            self._clean_up_after(error, self.abandon)

    def _make(self) -> Sink:
        """Make a temporary and hold its lock."""
        for _ in range(_ATTEMPTS):
            name = f".{self._shown_name}.{os.urandom(_RANDOM_NBYTES).hex()}{_SUFFIX}"
            # Known before it exists, so that whatever interrupts us can remove it.
            self._temporary = os.path.join(self._directory, name)
            sink = Sink(self._temporary, self._files, fd=self._create(self._temporary))
            try:
                if self._hold(sink):
                    return sink
                self._discard()
            except BaseException:
                sink.close()
                raise
            sink.close()
        raise OSError(
            errno.EAGAIN,
            f"somebody else locked {_ATTEMPTS} new files in {self._directory} one after the other; "
            "find out who locks every file there",
            self.path,
        )

    def _create(self, temporary: str) -> int:
        # Nobody else may look into what will replace a private file.
        mode = 0o666 if self._mode is None else 0o600
        try:
            return self._files.create(temporary, mode)
        except OSError as error:
            self._temporary = None  # it is not ours to remove
            error.filename = self.path
            error.add_note(f"its replacement has to be made as a new file in {self._directory}")
            raise

    def _hold(self, sink: Sink) -> bool:
        """Lock the temporary; False if somebody took it for a dead writer's meanwhile."""
        try:
            if not self._files.lock(sink.fd):
                return False
        except OSError as error:
            if error.errno not in CANNOT_LOCK:
                raise
            return True  # where nobody can lock, nobody takes it for a dead writer's
        try:
            return sink.identity.is_same_file(self._files.path_status(sink.path))
        except FileNotFoundError:
            return False

    def _set_permissions(self) -> None:
        fd, wanted = self._sink.fd, self._mode
        if wanted is not None and stat.S_IMODE(self._files.status(fd).mode) != wanted:
            self._files.set_mode(fd, wanted)

    def _discard(self) -> None:
        if self._temporary is None:
            return
        # It may be gone: never made, renamed just before an interrupt, or removed by others.
        with suppress(FileNotFoundError):
            self._files.remove(self._temporary)
        self._temporary = None

    def _clean_up_after(self, error: BaseException, clean_up: Callable[[], None]) -> None:
        """Clean up without hiding the first error, which is about the target for its reader."""
        ours = self._temporary
        if (
            isinstance(error, OSError)
            and ours
            and (error.filename, error.filename2) == (ours, None)
        ):
            error.filename = self.path  # what the caller asked for
        try:
            clean_up()
        except OSError as second:
            error.add_note(f"and then the new file could not be removed or closed: {second}")


def remove_stale(directory: str, is_target: Callable[[str], object], files: Files) -> None:
    """Remove what dead writers left; what is held by a living one, or cannot be removed, stays.

    Parameters
    ----------
    directory
        Where their targets are.
    is_target
        Whether a target is meant, by its name (the first 228 bytes of a longer one).
    files
        The calls to make.

    Raises
    ------
    OSError
        The directory cannot be listed.
    """
    for name in files.list_directory(directory):
        found = _TEMPORARY.fullmatch(name)
        if found and is_target(found[1]):
            _remove_if_dead(os.path.join(directory, name), files)


def _permissions(path: str, files: Files) -> int | None:
    """Permissions of a target, without set-user-ID and the like; None where there is none."""
    try:
        return stat.S_IMODE(regular_status(path, files).mode) & 0o777
    except FileNotFoundError:
        if os.path.basename(path) in ("", ".", ".."):  # names no file that could be made
            raise
        return None


def _shorten(name: str) -> str:
    """Name of a target as its temporaries have it, so that theirs is short enough."""
    room = _NAME_MAX - len("..") - 2 * _RANDOM_NBYTES - len(_SUFFIX)
    while len(os.fsencode(name)) > room:
        name = name[:-1]
    return name


def _remove_if_dead(path: str, files: Files) -> None:
    """Remove a temporary that nobody holds."""
    try:
        regular_status(path, files)
        fd = _open_for_lock(path, files)
        try:
            if files.lock(fd):
                files.remove(path)
        finally:
            files.close(fd)
    except OSError:
        return  # gone by now, or somebody else's: it does not hinder a new file


def _open_for_lock(path: str, files: Files) -> int:
    try:
        return files.open_write(path)  # NFS locks only what is open for writing
    except PermissionError:
        return files.open(path)  # its writer died when it had its permissions already

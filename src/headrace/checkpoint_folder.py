"""A folder with a checkpoint: what is in it, who saves into it, and what killed saves left."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from headrace.bindings.posix import Files, FileStatus
from headrace.errors import FormatError
from headrace.formats.checkpoint import DEFAULT_INDEX, INTERIM, Index, read_index
from headrace.formats.raw import open_regular
from headrace.storage.replacement import CANNOT_LOCK, remove_stale

SHARD = ".safetensors"
"""Ending of a shard."""
SINGLE = "model.safetensors"
"""Name of a checkpoint of one file, which some readers take first."""
RECORD = ".headrace-save.json"
"""File with the names of shards that come and go, for whoever finds a killed save."""

_ANY_INDEX = ".index.json"
_INDEX = SHARD + _ANY_INDEX
_NUMBERED = re.compile(r"model-(?:[0-9a-f]{8}-)?[0-9]+-of-[0-9]+\.safetensors")
_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class Contents:
    """What a directory holds before a save."""

    names: frozenset[str]
    """All that is in it."""
    files: frozenset[str]
    """Shards and indexes among them; no directories, nor links that lead nowhere."""
    index: Index | None
    """What its index says; None where there is none, or no sound one."""
    named_by_others: frozenset[str] | None
    """Files that other indexes in it name; None where one of those cannot be read."""

    @property
    def has_index(self) -> bool:
        """Whether there is an index in it."""
        return any(map(is_index, self.files))

    @property
    def is_indexed(self) -> bool:
        """Whether an index has decided what is read, and not which files there are."""
        return self.has_index and not self._is_interim

    @property
    def named(self) -> frozenset[str]:
        """All that its index names."""
        return frozenset(self.index.weight_map.values() if self.index else ())

    @property
    def shards(self) -> frozenset[str]:
        """Shards that are there and that its index names."""
        return frozenset(filter(_is_shard, self.named)) & self.files

    @property
    def replaceable(self) -> frozenset[str]:
        """The same, if nobody needs them any more once there is another index."""
        return frozenset() if self._is_interim else self.shards

    @property
    def example(self) -> str:
        """File whose permissions new ones take; there may be none of the name."""
        shards = sorted(self.shards or filter(_is_shard, self.files))
        return shards[0] if shards else DEFAULT_INDEX

    def removable(self, unwanted: frozenset[str]) -> frozenset[str]:
        """Those of some shards that are there, and that no index names, as far as is known."""
        if self.named_by_others is None:
            return frozenset()
        return (unwanted & self.files) - self.shards - self.named_by_others

    def stranded(self, *, was_indexed: bool) -> frozenset[str]:
        """Files that belong to a checkpoint as it seems, and that no index names.

        Without an index, every shard belonged to it.
        """
        belongs = _has_usual_name if was_indexed else _is_shard
        return self.removable(frozenset(filter(belongs, self.files)))

    @property
    def _is_interim(self) -> bool:
        return self.index is not None and INTERIM in self.index.metadata


def look_into(directory: str, files: Files) -> Contents:
    """Read what a directory holds.

    Raises
    ------
    OSError
        It, or its index, may not be read.
    """
    names = frozenset(files.list_directory(directory))
    there = frozenset(
        name
        for name in names
        if name.endswith((SHARD, _ANY_INDEX)) and os.path.isfile(os.path.join(directory, name))
    )
    index = None
    if DEFAULT_INDEX in there:
        # One that nobody can read protects no shards, and is replaced like any other.
        with contextlib.suppress(FormatError, FileNotFoundError):
            index = read_index(os.path.join(directory, DEFAULT_INDEX))
    return Contents(names, there, index, _named_by_others(directory, there))


def _named_by_others(directory: str, there: frozenset[str]) -> frozenset[str] | None:
    others = [name for name in there if name.endswith(_ANY_INDEX) and name != DEFAULT_INDEX]
    try:
        indexes = [read_index(os.path.join(directory, name)) for name in others]
    except (FormatError, OSError):
        return None
    return frozenset(shard for index in indexes for shard in index.weight_map.values())


def is_index(name: str) -> bool:
    """Whether a file is called like an index that decides in a directory."""
    return name.endswith(_INDEX) and name[0] != "."


def _is_shard(name: str) -> bool:
    return name.endswith(SHARD) and name[0] != "."


def _has_usual_name(name: str) -> bool:
    """Whether a file is called like those that readers take without an index."""
    return name == SINGLE or _NUMBERED.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Record:
    """Shards that come and go in a folder, with a mark by which each is known again."""

    folder: int
    """Inode of the folder: a copy of it has another."""
    index: str
    """Name of the new index until it is in place, which tells that it is not."""
    new: Marks
    """Shards that the save is to put in place."""
    old: Marks
    """Shards that nobody needs once it has."""
    left: Marks
    """Shards that nobody has needed since an earlier save."""

    def text(self) -> bytes:
        """As it is written."""
        return json.dumps(asdict(self), sort_keys=True).encode()


Marks = Mapping[str, Sequence[int]]
"""Inode, bytes and time of the last change, by name: other files may get the name or the inode."""


def mark_of(status: FileStatus) -> Sequence[int]:
    """What tells a shard from any other file of its name."""
    return [status.inode, status.nbytes, status.mtime_ns]


def marks_of(directory: str, names: Iterable[str], files: Files) -> dict[str, Sequence[int]]:
    """Marks of those of some files that are there."""
    found = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            found[name] = mark_of(files.path_status(os.path.join(directory, name)))
    return found


def clear_folder(directory: str, files: Files, *, fsync: bool) -> frozenset[str]:
    """Remove what killed saves left in a locked folder; shards of theirs that stay for now.

    Raises
    ------
    OSError
        The folder cannot be listed, or not be synced, if that is wanted.
    """
    remove_stale(directory, _NUMBERED.fullmatch, files)
    record = _read_record(os.path.join(directory, RECORD))
    if record is None or record.folder != files.path_status(directory).inode:
        return frozenset()
    old = look_into(directory, files)
    if not old.has_index or (DEFAULT_INDEX in old.files and old.index is None):
        return frozenset()  # all that is there may be a checkpoint
    left = _find_left(record, old, marks_of(directory, filter(_is_shard, old.files), files))
    orphans = old.removable(left)
    if orphans and fsync:
        files.sync_directory(directory)  # the index that does not name them has to last
    return left - (orphans - remove_files(directory, orphans, files))


def _find_left(record: Record, old: Contents, there: Marks) -> frozenset[str]:
    """Shards that nobody needs since a save was killed, but for an index that stands in."""

    def met(marks: Marks) -> frozenset[str]:
        return frozenset(name for name, mark in marks.items() if there.get(name) == mark)

    named = old.named | (old.named_by_others or frozenset())
    left = met(record.left) - named
    if record.index in old.names or not old.is_indexed:
        return left | met(record.new)
    # The index was in place, and may have been set aside, with its shards, since.
    return left | (met(record.old) - named if named & record.new.keys() else frozenset())


def _read_record(path: str) -> Record | None:
    try:
        with open_regular(path) as file:
            record = Record(**json.loads(file.read()))
    except (FormatError, OSError, ValueError, TypeError, RecursionError):
        return None
    groups = (record.new, record.old, record.left)
    is_one = isinstance(record.index, str) and all(isinstance(group, dict) for group in groups)
    return record if is_one else None


@contextlib.contextmanager
def hold_folder(directory: str, files: Files, *, fsync: bool) -> Iterator[bool]:
    """Make a directory, and keep other saves out of it for a block; whether it can be locked.

    Where the block fails, directories that were made here go again, unless others use them.

    Parameters
    ----------
    directory
        Its real path.
    files
        The calls to make.
    fsync
        Whether to wait until storage has what was made.

    Raises
    ------
    OSError
        It cannot be made; another save into it is under way (EBUSY).
    """
    made: list[str] = []
    for _ in range(_ATTEMPTS):
        with _unmaking(made), contextlib.ExitStack() as stack:
            _make(directory, made, files, fsync=fsync)
            fd = files.open(directory)
            stack.callback(files.close, fd)
            held = _lock(fd, files)
            if held is False:
                made.clear()  # whoever holds it needs them
                raise OSError(
                    errno.EBUSY,
                    "another save into this directory is under way, or a child that was forked "
                    "during one lives on; wait for it",
                    directory,
                )
            if held:
                stack.callback(_unlock, fd, directory, files)
            if not _is_named(fd, directory, files):
                continue  # who made it too has failed, and took it away
            with _unmaking(made):  # while it is locked: whoever comes now makes it anew
                yield held is True
            return
    raise OSError(errno.ESTALE, "others remove this directory again and again", directory)


def _make(directory: str, made: list[str], files: Files, *, fsync: bool) -> None:
    missing = []
    path = directory
    while not os.path.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    made.extend(each for each in missing if each not in made)
    os.makedirs(directory, exist_ok=True)
    if fsync:
        for each in missing:
            files.sync_directory(os.path.dirname(each))


@contextlib.contextmanager
def _unmaking(made: Sequence[str]) -> Iterator[None]:
    """Where a block fails, remove the directories that were made for it, if they are empty."""
    try:
        yield
    except BaseException:
        for each in made:
            with contextlib.suppress(OSError):  # not there, or not empty: not ours any more
                os.rmdir(each)
        raise


def _lock(fd: int, files: Files) -> bool | None:
    """Lock a directory; False where somebody else has, None where nobody can."""
    try:
        return files.lock(fd)
    except OSError as error:
        if error.errno not in (*CANNOT_LOCK, errno.EBADF):  # EBADF: NFS, of a directory
            raise
        return None


def _is_named(fd: int, directory: str, files: Files) -> bool:
    try:
        return files.status(fd).is_same_file(files.path_status(directory))
    except FileNotFoundError:
        return False


def _unlock(fd: int, directory: str, files: Files) -> None:
    try:
        files.unlock(fd)  # to close it is not enough: a forked child may have it open, too
    except OSError as error:
        logging.getLogger("headrace").warning("%s stays locked: %s", directory, error)


def remove_files(directory: str, names: Iterable[str], files: Files) -> frozenset[str]:
    """Remove files that nobody needs; those that stay, which the log tells."""
    stay = set()
    for name in sorted(names):
        path = os.path.join(directory, name)
        try:
            files.remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            stay.add(name)
            logging.getLogger("headrace").warning(
                "%s is of no use any more, but stays there: %s", path, error
            )
    return frozenset(stay)

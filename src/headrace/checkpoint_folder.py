"""A folder with a checkpoint: what is in it, who saves into it, and what killed saves left."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.bindings.posix import Files
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
    """Shards and indexes among them; no directories."""
    index: Index | None
    """What its index says; None where there is none, or no sound one."""
    named_by_others: frozenset[str] | None
    """Files that other indexes in it name; None where one of those cannot be read."""

    @property
    def has_index(self) -> bool:
        """Whether an index decides what is read, and not which files there are."""
        return any(name.endswith(_INDEX) and name[0] != "." for name in self.files)

    @property
    def named(self) -> frozenset[str]:
        """Shards that are there and that its index names, if that is one of a checkpoint."""
        if self.index is None or self._is_interim:
            return frozenset()
        return frozenset(filter(_is_shard, self.index.weight_map.values())) & self.files

    @property
    def example(self) -> str:
        """File whose permissions new ones take; there may be none of the name."""
        shards = sorted(self.named or filter(_is_shard, self.files))
        return shards[0] if shards else DEFAULT_INDEX

    def removable(self, unwanted: frozenset[str]) -> frozenset[str]:
        """Those of some shards that are there, and that no other index may name."""
        if self.named_by_others is None:
            return frozenset()
        return (unwanted & self.files) - self.named_by_others

    def stranded(self, unwanted: frozenset[str]) -> list[str]:
        """Files of a checkpoint that no index names, and that stay: it may be another's."""
        # Without an index, every such file was a part of the checkpoint.
        is_indexed = self.has_index and not self._is_interim
        belongs = _has_usual_name if is_indexed else _is_shard
        return sorted(set(filter(belongs, self.files)) - unwanted - (self.named_by_others or set()))

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
        if name.endswith((SHARD, _ANY_INDEX)) and not os.path.isdir(os.path.join(directory, name))
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


def _is_shard(name: str) -> bool:
    return name.endswith(SHARD) and name[0] != "."


def _has_usual_name(name: str) -> bool:
    """Whether a file is called like those that readers take without an index."""
    return name == SINGLE or _NUMBERED.fullmatch(name) is not None


def write_record(directory: str, shards: Iterable[str], files: Files) -> bytes:
    """The text of the record: shards that come and go in this folder, which no copy of it is."""
    folder = files.path_status(directory).inode
    return json.dumps({"folder": folder, "shards": sorted(shards)}).encode()


def clear_folder(directory: str, files: Files, *, fsync: bool) -> frozenset[str]:
    """Remove what killed saves left in a locked folder; shards that have to stay for now.

    Raises
    ------
    OSError
        The folder cannot be listed, or not be synced, if that is wanted.
    """
    remove_stale(directory, _NUMBERED.fullmatch, files)
    old = look_into(directory, files)
    recorded = _read_record(directory, files) & old.files
    is_sound = old.index is not None or DEFAULT_INDEX not in old.files
    if not recorded or not old.has_index or not is_sound:
        return recorded  # without an index, all that is there may be the checkpoint
    if fsync:
        files.sync_directory(directory)  # the index that does not name them has to last
    orphans = old.removable(recorded - old.named)
    remove_files(directory, sorted(orphans), files)
    return recorded - orphans


def _read_record(directory: str, files: Files) -> frozenset[str]:
    """Shards that a killed save was to put in place, or to remove; none if it says nothing."""
    try:
        with open_regular(os.path.join(directory, RECORD)) as file:
            record = json.loads(file.read())
    except (FormatError, OSError, ValueError, RecursionError):
        return frozenset()
    if not isinstance(record, dict) or record.get("folder") != files.path_status(directory).inode:
        return frozenset()
    shards = record.get("shards")
    names = shards if isinstance(shards, list) else []
    return frozenset(name for name in names if isinstance(name, str) and _is_shard(name))


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
        _make(directory, made, files, fsync=fsync)
        fd = files.open(directory)
        is_locked = False
        try:
            is_locked = _lock(fd, directory, files)
            if not _is_named(fd, directory, files):
                continue  # who made it too has failed, and took it away
            try:
                yield is_locked
            except BaseException:
                _unmake(made)  # while it is locked: whoever comes now makes it anew
                raise
            return
        finally:
            _let_go(fd, directory, files, is_locked=is_locked)
    raise OSError(errno.ESTALE, "others remove this directory again and again", directory)


def _make(directory: str, made: list[str], files: Files, *, fsync: bool) -> None:
    missing = []
    path = directory
    while not os.path.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    made.extend(each for each in missing if each not in made)
    try:
        os.makedirs(directory, exist_ok=True)
        if fsync:
            for each in missing:
                files.sync_directory(os.path.dirname(each))
    except BaseException:
        _unmake(made)
        raise


def _unmake(made: Iterable[str]) -> None:
    for each in made:
        with contextlib.suppress(OSError):  # not there, or not empty: not ours any more
            os.rmdir(each)


def _lock(fd: int, directory: str, files: Files) -> bool:
    """Lock a directory; False where nobody can."""
    try:
        held = files.lock(fd)
    except OSError as error:
        if error.errno not in (*CANNOT_LOCK, errno.EBADF):  # EBADF: NFS, of a directory
            raise
        return False
    if not held:
        what = (
            "another save into this directory is under way, or a child that was forked during "
            "one lives on; wait for it"
        )
        raise OSError(errno.EBUSY, what, directory)
    return True


def _is_named(fd: int, directory: str, files: Files) -> bool:
    try:
        return files.status(fd).is_same_file(files.path_status(directory))
    except FileNotFoundError:
        return False


def _let_go(fd: int, directory: str, files: Files, *, is_locked: bool) -> None:
    try:
        if is_locked:  # to close it is not enough: a forked child may have it open, too
            files.unlock(fd)
    except OSError as error:
        logging.getLogger("headrace").warning("%s stays locked: %s", directory, error)
    finally:
        files.close(fd)


def remove_files(directory: str, names: Iterable[str], files: Files) -> bool:
    """Remove files that nobody needs; False where one stays, which the log tells."""
    all_gone = True
    for name in names:
        path = os.path.join(directory, name)
        try:
            files.remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            all_gone = False
            logging.getLogger("headrace").warning(
                "%s is of no use any more, but stays there: %s", path, error
            )
    return all_gone

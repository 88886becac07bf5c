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
from headrace.formats.checkpoint import DEFAULT_INDEX, Index, read_index
from headrace.formats.raw import open_regular
from headrace.storage.replacement import CANNOT_LOCK, remove_stale

SHARD = ".safetensors"
"""Ending of a shard."""
SINGLE = "model.safetensors"
"""Name of a checkpoint of one file, which some readers take first."""
INTERIM = "headrace.interim"
"""Key in the metadata of an index that stands in while a save is under way."""
RECORD = ".headrace-save.json"
"""File with the names of shards that come and go, for whoever finds a killed save."""

_INDEX = ".safetensors.index.json"
_NUMBERED = re.compile(r"model-(?:[0-9a-f]{8}-)?[0-9]+-of-[0-9]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a directory holds before a save."""

    names: frozenset[str]
    """All that is in it."""
    index: Index | None
    """What its index says; None where there is none, or no sound one."""
    named_by_others: frozenset[str]
    """Files that other indexes in it name."""

    @property
    def shards(self) -> frozenset[str]:
        """Files that its index names."""
        return frozenset(self.index.weight_map.values() if self.index else ())

    @property
    def named(self) -> frozenset[str]:
        """The same, if it is the index of a checkpoint."""
        return frozenset() if self._is_interim else self.shards

    @property
    def is_indexed(self) -> bool:
        """Whether an index has decided what is read, and not which files there are."""
        return has_index(self.names) and not self._is_interim

    @property
    def replaced(self) -> frozenset[str]:
        """Shards that nobody needs once there is another index; no other file goes with it."""
        return frozenset(filter(_is_shard, self.named)) - self.named_by_others

    @property
    def stranded(self) -> list[str]:
        """Files of a checkpoint that no index names, and that stay: it may be another's."""
        # Without an index, every such file was a part of the checkpoint.
        belongs = _has_usual_name if self.is_indexed else _is_shard
        gone = self.replaced | self.named_by_others
        return sorted(frozenset(filter(belongs, self.names)) - gone)

    @property
    def example(self) -> str:
        """File whose permissions new ones take; there may be none of the name."""
        shards = sorted(self.shards & self.names) or sorted(filter(_is_shard, self.names))
        return shards[0] if shards else DEFAULT_INDEX

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
    index = None
    if DEFAULT_INDEX in names:
        # One that nobody can read protects no shards, and is replaced like any other.
        with contextlib.suppress(FormatError, FileNotFoundError):
            index = read_index(os.path.join(directory, DEFAULT_INDEX))
    return Contents(names, index, _named_by_others(directory, names))


def _named_by_others(directory: str, names: frozenset[str]) -> frozenset[str]:
    """Files that indexes other than the default one name; all, where one cannot be read."""
    try:
        indexes = [
            read_index(os.path.join(directory, name))
            for name in names
            if has_index([name]) and name != DEFAULT_INDEX
        ]
    except (FormatError, OSError):
        return names
    return frozenset(shard for index in indexes for shard in index.weight_map.values())


def remove_leftovers(directory: str, files: Files) -> None:
    """Remove what saves left that were killed; nobody else saves here now."""
    remove_stale(directory, _NUMBERED.fullmatch, files)
    old = look_into(directory, files)
    is_sound = old.index is not None or DEFAULT_INDEX not in old.names
    if RECORD not in old.names or not has_index(old.names) or not is_sound:
        return  # without an index, all that is there may be the checkpoint
    orphans = _read_record(os.path.join(directory, RECORD)) - old.named - old.named_by_others
    remove_files(directory, (*sorted(orphans), RECORD), files)


def _read_record(path: str) -> frozenset[str]:
    """Shards that a killed save was to put in place, or to remove; none if it says nothing."""
    try:
        with open_regular(path) as file:
            recorded = json.loads(file.read())
    except (FormatError, OSError, ValueError, RecursionError):
        return frozenset()
    found = recorded if isinstance(recorded, list) else []
    return frozenset(
        name for name in found if isinstance(name, str) and _is_shard(name) and "/" not in name
    )


def _is_shard(name: str) -> bool:
    return name.endswith(SHARD) and name[0] != "."


def _has_usual_name(name: str) -> bool:
    """Whether a file is called like those that readers take without an index."""
    return name == SINGLE or _NUMBERED.fullmatch(name) is not None


def has_index(names: Iterable[str]) -> bool:
    """Whether there is an index among files of these names."""
    return any(name.endswith(_INDEX) and name[0] != "." for name in names)


@contextlib.contextmanager
def lock_folder(directory: str, files: Files) -> Iterator[None]:
    """Keep other saves out of a directory, where it can be locked."""
    fd = files.open(directory)
    try:
        is_locked = _lock(fd, directory, files)
        try:
            yield
        finally:
            if is_locked:  # to close it is not enough: a forked child may have it open, too
                files.unlock(fd)
    finally:
        files.close(fd)


def _lock(fd: int, directory: str, files: Files) -> bool:
    """Lock a directory; False where nobody can."""
    try:
        held = files.lock(fd)
    except OSError as error:
        if error.errno not in (*CANNOT_LOCK, errno.EBADF):  # EBADF: NFS, of a directory
            raise
        return False
    if not held:
        what = "another save into this directory is under way; wait for it"
        raise OSError(errno.EBUSY, what, directory)
    return True


@contextlib.contextmanager
def make_folder(directory: str, files: Files, *, fsync: bool) -> Iterator[None]:
    """Make a directory, or what a link to one names, and its parents where they are missing.

    Where the block fails, those that were made here go again, unless others use them.
    """
    missing = []
    directory = path = os.path.realpath(directory)
    while not os.path.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        os.makedirs(directory, exist_ok=True)
        if fsync:
            for made in missing:
                files.sync_directory(os.path.dirname(made))
        yield
    except BaseException:
        for made in missing:
            with contextlib.suppress(OSError):  # not there, or not empty: not ours any more
                os.rmdir(made)
        raise


def remove_files(directory: str, names: Iterable[str], files: Files) -> None:
    """Remove files that nobody needs; one that cannot be removed only takes up space."""
    for name in names:
        path = os.path.join(directory, name)
        try:
            files.remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            logging.getLogger("headrace").warning(
                "%s is of no use any more, but stays there: %s", path, error
            )

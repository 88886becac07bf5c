"""Saving a checkpoint: shards and their index, so that a directory never holds a mixture."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bindings.posix import Files
from headrace.context import Context, default_context
from headrace.errors import FormatError
from headrace.formats.checkpoint import DEFAULT_INDEX, Index, read_checkpoint, read_index
from headrace.formats.safetensors_layout import Layout
from headrace.formats.shards import shard_index, split_shards
from headrace.framework import Array, Framework, ShownProgress, Taken, shown
from headrace.report import Report, Stopwatch
from headrace.saving import Manner, describe, fill, prepare, take
from headrace.storage.replacement import CANNOT_LOCK, Replacement, remove_stale
from headrace.survey import PathLike, name_path

_SINGLE = "model.safetensors"
_SHARD = ".safetensors"
_INDEX = ".safetensors.index.json"
_INTERIM = "headrace.interim"  # marks an index of files that were there without one
_TOKEN_NBYTES = 4
_TOKEN = "[0-9a-f]{8}-"
_OWN = re.compile(rf"model-{_TOKEN}[0-9]+-of-[0-9]+\.safetensors")
_NUMBERED = re.compile(rf"model-(?:{_TOKEN})?[0-9]+-of-[0-9]+\.safetensors")


@dataclass(frozen=True, slots=True)
class _Old:
    """What a directory holds before a save."""

    names: frozenset[str]
    """All that is in it."""
    index: Index | None
    """What its index says; None where there is none, or no sound one."""

    @property
    def shards(self) -> frozenset[str]:
        """Files that its index names."""
        return frozenset(self.index.weight_map.values() if self.index else ())

    @property
    def replaced(self) -> frozenset[str]:
        """Shards that nobody needs once there is another index; no other file goes with it."""
        if self.index is None or _INTERIM in self.index.metadata:
            return frozenset()
        return frozenset(name for name in self.shards if name.endswith(_SHARD))

    @property
    def stranded(self) -> list[str]:
        """Files of a checkpoint that no index named, and that stay: it may be another's."""
        found = (name for name in self.names if name == _SINGLE or _NUMBERED.fullmatch(name))
        return sorted(set(found) - self.shards)

    @property
    def has_any_index(self) -> bool:
        """Whether an index decides what is read, and not which files there are."""
        return any(name.endswith(_INDEX) and name[0] != "." for name in self.names)


def save(
    framework: Framework[Array],
    tensors: Mapping[str, Array],
    directory: PathLike,
    metadata: Mapping[str, str] | None,
    manner: Manner,
    *,
    max_shard_nbytes: int,
    progress: ShownProgress,
    stream: Any,
    context: Context | None,
) -> Report:
    """Save tensors as a checkpoint; see ``headrace.torch.save`` for the parameters."""
    context = context or default_context()
    return write_checkpoint(
        take(framework, tensors, stream, context),
        directory,
        metadata,
        manner,
        max_shard_nbytes=max_shard_nbytes,
        progress=progress,
        context=context,
    )


def write_checkpoint(
    taken: Sequence[Taken],
    directory: PathLike,
    metadata: Mapping[str, str] | None,
    manner: Manner,
    *,
    max_shard_nbytes: int,
    progress: ShownProgress,
    context: Context,
) -> Report:
    """Write tensors that were taken into a directory, where they appear together or not at all.

    Raises
    ------
    ValueError, TypeError
        There is no tensor; as `split_shards` and `lay_out` (`FormatError`). Nothing was made.
    OSError, RouteUnavailable, DeviceError
        As `Replacement` and `Context.deliver`; another save into the directory is under way
        (EBUSY).
    """
    if not taken:
        raise ValueError("there is no tensor to save; a checkpoint has one at least")
    by_name = {tensor.name: tensor for tensor in taken}
    shards = split_shards(describe(taken), max_shard_nbytes)
    groups = [[by_name[tensor.name] for tensor in shard] for shard in shards]
    watch = Stopwatch()
    contents = fill(groups, metadata, manner, context, watch)
    label, layouts = name_path(directory), [content.layout for content in contents]
    with open_exchange(
        label, layouts, metadata, context.bindings.files, fsync=manner.fsync
    ) as exchange:
        sinks = [shard.sink for shard in exchange.shards]
        delivery = prepare(contents, sinks, label, exchange.commit, watch, durable=manner.fsync)
        with shown(progress, label) as told:
            return context.deliver(delivery, route=manner.route, progress=told)


@contextlib.contextmanager
def open_exchange(
    directory: str,
    layouts: Sequence[Layout],
    metadata: Mapping[str, str] | None,
    files: Files,
    *,
    fsync: bool,
) -> Iterator[Exchange]:
    """Begin the shards of a new checkpoint, for a block that fills and commits them.

    Parameters
    ----------
    directory
        Made if it is missing.
    layouts
        Of each shard: one at least, with a tensor at least.
    metadata
        Text entries of the index.
    files
        The calls to make.
    fsync
        Whether `Exchange.commit` waits until storage has everything.

    Raises
    ------
    OSError
        As `Replacement`; another save into the directory is under way (EBUSY).
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_directory(directory, files, fsync=fsync))
        stack.enter_context(_alone(directory, files))
        yield Exchange(directory, layouts, metadata, files, stack, fsync=fsync)


class Exchange:
    """New shards and their index, beside what is in a directory until they take its place.

    At every moment an index decides what is read, and its shards are whole. Shards that come into
    a directory without an index would count as its checkpoint at once, so it gets one before: of
    the files that are there or, if they are no checkpoint, of the shards to come, without which
    nobody reads it.
    """

    def __init__(
        self,
        directory: str,
        layouts: Sequence[Layout],
        metadata: Mapping[str, str] | None,
        files: Files,
        stack: contextlib.ExitStack,
        *,
        fsync: bool,
    ) -> None:
        self._directory, self._files, self._fsync = directory, files, fsync
        self._old = _look(directory, files)
        _remove_leftovers(directory, self._old, files)
        names = _name_shards(len(layouts), self._old.names)
        text = _index_text(layouts, names, metadata)
        self._interim = None if self._old.has_any_index else _interim_text(directory) or text
        self._index = stack.enter_context(self._begin(DEFAULT_INDEX))
        self._index.sink.write([memoryview(text)], 0)
        self.shards = [stack.enter_context(self._begin(name)) for name in names]
        """Files to be filled before `commit`."""

    def commit(self) -> None:
        """Put the shards into place, then the index, and remove what it replaces."""
        if self._fsync:
            for shard in self.shards:
                shard.sync()
        if self._interim is not None:
            with self._begin(DEFAULT_INDEX) as interim:
                interim.sink.write([memoryview(self._interim)], 0)
                interim.commit(fsync=self._fsync)
        for shard in self.shards:
            shard.rename()
        if self._fsync:
            self.shards[0].sync_directory()
        self._index.commit(fsync=self._fsync)
        _remove(self._directory, self._old.replaced, self._files)
        if stranded := self._old.stranded:
            _logger().warning(
                "%s: %s still there beside the new index, which does not name %s; some readers "
                "take %s first; remove what is of an older checkpoint",
                self._directory,
                _tell(stranded),
                "it" if len(stranded) == 1 else "them",
                _SINGLE,
            )

    def _begin(self, name: str) -> Replacement:
        return Replacement(os.path.join(self._directory, name), self._files)


def _look(directory: str, files: Files) -> _Old:
    names = frozenset(files.list_directory(directory))
    index = None
    if DEFAULT_INDEX in names:
        # One that nobody can read protects no shards, and is replaced like any other.
        with contextlib.suppress(FormatError, FileNotFoundError):
            index = read_index(os.path.join(directory, DEFAULT_INDEX))
    return _Old(names, index)


def _remove_leftovers(directory: str, old: _Old, files: Files) -> None:
    """Remove what saves left that were killed; nobody else saves here now."""
    remove_stale(directory, _NUMBERED.fullmatch, files)
    if old.index is not None:
        orphans = frozenset(filter(_OWN.fullmatch, old.names)) - old.shards
        _remove(directory, orphans, files)


def _name_shards(count: int, names: frozenset[str]) -> list[str]:
    """Names for shards that no file has; plain ones where there is no other checkpoint."""
    is_first = not any(name.endswith((_SHARD, _INDEX)) for name in names)
    while True:
        token = "" if is_first else f"{os.urandom(_TOKEN_NBYTES).hex()}-"
        chosen = [
            f"model-{token}{number:05}-of-{count:05}{_SHARD}" for number in range(1, count + 1)
        ]
        if names.isdisjoint(chosen):
            return chosen


def _index_text(
    layouts: Sequence[Layout], names: Sequence[str], metadata: Mapping[str, str] | None
) -> bytes:
    """The index of shards that are to be."""
    weight_map: dict[str, str] = {}
    nbytes = 0
    for layout, name in zip(layouts, names, strict=True):
        weight_map.update((spec.name, name) for spec in layout.tensors)
        nbytes += sum(spec.file_range.nbytes for spec in layout.tensors)
    return shard_index(weight_map, nbytes, metadata)


def _interim_text(directory: str) -> bytes | None:
    """An index of the checkpoint that files without an index are; None if they are none."""
    try:
        catalogs = read_checkpoint(directory)
    except (FormatError, FileNotFoundError):
        return None
    weight_map = {
        spec.name: os.path.basename(catalog.path)
        for catalog in catalogs
        for spec in catalog.tensors
    }
    nbytes = sum(spec.file_range.nbytes for catalog in catalogs for spec in catalog.tensors)
    note = {_INTERIM: "these files had no index; a save was to replace them"}
    return shard_index(weight_map, nbytes, note) if weight_map else None


@contextlib.contextmanager
def _alone(directory: str, files: Files) -> Iterator[None]:
    """Keep other saves out of a directory, where it can be locked."""
    fd = files.open(directory)
    try:
        try:
            held = files.lock(fd)
        except OSError as error:
            if error.errno not in (*CANNOT_LOCK, errno.EBADF):  # EBADF: NFS, of a directory
                raise
            held = True
        if not held:
            raise OSError(
                errno.EBUSY, "another save into this directory is under way; wait for it", directory
            )
        yield
    finally:
        files.close(fd)


@contextlib.contextmanager
def _directory(directory: str, files: Files, *, fsync: bool) -> Iterator[None]:
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


def _remove(directory: str, names: Collection[str], files: Files) -> None:
    """Remove shards that nobody needs; one that cannot be removed only takes up space."""
    for name in sorted(names):
        path = os.path.join(directory, name)
        try:
            files.remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _logger().warning("%s is of an older checkpoint, but stays there: %s", path, error)


def _tell(names: Sequence[str]) -> str:
    """Some names, and what they do."""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{some} {'is' if len(names) == 1 else 'are'}"


def _logger() -> logging.Logger:
    return logging.getLogger("headrace")

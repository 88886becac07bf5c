"""Saving a checkpoint: shards and their index, so that a directory never holds a mixture."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.bindings.posix import Files
from headrace.checkpoint_folder import (
    INTERIM,
    RECORD,
    SHARD,
    SINGLE,
    has_index,
    lock_folder,
    look_into,
    make_folder,
    remove_files,
    remove_leftovers,
)
from headrace.context import Context, choose_context
from headrace.errors import FormatError
from headrace.formats.checkpoint import DEFAULT_INDEX, read_checkpoint
from headrace.formats.safetensors_layout import Layout
from headrace.formats.shards import shard_index, split_shards
from headrace.framework import Array, Framework, ShownProgress, Taken, shown
from headrace.report import Report, Stopwatch
from headrace.saving import Manner, describe, fill, prepare, take
from headrace.storage.replacement import Replacement
from headrace.survey import PathLike, name_path

_TOKEN_NBYTES = 4


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
    context = choose_context(context)
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
    ValueError
        The metadata has a key that only headrace writes.
    OSError
        As `Replacement`; another save into the directory is under way (EBUSY).
    """
    if INTERIM in (metadata or {}):
        raise ValueError(
            f"metadata has the key {INTERIM!r}, which headrace alone writes; rename it"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(make_folder(directory, files, fsync=fsync))
        stack.enter_context(lock_folder(directory, files))
        yield Exchange(directory, layouts, metadata, files, stack, fsync=fsync)


class Exchange:
    """New shards and their index, beside what is in a directory until they take its place.

    At every moment an index decides what is read, and its shards are whole. Shards that come into
    a directory without an index would count as its checkpoint at once, so it gets one before: of
    the files that are there or, if they are no checkpoint, of the shards to come, without which
    nobody reads it. What comes and goes is recorded before, so that the next save finishes what a
    killed one could not.
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
        remove_leftovers(directory, files)
        self._old = look_into(directory, files)
        self._names = _name_shards(len(layouts), self._old.names)
        self._interim: bytes | None = None
        if not has_index(self._old.names):
            note = {**(metadata or {}), INTERIM: "a save was to put these files here"}
            self._interim = _interim_text(directory) or _index_text(layouts, self._names, note)
        self._index = stack.enter_context(self._begin(DEFAULT_INDEX))
        self._index.sink.write([memoryview(_index_text(layouts, self._names, metadata))], 0)
        self.shards = [stack.enter_context(self._begin(name)) for name in self._names]
        """Files to be filled before `commit`."""

    def commit(self) -> None:
        """Put the shards into place, then the index, and remove what it replaces.

        Where it fails before the index is in place, all is as it was.
        """
        if self._fsync:
            for shard in self.shards:
                shard.sync()
        try:
            self._put_in_place()
        except BaseException:
            self._take_back()
            raise
        remove_files(self._directory, (*sorted(self._old.replaced), RECORD), self._files)
        if stranded := self._old.stranded:
            logging.getLogger("headrace").warning(
                "%s: %s still there beside the new index, which does not name %s; some readers "
                "take %s first; remove what is of an older checkpoint",
                self._directory,
                _tell(stranded),
                "it" if len(stranded) == 1 else "them",
                SINGLE,
            )

    def _put_in_place(self) -> None:
        record = json.dumps(sorted({*self._names, *self._old.replaced}))
        self._put(RECORD, record.encode())
        if self._interim is not None:
            self._put(DEFAULT_INDEX, self._interim)
        for shard in self.shards:
            shard.rename()
        if self._fsync:
            self._files.sync_directory(self._directory)
        self._index.commit(fsync=self._fsync)

    def _take_back(self) -> None:
        """Remove what came into the directory, unless the new index, which names it, is there."""
        if self._index.is_in_place():
            return  # the record lets the next save remove the old shards
        interim = () if self._interim is None else (DEFAULT_INDEX,)
        remove_files(self._directory, (*self._names, *interim, RECORD), self._files)

    def _put(self, name: str, text: bytes) -> None:
        with self._begin(name) as new:
            new.sink.write([memoryview(text)], 0)
            new.commit(fsync=self._fsync)

    def _begin(self, name: str) -> Replacement:
        """Begin a file of the directory itself; what a link there leads to is another's."""
        path, example = (os.path.join(self._directory, n) for n in (name, self._old.example))
        return Replacement(path, self._files, follow=False, like=example)


def _name_shards(count: int, names: frozenset[str]) -> list[str]:
    """Names for shards that no file has; plain ones where there is no other checkpoint."""
    is_first = not has_index(names) and not any(name.endswith(SHARD) for name in names)
    while True:
        token = "" if is_first else f"{os.urandom(_TOKEN_NBYTES).hex()}-"
        chosen = [
            f"model-{token}{number:05}-of-{count:05}{SHARD}" for number in range(1, count + 1)
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
    note = {INTERIM: "these files had no index; a save was to replace them"}
    return shard_index(weight_map, nbytes, note) if weight_map else None


def _tell(names: Sequence[str]) -> str:
    """Some names, and what they do."""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{some} {'is' if len(names) == 1 else 'are'}"

"""Saving a checkpoint: shards and their index, so that a directory never holds a mixture."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.bindings.posix import Files
from headrace.checkpoint_folder import (
    RECORD,
    SHARD,
    SINGLE,
    Contents,
    Record,
    clear_folder,
    hold_folder,
    look_into,
    mark_of,
    marks_of,
    remove_files,
)
from headrace.context import Context, choose_context
from headrace.errors import FormatError
from headrace.formats.checkpoint import DEFAULT_INDEX, INTERIM, read_checkpoint
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
    OSError
        As `Replacement`; another save into the directory is under way (EBUSY).
    """
    real = os.path.realpath(directory)  # once: links and the working directory may change
    with contextlib.ExitStack() as stack:
        is_locked = stack.enter_context(hold_folder(real, files, fsync=fsync))
        # Without a lock, what looks left over may be of a save under way.
        left = clear_folder(real, files, fsync=fsync) if is_locked else None
        yield Exchange(real, layouts, metadata, left, files, stack, fsync=fsync)


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
        left: frozenset[str] | None,
        files: Files,
        stack: contextlib.ExitStack,
        *,
        fsync: bool,
    ) -> None:
        self._directory, self._files, self._fsync = directory, files, fsync
        self._old = look_into(directory, files)
        self._replaced = marks_of(directory, self._old.replaceable, files)
        self._left = marks_of(directory, left or (), files)
        names = _name_shards(len(layouts), self._old)
        # Only an index that stands in has that key.
        texts = {key: text for key, text in (metadata or {}).items() if key != INTERIM}

        def begin(name: str, text: bytes = b"") -> Replacement:
            """Begin a file of the directory itself; what a link there leads to is another's."""
            path, example = (os.path.join(directory, n) for n in (name, self._old.example))
            new = stack.enter_context(Replacement(path, files, follow=False, like=example))
            new.sink.write([memoryview(text)], 0)
            return new

        self._index = begin(DEFAULT_INDEX, _index_text(layouts, names, texts))
        self.shards = [begin(name) for name in names]
        """Files to be filled before `commit`."""
        # Others would take ours for a killed save's where nobody can lock.
        self._record = [] if left is None else [begin(RECORD)]
        self._interim = []
        if not self._old.has_index:
            note = {**texts, INTERIM: "a save was to put these files here"}
            interim = _interim_text(directory) or _index_text(layouts, names, note)
            self._interim = [begin(DEFAULT_INDEX, interim)]

    def commit(self) -> None:
        """Put the shards into place, then the index, and remove what it replaces.

        Where it fails before the index is in place, all is as it was.
        """
        if self._fsync:
            for shard in self.shards:
                shard.sync()
        for record in self._record:
            record.sink.write([memoryview(self._describe())], 0)
        if self._fsync:
            for note in (*self._record, *self._interim):
                note.sync()
        try:
            self._put_in_place()
        except BaseException as error:
            self._undo(error)
            raise
        self._remove_old()

    def _describe(self) -> bytes:
        """What the record says."""
        new = {
            os.path.basename(shard.path): mark_of(self._files.status(shard.sink.fd))
            for shard in self.shards
        }
        folder = self._files.path_status(self._directory).inode
        index = os.path.basename(self._index.temporary or "")
        return Record(folder, index, new, self._replaced, self._left).text()

    def _put_in_place(self) -> None:
        for note in (*self._record, *self._interim):
            note.rename()
        self._sync()
        for shard in self.shards:
            shard.rename()
        self._sync()
        self._index.commit(fsync=self._fsync)

    def _undo(self, error: BaseException) -> None:
        """Take back what came into the directory, unless the new index, which names it, is there.

        What cannot be, the next save takes back: it finds the record, and the index beside it.
        """
        is_over = False
        try:
            is_over = self._index.is_in_place() or self._take_back()
        except OSError as second:
            error.add_note(f"and then it could not all be undone: {second}")
        finally:
            if not is_over:
                self._index.leave()

    def _take_back(self) -> bool:
        if self._remove(self.shards):
            return False  # the interim index hides the shards as long as one is there
        self._sync()
        self._remove(self._interim)
        if not self._left:
            self._remove(self._record)
        return True

    def _remove_old(self) -> None:
        """Remove what the index replaces; what has to stay for now, stays in the record."""
        logger = logging.getLogger("headrace")
        known = {**self._replaced, **self._left}
        try:
            now = look_into(self._directory, self._files)
            there = marks_of(self._directory, known, self._files)
        except OSError as error:
            logger.warning("%s: old shards stay: %s", self._directory, error)
            return
        unwanted = frozenset(n for n, mark in there.items() if mark == known[n]) - now.shards
        if now.named_by_others is None and unwanted:
            what = "%s: old shards stay, since an index there that may name them cannot be read"
            logger.warning(what, self._directory)
            return
        if not remove_files(self._directory, now.removable(unwanted), self._files):
            self._remove(self._record)
        if stranded := sorted(now.stranded(was_indexed=self._old.is_indexed) - unwanted):
            logger.warning(
                "%s: %s still there beside the new index, which does not name %s; some readers "
                "take %s first; remove what is of an older checkpoint",
                self._directory,
                _tell(stranded),
                "it" if len(stranded) == 1 else "them",
                SINGLE,
            )

    def _remove(self, new: Sequence[Replacement]) -> frozenset[str]:
        """Remove files of this save, where they are in place; those that stay."""
        names = [os.path.basename(each.path) for each in new if each.is_in_place()]
        return remove_files(self._directory, names, self._files)

    def _sync(self) -> None:
        if self._fsync:
            self._files.sync_directory(self._directory)


def _name_shards(count: int, old: Contents) -> list[str]:
    """Names for shards that no file has; plain ones where there is no other checkpoint."""
    token = _make_token() if old.files else ""
    while True:
        chosen = [
            f"model-{token}{number:05}-of-{count:05}{SHARD}" for number in range(1, count + 1)
        ]
        if old.names.isdisjoint(chosen):
            return chosen
        token = _make_token()


def _make_token() -> str:
    return f"{os.urandom(_TOKEN_NBYTES).hex()}-"


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
    except OSError as error:
        if error.errno != errno.ELOOP:  # nobody can read a link that leads to itself
            raise
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

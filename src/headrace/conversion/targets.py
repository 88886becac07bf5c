"""Targets of a conversion: what a path means, what must not become one, and how it is opened."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.bindings.posix import Files
from headrace.checkpoint_folder import SHARD, SINGLE, is_index
from headrace.checkpoint_saving import open_exchange
from headrace.errors import FormatError
from headrace.formats.checkpoint import find_files
from headrace.formats.safetensors_layout import Layout
from headrace.storage.replacement import Replacement
from headrace.storage.sink import Sink

_OTHER_FORMATS = (
    *(".bin", ".ckpt", ".gguf", ".h5", ".json", ".npy", ".npz", ".onnx", ".pkl", ".pt", ".pth"),
    ".safetensor",
)
"""Endings that nobody means for a directory."""


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """New files, to be filled and then put in place together."""

    paths: tuple[str, ...]
    """Where they will be."""
    sinks: tuple[Sink, ...]
    """What to write to."""
    commit: Callable[[], None]
    """Puts them in place."""


def is_file_target(target: str) -> bool:
    """Whether a target is one file, rather than a directory."""
    return target.lower().endswith(SHARD)


def check_target(target: str, source: str, paths: Sequence[str]) -> None:
    """Make sure that a target can be one, and that replacing it destroys no part of the source.

    Parameters
    ----------
    target
        A file or a directory.
    source
        What is to be converted.
    paths
        Its files.

    Raises
    ------
    ValueError
        It has the ending of another format; it is a part of the source; the source is a part of
        it; or a new file there would become a part of the source.
    NotADirectoryError
        It is a file, but stands for a directory.
    IsADirectoryError
        It is a directory, but stands for a file.
    """
    if is_file_target(target):
        _check_file(target, source, paths)
    else:
        _check_directory(target, source, paths)


@contextlib.contextmanager
def open_target(
    target: str,
    layouts: Sequence[Layout],
    metadata: Mapping[str, str] | None,
    files: Files,
    *,
    fsync: bool,
) -> Iterator[OpenTarget]:
    """Make the new files beside what is there, and set their space aside; see `open_exchange`.

    Raises
    ------
    OSError
        As `Replacement` and `open_exchange`; there is no room (ENOSPC).
    """
    with contextlib.ExitStack() as stack:
        if is_file_target(target):
            single = stack.enter_context(Replacement(target, files))
            new, commit = [single], lambda: single.commit(fsync=fsync)
        else:
            exchange = stack.enter_context(
                open_exchange(target, layouts, metadata, files, fsync=fsync)
            )
            new, commit = exchange.shards, exchange.commit
        for each, layout in zip(new, layouts, strict=True):
            each.sink.allocate(0, layout.nbytes)
        yield OpenTarget(tuple(each.path for each in new), tuple(each.sink for each in new), commit)


def find_leftovers(target: str, paths: Sequence[str]) -> tuple[str, ...]:
    """Names of files in a directory that was written, which its index does not mention.

    Parameters
    ----------
    target
        The target.
    paths
        Files of the source, of which some may lie there.
    """
    if is_file_target(target):
        return ()
    inside = {os.path.basename(path) for path in paths if _lies_in(path, target)}
    names = {*(name for name in inside if name.endswith(SHARD)), SINGLE}
    return tuple(sorted(n for n in names if os.path.exists(os.path.join(target, n))))


def _check_file(target: str, source: str, paths: Sequence[str]) -> None:
    if os.path.isdir(target):
        what = f"it is a directory, and a target that ends in {SHARD} is a file; name another"
        raise IsADirectoryError(errno.EISDIR, what, target)
    if any(os.path.realpath(path) == os.path.realpath(target) for path in paths):
        if len(paths) > 1:
            raise ValueError(
                f"{target} is one of the {len(paths)} files of {source}, which would no longer "
                "belong together; choose another target"
            )
    elif os.path.isdir(source) and _lies_in(target, source) and not _has_index(source):
        raise ValueError(
            f"{source} has no index, so that {target} would become a part of the checkpoint in it; "
            "choose a target elsewhere"
        )


def _check_directory(target: str, source: str, paths: Sequence[str]) -> None:
    ending = os.path.splitext(target)[1].lower()
    if os.path.isdir(target):
        _check_whole(target, source, paths)
    elif os.path.exists(target):
        what = f"it is a file, and a target that does not end in {SHARD} is a directory"
        raise NotADirectoryError(errno.ENOTDIR, f"{what}; name another", target)
    elif ending in _OTHER_FORMATS:
        raise ValueError(
            f"{target} ends in {ending}, but only safetensors can be written: name a file that "
            f"ends in {SHARD}, or a directory"
        )


def _check_whole(target: str, source: str, paths: Sequence[str]) -> None:
    """Refuse to replace a checkpoint by a part of it."""
    named = {*paths, *map(os.path.realpath, paths)}
    if not any(path.endswith(SHARD) and _lies_in(path, target) for path in named):
        return
    try:
        whole = find_files(target)
    except (FormatError, FileNotFoundError):
        whole = ()
    if {os.path.realpath(path) for path in whole} != {os.path.realpath(path) for path in paths}:
        raise ValueError(
            f"{source} is a part of what {target} holds, and the conversion would replace all of "
            "it; convert the whole directory, or choose another target"
        )


def _lies_in(path: str, directory: str) -> bool:
    """Whether a path names something right inside a directory."""
    parent = os.path.dirname(path) or os.curdir
    return os.path.isdir(parent) and os.path.samefile(parent, directory)


def _has_index(directory: str) -> bool:
    return any(map(is_index, os.listdir(directory)))

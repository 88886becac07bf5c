"""Targets: the files that writes of one context go to, each of them alone or several together."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace.bindings.posix import Files
from headrace.storage.sink import Sink

Extend = Callable[[int], None]
"""Makes a file at least so many bytes long."""


@dataclass(slots=True, eq=False)
class _Write:
    alone: bool
    """Whether no other write to the same file was under way at the same time, so far."""


@dataclass(slots=True, eq=False)
class _Target:
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the file is made, grown, cut or removed."""
    writes: list[_Write] = field(default_factory=list)
    """Those that are under way."""


class Targets:
    """Opens files for writes, and undoes those that fail, without harm to others.

    Writes that go to parts of one file at the same time must not cut off what the others wrote:
    each extends the file before its first byte, and none that had company cuts it afterwards.
    """

    def __init__(self) -> None:
        self._targets: dict[str, _Target] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def open(self, path: str, files: Files) -> Iterator[tuple[Sink, Extend]]:
        """A file for the length of a block, and what extends it before it is written to.

        Where the block fails, the file gets its old length back, or goes if it was made here,
        unless other writes to it were under way meanwhile. Bytes inside of the old length may then
        be old or new.

        Raises
        ------
        OSError
            As `Sink`.
        """
        with self._joined(os.path.realpath(path)) as (target, write):
            with target.lock:
                sink = Sink(path, files)

            def extend(stop: int) -> None:
                with target.lock:
                    if sink.files.status(sink.fd).nbytes < stop:
                        sink.resize(stop)

            try:
                yield sink, extend
            except BaseException as error:
                with target.lock:
                    _undo(sink, write.alone, error)
                raise
            finally:
                sink.close()

    @contextlib.contextmanager
    def _joined(self, name: str) -> Iterator[tuple[_Target, _Write]]:
        """One more write to a file, known to the others for the length of a block."""
        with self._lock:
            target = self._targets.setdefault(name, _Target())
            write = _Write(alone=not target.writes)
            for other in target.writes:
                other.alone = False
            target.writes.append(write)
        try:
            yield target, write
        finally:
            with self._lock:
                target.writes.remove(write)
                if not target.writes:
                    del self._targets[name]


def _undo(sink: Sink, alone: bool, error: BaseException) -> None:
    """Give a file its old length back, or remove it if there was none."""
    if not alone:
        error.add_note(f"{sink.path}: its length stays, since others wrote to it at the same time")
        return
    try:
        if sink.created:
            _remove(sink)
        elif sink.files.status(sink.fd).nbytes > sink.nbytes:
            sink.resize(sink.nbytes)
    except OSError as second:
        error.add_note(f"{sink.path}: its old length could not be restored: {second}")


def _remove(sink: Sink) -> None:
    named, opened = sink.files.path_status(sink.path), sink.identity
    if (named.device, named.inode) == (opened.device, opened.inode):
        sink.files.remove(os.path.realpath(sink.path))

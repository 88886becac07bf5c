"""Origins: what a conversion reads from, a part of the tensors at a time."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.context import Context
from headrace.errors import SourceChanged
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.formats.checksums import store_checksums, stored_checksums
from headrace.formats.dtypes import numpy_dtype
from headrace.formats.npz import Archive
from headrace.formats.safetensors_layout import Described
from headrace.framework import numpy_tensor_dtype
from headrace.memory.alignment import align_up
from headrace.memory.buffer import Buffer
from headrace.numpy import aligned_empty
from headrace.numpy.library import NumPy
from headrace.options import PAGE_NBYTES
from headrace.progress import OnProgress
from headrace.report import Report
from headrace.storage.source import Source
from headrace.survey import SourceLike, Want, open_sources, want_checkpoint
from headrace.types import HOST


@dataclass(frozen=True, slots=True)
class Texts:
    """Free text entries of a source."""

    metadata: Mapping[str, str]
    """What all of its files say alike, without checksums."""
    dropped: tuple[str, ...] = ()
    """Entries on which its files do not agree."""
    had_checksums: bool = False
    """Whether a file stores checksums."""


class Origin(Protocol):
    """Where tensors come from."""

    @property
    def label(self) -> str:
        """What people call it."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Its files."""

    @property
    def tensors(self) -> tuple[Described, ...]:
        """What it holds."""

    @property
    def texts(self) -> Texts:
        """Its free text entries."""

    def read(
        self, names: Sequence[str], on_progress: OnProgress | None
    ) -> tuple[Sequence[Buffer], Report | None]:
        """Bytes of some tensors in host memory, in the order of the names, until the next call.

        The report is None where no route was taken.
        """


class SafetensorsOrigin:
    """`Origin` of safetensors files; their bytes are taken as they are, whatever the dtype.

    Parameters
    ----------
    source
        A file, a directory or an index.
    context
        Reads.
    route
        A route, or "auto".
    verify
        Whether the bytes must agree with the checksums that the files store.

    Raises
    ------
    FormatError, FileNotFoundError, PermissionError, OSError
        As for a load.
    """

    def __init__(self, source: SourceLike, context: Context, *, route: str, verify: bool) -> None:
        want = want_checkpoint(source, verify=verify)
        with open_sources(want.paths, context.bindings.files) as opened:
            self._catalogs = want.describe(opened)
            if verify:  # of all files, also of one in which damage left no tensor to read
                for catalog in self._catalogs:
                    stored_checksums(catalog)
            self._identities = {each.path: each.identity for each in opened}
        self._holder = {
            spec.name: catalog for catalog in self._catalogs for spec in catalog.tensors
        }
        self._want, self._context, self._route = want, context, route
        self._memory = aligned_empty(0)
        self.label, self.paths = want.label, want.paths
        self.tensors = tuple(
            Described(spec.name, spec.dtype, spec.shape)
            for catalog in self._catalogs
            for spec in catalog.tensors
        )
        self.texts = _agree([catalog.metadata for catalog in self._catalogs])

    def read(
        self, names: Sequence[str], on_progress: OnProgress | None
    ) -> tuple[Sequence[Buffer], Report]:
        """See `Origin.read`.

        Raises
        ------
        SourceChanged
            A file is not what it was when the origin was made.
        FormatError, RouteUnavailable, ShortRead, OSError
            As for a load.
        """
        catalogs = {self._holder[name].path: self._holder[name] for name in names}
        buffers: dict[str, Buffer] = {}

        def describe(opened: Sequence[Source]) -> tuple[Catalog, ...]:
            for source in opened:
                self._check_same(source)
            return tuple(catalogs.values())

        def allocate(specs: tuple[TensorSpec, ...]) -> list[Buffer]:
            buffers.update(self._allocate(specs))
            return list(buffers.values())

        want: Want = replace(
            self._want, paths=tuple(catalogs), describe=describe, names=frozenset(names)
        )
        report = self._context.transfer(
            want, HOST, allocate, route=self._route, progress=on_progress
        )
        return [buffers[name] for name in names], report

    def _check_same(self, source: Source) -> None:
        if source.identity != self._identities[source.path]:
            what = "it changed while it was converted; convert it again once it is at rest"
            raise SourceChanged(errno.ESTALE, what, source.path)

    def _allocate(self, specs: Sequence[TensorSpec]) -> dict[str, Buffer]:
        """Places in memory that is used again and again, each at a page, for direct reads."""
        starts = [0]
        for spec in specs:
            starts.append(align_up(starts[-1] + spec.file_range.nbytes, PAGE_NBYTES))
        if self._memory.nbytes < starts[-1]:
            self._memory = aligned_empty(0)  # never both
            self._memory = aligned_empty(starts[-1])
        first = int(self._memory.__array_interface__["data"][0])
        return {
            spec.name: Buffer(first + start, spec.file_range.nbytes, HOST, self._memory)
            for spec, start in zip(specs, starts, strict=False)
        }


class ArchiveOrigin:
    """`Origin` of a .npz file, which NumPy reads; every member's CRC-32 is compared.

    Arrays of strides and of big-endian numbers become what safetensors has.

    Parameters
    ----------
    archive
        The open file.

    Raises
    ------
    FormatError
        An array has a type that safetensors lacks.
    """

    texts = Texts({})

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self.label = archive.path
        self.paths = (archive.path,)
        self.tensors = tuple(
            Described(spec.name, numpy_tensor_dtype(spec.name, numpy_dtype(spec.dtype)), spec.shape)
            for spec in archive.tensors
        )

    def read(
        self, names: Sequence[str], on_progress: OnProgress | None
    ) -> tuple[Sequence[Buffer], None]:
        """See `Origin.read`; errors as `Archive.read`."""
        taken = NumPy().take(self._archive.read(names), lambda _: None)
        return [tensor.buffer for tensor in taken], None


def _agree(entries: Sequence[Mapping[str, str]]) -> Texts:
    """What files say alike."""
    plain = [store_checksums(each, (), {}) for each in entries]
    alike = {
        key: text
        for key, text in (plain[0] if plain else {}).items()
        if all(each.get(key) == text for each in plain)
    }
    dropped = sorted({key for each in plain for key in each} - set(alike))
    had_checksums = any(len(each) < len(whole) for each, whole in zip(plain, entries, strict=True))
    return Texts(alike, tuple(dropped), had_checksums)

"""Survey: open the files, read their catalogs, and gather the facts that a plan rests on."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.bindings.posix import Files, FileStatus
from headrace.bindings.sysfs import System, read_mounts
from headrace.errors import SourceChanged
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.formats.checkpoint import find_files, read_checkpoint
from headrace.formats.npy import read_catalog as read_npy
from headrace.formats.raw import describe_raw
from headrace.planning.coalesce import place, stretches_of
from headrace.planning.planner import FileFacts
from headrace.planning.route import Facts
from headrace.probing.fact import Fact
from headrace.probing.machine import MachineFacts
from headrace.probing.volume import VolumeFacts, probe_volume, unseen_volume
from headrace.storage.residency import REGISTERED, Residency, measure_residency
from headrace.storage.source import Source
from headrace.types import ByteRange

PathLike = str | os.PathLike[str]
"""One path."""

SourceLike = PathLike | Sequence[PathLike]
"""A file, a directory, an index, or a list of files."""

Describe = Callable[[Sequence[Source]], tuple[Catalog, ...]]
"""Reads the catalogs of files that are already open, in their order."""


@dataclass(frozen=True, slots=True)
class Want:
    """What to read."""

    label: str
    """What people call it, for reports."""
    paths: tuple[str, ...]
    """Files to open."""
    describe: Describe
    """Reads their catalogs, once they are open."""
    names: frozenset[str] | None = None
    """Only these tensors; None for all."""
    verify: bool = False
    """Compare the bytes that arrive with the checksums that the files store."""


@dataclass(frozen=True, slots=True)
class GpuProbes:
    """What is known of the GPU that the bytes go to."""

    device: Fact
    """Whether it can be used."""
    mapping: Fact
    """Whether it can read registered pages of a file."""
    probe_gds: Callable[[str], Fact]
    """Tells of a file whether cuFile can serve it."""
    is_registered: Callable[[FileStatus, Sequence[ByteRange]], bool] = lambda *_: False
    """Whether ranges of a file are registered with it already."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything known before a byte of payload is read."""

    specs: tuple[TensorSpec, ...]
    """Wanted tensors, file after file; a piece's buffer is an index into them."""
    spec_sources: tuple[int, ...]
    """Which source each tensor is in."""
    files: tuple[FileFacts, ...]
    """What is wanted of each source, and what holds for it."""
    volumes: tuple[VolumeFacts, ...]
    """The volume under each source."""
    machine: MachineFacts
    """Memory and CPUs."""

    @property
    def nbytes(self) -> int:
        """Wanted bytes."""
        return sum(spec.file_range.nbytes for spec in self.specs)

    @property
    def is_registered(self) -> bool:
        """Whether there is something wanted, and all of it stays registered with the GPU."""
        return bool(self.specs) and all(file.residency.method == REGISTERED for file in self.files)

    def facts(self) -> tuple[Fact, ...]:
        """Everything as facts, for people; each once."""
        facts: dict[Fact, None] = dict.fromkeys(self.machine.facts)
        for file in self.files:
            facts.update(dict.fromkeys((file.facts.gpu, file.facts.mapping, file.facts.gds)))
            facts[file.facts.volume.direct] = None
            facts[_residency_fact(file.residency)] = None
        return tuple(facts)


def want_checkpoint(
    source: SourceLike, names: Sequence[str] | None = None, *, verify: bool = False
) -> Want:
    """Want the tensors of safetensors files: a file, a directory, an index or a list.

    Parameters
    ----------
    source
        The files.
    names
        Only these tensors; None for all.
    verify
        Compare those whose file stores a checksum with it, once their bytes have arrived.

    Raises
    ------
    FileNotFoundError, FormatError, TypeError, ValueError
        As `headrace.formats.checkpoint.find_files`; TypeError also where names are no names.
    """
    chosen = _choose_names(names)
    paths = find_files(source)
    label = name_source(source)

    def describe(opened: Sequence[Source]) -> tuple[Catalog, ...]:
        catalogs = read_checkpoint(source, {each.path: each.fd for each in opened})
        if tuple(catalog.path for catalog in catalogs) != paths:
            what = "files came or went while it was read; read it again once it is at rest"
            raise SourceChanged(errno.ESTALE, what, label)
        return catalogs

    return Want(label, paths, describe, chosen, verify)


def want_any(source: SourceLike, *, raw: bool = False, names: Sequence[str] | None = None) -> Want:
    """Want what ``read`` or ``load`` would: a ``.npy`` file, or a checkpoint.

    Parameters
    ----------
    source
        A file, a directory, an index or a list of files.
    raw
        Take a file as bytes, whatever it is.
    names
        Only these tensors of a checkpoint; None for all.

    Raises
    ------
    ValueError
        Names are given for what has none.
    """
    is_npy = isinstance(source, (str, os.PathLike)) and name_path(source).lower().endswith(".npy")
    if not raw and not is_npy:
        return want_checkpoint(source, names)
    path = name_path(source)  # type: ignore[arg-type]  # of several, it refuses
    if names is not None:
        raise ValueError(f"{path}: names choose tensors of safetensors sources only")
    if raw:
        return Want(path, (path,), lambda opened: (describe_raw(path, opened[0].nbytes),))
    return Want(path, (path,), lambda opened: (read_npy(path, opened[0].fd),))


def absolute(path: PathLike) -> str:
    """The same file, also once the process is in another directory."""
    return os.path.join(os.getcwd(), name_path(path))


def name_path(path: PathLike) -> str:
    """A path as text.

    Raises
    ------
    TypeError
        It is none.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(name, str):
        raise TypeError(f"path is {path!r}; pass a str or a pathlib.Path (os.fsdecode makes one)")
    return name


def _choose_names(names: Sequence[str] | None) -> frozenset[str] | None:
    """The names of wanted tensors.

    Raises
    ------
    TypeError
        It is a string, or holds something else than strings.
    """
    if names is None:
        return None
    chosen = () if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in chosen):
        raise TypeError(f"names is {names!r}; pass a list of tensor names")
    return frozenset(chosen)


def name_source(source: SourceLike) -> str:
    """What a report calls a source."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    return ", ".join(os.fspath(path) for path in source)


@contextlib.contextmanager
def open_sources(paths: Sequence[str], files: Files) -> Iterator[tuple[Source, ...]]:
    """Open files, and close them on the way out."""
    with contextlib.ExitStack() as stack:
        sources = []
        for path in paths:
            source = Source(path, files)
            stack.callback(source.close)
            sources.append(source)
        yield tuple(sources)


def select(
    catalogs: Sequence[Catalog], names: frozenset[str] | None
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Wanted tensors of each catalog.

    Raises
    ------
    KeyError
        A name is in none of the files.
    """
    if names is None:
        return tuple(catalog.tensors for catalog in catalogs)
    known = {spec.name for catalog in catalogs for spec in catalog.tensors}
    if missing := sorted(names - known):
        files = ", ".join(catalog.path for catalog in catalogs)
        some = ", ".join(sorted(known)[:5]) + (", ..." if len(known) > 5 else "")
        raise KeyError(f"no tensor named {', '.join(missing)} in {files}; there are {some}")
    return tuple(
        tuple(spec for spec in catalog.tensors if spec.name in names) for catalog in catalogs
    )


def survey(
    sources: Sequence[Source],
    wanted: Sequence[tuple[TensorSpec, ...]],
    system: System,
    gpu: GpuProbes,
    granule_nbytes: int,
) -> Survey:
    """Gather the facts for reading some tensors.

    Parameters
    ----------
    sources
        Open files.
    wanted
        Tensors of each.
    system
        Where the facts of the machine are read.
    gpu
        What is known of the GPU.
    granule_nbytes
        Residency is told apart at multiples of this.
    """
    machine, mounts = MachineFacts(system), functools.cache(lambda: read_mounts(system))
    files: list[FileFacts] = []
    specs: list[TensorSpec] = []
    owners: list[int] = []
    for index, (source, tensors) in enumerate(zip(sources, wanted, strict=True)):
        pieces = place(tensors, len(specs))
        stretches = stretches_of(pieces)
        # All that is left to do for registered pages is to enqueue copies: looking takes longer.
        if gpu.is_registered(source.identity, stretches):
            volume = unseen_volume("registered pages stay in memory")
            residency = Residency.of_all(stretches, REGISTERED, "registered pages stay in memory")
        else:
            volume = probe_volume(source, mounts())
            kind = volume.file_system
            residency = measure_residency(source, stretches, granule_nbytes, kind)
        facts = Facts(machine, volume, gpu.device, gpu.mapping, gpu.probe_gds(source.path))
        files.append(FileFacts(pieces, residency, facts))
        specs.extend(tensors)
        owners.extend([index] * len(tensors))
    volumes = tuple(file.facts.volume for file in files)
    return Survey(tuple(specs), tuple(owners), tuple(files), volumes, machine)


def _residency_fact(residency: Residency) -> Fact:
    total = sum(stretch.file_range.nbytes for stretch in residency.stretches)
    known = residency.method != "unknown"
    found = f"{residency.resident_nbytes} of {total} bytes in the page cache"
    return Fact(
        "resident",
        residency.resident_nbytes >= total if known else None,
        found if known else "unknown",
        residency.why,
        "" if known else "own the file, or be allowed to write to it",
    )

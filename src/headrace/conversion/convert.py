"""Conversion: a checkpoint becomes aligned safetensors, a part at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from headrace.context import Context
from headrace.conversion.origins import ArchiveOrigin, Origin, SafetensorsOrigin, Texts
from headrace.conversion.outcome import Conversion, join_reports
from headrace.conversion.targets import (
    OpenTarget,
    check_target,
    find_leftovers,
    is_file_target,
    open_target,
)
from headrace.formats.catalog import TensorSpec
from headrace.formats.checksums import store_checksums
from headrace.formats.npz import Archive
from headrace.formats.safetensors_layout import Described, Layout, lay_out
from headrace.formats.shards import split_shards
from headrace.planning.coalesce import place
from headrace.planning.route import parse_route
from headrace.progress import Odometer, OnProgress, Progress
from headrace.report import Report
from headrace.saving import Manner
from headrace.survey import PathLike
from headrace.write_transfers import Delivery

DEFAULT_SHARD_NBYTES = 5_000_000_000
"""Most bytes of tensors in a shard unless another number is given."""
PART_NBYTES = 1 << 30
"""Most bytes of tensors that are in memory at once; a larger tensor is there alone."""
_NO_DIGEST = "0" * 16
_READ_BY_NUMPY = "NumPy read the archive, and compared each array with its CRC-32"
_NOT_SYNCED = "not synced to storage, so that a power cut may take the new files"


def convert(
    source: PathLike,
    target: PathLike,
    *,
    manner: Manner,
    max_shard_nbytes: int = DEFAULT_SHARD_NBYTES,
    part_nbytes: int = PART_NBYTES,
    verify: bool = False,
    progress: OnProgress | None = None,
    context: Context,
) -> Conversion:
    """Copy the tensors of a checkpoint, bit for bit, into one safetensors file or into shards.

    Parameters
    ----------
    source
        A safetensors file, a directory or an index of them, or a ``.npz`` file.
    target
        A file, if it ends in ``.safetensors``; else a directory for shards and their index. What
        is there is replaced, whole or not at all, also where it is the source.
    manner
        How to write; its route is that of the reads too.
    max_shard_nbytes
        Most bytes of tensors in a shard of a directory.
    part_nbytes
        Most bytes of tensors that are in host memory at once; a larger tensor is there alone.
    verify
        Whether the source must agree with the checksums that it stores; also where new ones are
        to be stored, lest damage be blessed.
    progress
        Told of the tensors' bytes: half of a byte once it is read, and the rest once it is written.
    context
        Reads and writes.

    Raises
    ------
    FormatError
        The source is malformed, does not agree with its checksums, or has a dtype that safetensors
        lacks.
    ValueError
        There is no tensor for a directory; as `check_target`.
    OSError, SourceChanged, RouteUnavailable
        As loads and saves; what was at the target is as it was.
    """
    began = time.perf_counter()
    label, goal = os.fspath(source), os.fspath(target)
    parse_route(manner.route)  # before a file is made
    with _open_origin(label, manner, context, verify=verify or manner.checksum) as origin:
        check_target(goal, label, origin.paths)
        work = _Work(origin, _group(origin, goal, max_shard_nbytes), manner, context)
        layouts = work.lay_out()
        files = context.bindings.files
        texts = origin.texts.metadata or None
        with open_target(goal, layouts, texts, files, fsync=manner.fsync) as opened:
            reads, writes = work.run(goal, layouts, opened, part_nbytes, progress)
    return Conversion(
        source=label,
        target=goal,
        files=opened.paths,
        tensors=len(origin.tensors),
        nbytes=sum(report.nbytes for report in writes),
        seconds=time.perf_counter() - began,
        aligned=manner.align,
        checksums=manner.checksum,
        read=join_reports(reads) if reads else None,
        write=join_reports(writes),
        notes=(
            *_note_texts(origin.texts, manner),
            *_note_files(find_leftovers(goal, origin.paths)),
            *(() if reads else (_READ_BY_NUMPY,)),
            *(() if manner.fsync else (_NOT_SYNCED,)),
        ),
    )


@contextlib.contextmanager
def _open_origin(
    source: str, manner: Manner, context: Context, *, verify: bool
) -> Iterator[Origin]:
    if source.lower().endswith(".npz") and not os.path.isdir(source):
        with Archive(source) as archive:
            yield ArchiveOrigin(archive)
        return
    yield SafetensorsOrigin(source, context, route=manner.route, verify=verify)


def _group(origin: Origin, target: str, max_shard_nbytes: int) -> tuple[tuple[Described, ...], ...]:
    """Tensors of each file to be written."""
    if is_file_target(target):
        return (origin.tensors,)
    if not origin.tensors:
        raise ValueError(
            f"{origin.label} holds no tensor, and a checkpoint in a directory has one at least; "
            "name a target that ends in .safetensors"
        )
    return split_shards(origin.tensors, max_shard_nbytes)


def _note_texts(texts: Texts, manner: Manner) -> Iterator[str]:
    """Say what of the metadata was left out."""
    if texts.dropped:
        yield (
            "the files of the source do not agree on these entries of metadata, so they were left "
            f"out: {', '.join(texts.dropped)}"
        )
    if texts.had_checksums and not manner.checksum:
        yield "the checksums that the source stores were left out; --checksum stores new ones"


def _note_files(leftovers: Sequence[str]) -> Iterator[str]:
    """Say what else is in the target."""
    if leftovers:
        yield (
            f"beside the new index the target still holds {', '.join(leftovers)}, which readers "
            "that do not ask the index may take; remove what nobody needs"
        )


class _Work:
    """The copying itself: a part of the tensors after the other."""

    def __init__(
        self,
        origin: Origin,
        groups: Sequence[Sequence[Described]],
        manner: Manner,
        context: Context,
    ) -> None:
        self._origin, self._groups = origin, groups
        self._manner, self._context = manner, context
        # A header is as long without the digests, which are not known until all is read.
        self._digests = {each.name: _NO_DIGEST for group in groups for each in group}

    def lay_out(self) -> list[Layout]:
        """Lay out each file, with the digests that are known by now."""
        return [
            lay_out(group, self._texts(group), align=self._manner.align) for group in self._groups
        ]

    def run(
        self,
        target: str,
        layouts: Sequence[Layout],
        opened: OpenTarget,
        part_nbytes: int,
        progress: OnProgress | None,
    ) -> tuple[list[Report], list[Report]]:
        """Fill the files and put them in place; the reports of all reads, and of all writes."""
        parts = [
            (sink, part)
            for sink, layout in zip(opened.sinks, layouts, strict=True)
            for part in split_parts(layout.tensors, part_nbytes)
        ]

        def finish() -> None:
            for sink, layout in zip(opened.sinks, self.lay_out(), strict=True):
                sink.write([memoryview(layout.header)], 0)
            opened.commit()

        track = _Track(progress, sum(_nbytes_of(part) for _, part in parts))
        reads, writes = [], []
        for number, (sink, part) in enumerate(parts, 1):
            names = [spec.name for spec in part]
            buffers, report = self._origin.read(names, track.of_leg(0))
            if report is not None:
                reads.append(report)
            if self._manner.checksum:
                self._digests.update(zip(names, self._context.digest(buffers), strict=True))
            delivery = Delivery(
                target,
                [sink],
                [place(part, 0)],
                buffers,
                finish=finish if number == len(parts) else None,
                durable=self._manner.fsync,
            )
            told = track.of_leg(_nbytes_of(part))
            writes.append(self._context.deliver(delivery, route=self._manner.route, progress=told))
            track.advance(2 * _nbytes_of(part))
        return reads, writes

    def _texts(self, group: Sequence[Described]) -> dict[str, str] | None:
        metadata = dict(self._origin.texts.metadata)
        if self._manner.checksum:
            metadata = store_checksums(metadata, group, self._digests)
        return metadata or None


class _Track:
    """Progress of the whole, which is twice as many bytes as there are: read, and written."""

    def __init__(self, progress: OnProgress | None, nbytes: int) -> None:
        self._done = 0
        self._odometer = Odometer(_halved(progress), 2 * nbytes) if progress else None

    def of_leg(self, before_nbytes: int) -> OnProgress | None:
        """What to tell the progress of one transfer, once so much of its part is done."""
        if self._odometer is None:
            return None
        tell = self._odometer.of_leg(self._done + before_nbytes)
        return lambda done: tell(done.nbytes)

    def advance(self, nbytes: int) -> None:
        """Note that a part is done."""
        self._done += nbytes


def _halved(progress: OnProgress) -> OnProgress:
    return lambda done: progress(Progress(done.nbytes // 2, done.total_nbytes // 2, done.seconds))


def split_parts(
    tensors: Sequence[TensorSpec], most_nbytes: int
) -> Iterator[tuple[TensorSpec, ...]]:
    """Split the tensors of a file into parts that fit into memory, in the given order.

    Parameters
    ----------
    tensors
        In the order of their file offsets.
    most_nbytes
        Most bytes of a part; a larger tensor is a part of its own.

    Yields
    ------
    tuple[TensorSpec, ...]
        One part at least, which is empty where there is no tensor.
    """
    part: list[TensorSpec] = []
    nbytes = 0
    for spec in tensors:
        if part and nbytes + spec.file_range.nbytes > most_nbytes:
            yield tuple(part)
            part, nbytes = [], 0
        part.append(spec)
        nbytes += spec.file_range.nbytes
    yield tuple(part)


def _nbytes_of(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.file_range.nbytes for spec in specs)

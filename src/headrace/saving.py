"""Saving: arrays into files that appear whole or not at all, or as raw bytes."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from headrace.context import Context, choose_context
from headrace.engines.lanes import Fence
from headrace.formats.catalog import TensorSpec
from headrace.formats.checksums import store_checksums
from headrace.formats.safetensors_layout import Described, Layout, lay_out
from headrace.framework import (
    Array,
    Framework,
    ShownProgress,
    StreamOf,
    Taken,
    choose_stream,
    shown,
)
from headrace.futures import TransferFuture
from headrace.memory.buffer import Buffer
from headrace.planning.coalesce import place
from headrace.planning.plan import Piece
from headrace.planning.route import parse_route
from headrace.report import Report, Snapshot, Stopwatch
from headrace.requests import Request
from headrace.storage.replacement import Replacement
from headrace.storage.sink import Sink
from headrace.survey import PathLike, absolute, name_path
from headrace.types import ByteRange, Device
from headrace.write_transfers import Delivery


@dataclass(frozen=True, slots=True)
class Manner:
    """How tensors are saved."""

    align: bool = False
    """Whether tensors lie at multiples of 4096 bytes, where their sizes allow it."""
    checksum: bool = False
    """Whether the header has a checksum of each tensor."""
    fsync: bool = True
    """Whether to wait until storage has everything."""
    route: str = "auto"
    """A route, or "auto"."""


@dataclass(frozen=True, slots=True)
class Background:
    """What a save in the background writes: a snapshot, once it has been taken."""

    fence: Fence
    """The copies are done after it."""
    snapshot: Snapshot
    """What they are."""


@dataclass(frozen=True, slots=True)
class Content:
    """What goes into one file: its header, and the bytes after it."""

    layout: Layout
    """The header, and where each tensor goes."""
    buffers: tuple[Buffer, ...]
    """Bytes of each tensor, in the layout's order."""


def take(
    framework: Framework[Array], tensors: Mapping[str, Array], stream: Any, context: Context
) -> list[Taken]:
    """Check tensors to be saved, and describe them; see ``headrace.torch.save_file`` for errors.

    Parameters
    ----------
    framework
        The library that they are of.
    tensors
        By name.
    stream
        What those on a GPU are ordered on; None for the library's current streams.
    context
        Asked for the device of the stream.
    """
    return framework.take(tensors, choose_stream(framework, stream, context))


def save_file(
    framework: Framework[Array],
    tensors: Mapping[str, Array],
    path: PathLike,
    metadata: Mapping[str, str] | None,
    manner: Manner,
    *,
    progress: ShownProgress,
    stream: Any,
    context: Context | None,
) -> Report:
    """Save tensors to one file; see ``headrace.torch.save_file`` for the parameters."""
    context = choose_context(context)
    taken = take(framework, tensors, stream, context)
    return write_file(taken, path, metadata, manner, progress=progress, context=context)


def save_file_async(
    framework: Framework[Array],
    tensors: Mapping[str, Array],
    path: PathLike,
    metadata: Mapping[str, str] | None,
    manner: Manner,
    *,
    progress: ShownProgress,
    stream: Any,
    context: Context | None,
) -> TransferFuture:
    """Save a snapshot in the background; see ``headrace.torch.save_file_async``."""
    context = choose_context(context)
    target = absolute(path)
    parse_route(manner.route)
    stream_of = choose_stream(framework, stream, context)
    taken = framework.take(tensors, stream_of)
    texts = _check(taken, metadata, manner)
    copied, snapshot = _copy(framework, taken, stream_of, context, wait=stream is None)

    run = functools.partial(
        _write_snapshot, copied, target, texts, manner, progress, context, snapshot
    )
    # Of two saves to one file the later one shall win, whichever is done first.
    turn = os.path.realpath(target)
    return context.submit(run, target, [each.buffer for each in copied], turn)


def _write_snapshot(
    copied: Sequence[Taken],
    target: str,
    texts: Mapping[str, str] | None,
    manner: Manner,
    progress: ShownProgress,
    context: Context,
    snapshot: Snapshot,
    fence: Fence,
) -> Report:
    background = Background(fence, snapshot)
    return write_file(
        copied, target, texts, manner, progress=progress, context=context, background=background
    )


def _check(
    taken: Sequence[Taken], metadata: Mapping[str, str] | None, manner: Manner
) -> dict[str, str] | None:
    """Let the caller hear now what a header refuses; the metadata, which he may change."""
    if manner.checksum:
        from headrace.engines.checksum import load_xxh3  # only this needs it

        load_xxh3()
    lay_out(describe(taken), metadata, align=manner.align)
    return None if metadata is None else dict(metadata)


def _copy(
    framework: Framework[Array],
    taken: Sequence[Taken],
    stream_of: StreamOf,
    context: Context,
    *,
    wait: bool,
) -> tuple[list[Taken], Snapshot]:
    """The same tensors in a snapshot."""
    spare = _Spare(framework, stream_of)
    copies, snapshot = context.snapshot([each.buffer for each in taken], spare, wait=wait)
    pairs = zip(taken, copies, strict=True)
    return [replace(each, buffer=copy) for each, copy in pairs], snapshot


@dataclass(frozen=True, slots=True)
class _Spare(Generic[Array]):
    """`headrace.snapshots.Spare` of an array library."""

    framework: Framework[Array]
    stream_of: StreamOf

    def idle_nbytes(self, device: Device) -> int:
        return self.framework.idle_nbytes(device)

    def allocate(self, nbytes: int, device: Device) -> Buffer | None:
        order, spec = self.stream_of(device), TensorSpec("", "U8", (nbytes,), ByteRange(0, nbytes))
        try:
            with self.framework.on_stream(order, device):
                array = self.framework.empty(spec, device)
        except self.framework.out_of_memory:
            return None
        return Buffer(self.framework.pointer(array), nbytes, device, array, order)


def write_file(
    taken: Sequence[Taken],
    path: PathLike,
    metadata: Mapping[str, str] | None,
    manner: Manner,
    *,
    progress: ShownProgress,
    context: Context,
    background: Background | None = None,
) -> Report:
    """Write tensors that were taken to one file, which appears whole or not at all.

    Raises
    ------
    FormatError, TypeError
        As `lay_out`; nothing was made.
    OSError, RouteUnavailable, DeviceError
        As `Replacement` and `Context.deliver`; the old file is as it was.
    """
    label = name_path(path)
    fence = background.fence if background else None
    watch = Stopwatch()
    contents = fill([taken], metadata, manner, context, watch, fence)
    with Replacement(label, context.bindings.files) as replacement:

        def finish() -> None:
            replacement.commit(fsync=manner.fsync)

        sinks = [replacement.sink]
        delivery = prepare(contents, sinks, label, finish, watch, durable=manner.fsync)
        if background is not None:
            delivery = replace(delivery, fence=fence, snapshot=background.snapshot)
        with shown(progress, label) as told:
            return context.deliver(delivery, route=manner.route, progress=told)


def fill(
    groups: Sequence[Sequence[Taken]],
    metadata: Mapping[str, str] | None,
    manner: Manner,
    context: Context,
    watch: Stopwatch,
    fence: Fence | None = None,
) -> list[Content]:
    """Lay out a file for each group of tensors; with their checksums, if they are asked for."""
    digests: dict[str, str] = {}
    if manner.checksum:
        every = [tensor for group in groups for tensor in group]
        with watch.stage("checksum"):
            found = context.digest([each.buffer for each in every], fence=fence)
        digests = dict(zip((tensor.name for tensor in every), found, strict=True))
    contents = []
    for group in groups:
        described = describe(group)
        texts = store_checksums(metadata, described, digests) if manner.checksum else metadata
        layout = lay_out(described, texts, align=manner.align)
        buffers = {tensor.name: tensor.buffer for tensor in group}
        contents.append(Content(layout, tuple(buffers[spec.name] for spec in layout.tensors)))
    return contents


def describe(taken: Sequence[Taken]) -> list[Described]:
    """Tensors without their bytes."""
    return [Described(tensor.name, tensor.dtype, tensor.shape) for tensor in taken]


def prepare(
    contents: Sequence[Content],
    sinks: Sequence[Sink],
    label: str,
    finish: Callable[[], None],
    watch: Stopwatch,
    *,
    durable: bool,
) -> Delivery:
    """Write the header of each new file, and say what has to follow it."""
    pieces: list[tuple[Piece, ...]] = []
    buffers: list[Buffer] = []
    for content, sink in zip(contents, sinks, strict=True):
        sink.write([memoryview(content.layout.header)], 0)
        pieces.append(place(content.layout.tensors, len(buffers)))
        buffers.extend(content.buffers)
    return Delivery(label, sinks, pieces, buffers, finish=finish, durable=durable, watch=watch)


def write(
    framework: Framework[Array],
    array: Array,
    path: PathLike,
    *,
    file_offset: int,
    route: str,
    progress: ShownProgress,
    stream: Any,
    context: Context | None,
) -> Report:
    """Write the bytes of one array; see ``headrace.torch.write`` for the parameters."""
    context = choose_context(context)
    label, start = name_path(path), operator.index(file_offset)
    if start < 0:
        raise ValueError(f"file_offset is {start}; it must not be negative")
    buffer = framework.memory(array, choose_stream(framework, stream, context))
    with shown(progress, label) as told:
        return context.write(Request(buffer, label, start, None), route=route, progress=told)

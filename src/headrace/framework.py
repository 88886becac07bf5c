"""What an array library must tell, and the functions that every library's namespace shares."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from headrace.context import Context, choose_context
from headrace.errors import FormatError
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.formats.dtypes import dtype_name, is_subbyte, itembits
from headrace.formats.npy import read_catalog as read_npy
from headrace.formats.raw import describe_raw
from headrace.memory.buffer import Buffer
from headrace.memory.stream import check_stream, parse_stream
from headrace.options import PAGE_NBYTES
from headrace.progress import OnProgress
from headrace.storage.source import Source
from headrace.survey import PathLike, SourceLike, Want, name_path, want_checkpoint
from headrace.types import ByteRange, Device

Array = TypeVar("Array")
ShownProgress = bool | OnProgress
"""True shows a bar; a callable is told each `Progress`; False is quiet."""

StreamOf = Callable[[Device], int | None]
"""CUDA stream that the arrays of a device are ordered on; None for the host."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One tensor to be saved: what the file says of it, and its bytes."""

    name: str
    """Name in the file."""
    dtype: str
    """Safetensors name of its type."""
    shape: tuple[int, ...]
    """Elements along each axis, also of packed types (F4: two elements in a byte)."""
    buffer: Buffer
    """Its bytes as the file has them; keeps the memory alive."""


class Framework(Protocol[Array]):
    """An array library: where its arrays live, how they are made, and how they are saved."""

    @property
    def out_of_memory(self) -> tuple[type[Exception], ...]:
        """What `empty` raises where there is no memory left."""

    def idle_nbytes(self, device: Device) -> int:
        """Bytes of a GPU that its allocator holds, and has given to nobody."""

    def parse_device(self, device: Any) -> Device:
        """Its own way of naming devices; None is its current default."""

    def dtype_name(self, dtype: Any) -> str:
        """Name of one of its types, as `TensorSpec.dtype` has it."""

    def current_stream(self, device: Device) -> int | None:
        """CUDA stream that its allocator orders new arrays on; None for the host."""

    def on_stream(self, stream: int | None, device: Device) -> AbstractContextManager[object]:
        """Make a stream of a device the library's current one in a block; None changes nothing."""

    def empty(self, spec: TensorSpec, device: Device) -> Array:
        """A new array for a tensor, from its own allocator; contiguous in the spec's order."""

    def pointer(self, array: Array) -> int:
        """Address of the first byte of an array that `empty` made."""

    def memory(self, array: Array, stream_of: StreamOf, what: str = "the array") -> Buffer:
        """Bytes of an array, to be read, with the stream that they are ordered on.

        `BufferMismatch`, which calls the array `what`, if it is not contiguous in C order, is of
        another library, or has no memory.
        """

    def take(self, tensors: Mapping[str, Array], stream_of: StreamOf) -> list[Taken]:
        """Arrays to be saved, once they are what the official writer for the library takes.

        ValueError (`BufferMismatch` and `FormatError` among them) or RuntimeError if they are not.
        """


def load(
    framework: Framework[Array],
    source: SourceLike,
    *,
    device: Any = None,
    names: Sequence[str] | None = None,
    route: str = "auto",
    verify: bool = False,
    progress: ShownProgress = False,
    stream: Any = None,
    context: Context | None = None,
) -> dict[str, Array]:
    """Load the tensors of safetensors files; see ``headrace.torch.load`` for the parameters."""
    want = want_checkpoint(source, names, verify=verify)
    context = choose_context(context)
    order = choose_stream(framework, stream, context)
    return _load(framework, want, device, route, progress, order, context)


def read(
    framework: Framework[Array],
    path: PathLike,
    *,
    dtype: Any = None,
    shape: int | Sequence[int] | None = None,
    file_offset: int = 0,
    nbytes: int | None = None,
    device: Any = None,
    route: str = "auto",
    progress: ShownProgress = False,
    stream: Any = None,
    context: Context | None = None,
) -> Array:
    """Read one array; see ``headrace.torch.read`` for the parameters."""
    where = name_path(path)
    name = None if dtype is None else framework.dtype_name(dtype)
    extent = None if shape is None else _axes(shape)
    first = operator.index(file_offset)
    length = None if nbytes is None else operator.index(nbytes)

    def describe(opened: Sequence[Source]) -> tuple[Catalog, ...]:
        if where.lower().endswith(".npy") and not first and length is None:
            return (_agreeing(read_npy(where, opened[0].fd), name, extent),)
        return (
            describe_raw(
                where,
                opened[0].nbytes,
                dtype=name or "U8",
                shape=extent,
                file_offset=first,
                nbytes=length,
            ),
        )

    want = Want(where, (where,), describe)
    context = choose_context(context)
    order = choose_stream(framework, stream, context)
    return _load(framework, want, device, route, progress, order, context)[""]


def aligned_empty(framework: Framework[Array], nbytes: int, device: Any = None) -> Array:
    """Make uninitialised bytes at an aligned address; see ``headrace.torch.aligned_empty``."""
    wanted = operator.index(nbytes)
    if wanted < 0:
        raise ValueError(f"nbytes is {wanted}; it must not be negative")
    room = wanted + PAGE_NBYTES
    spec = TensorSpec("", "U8", (room,), ByteRange(0, room))
    whole: Any = framework.empty(spec, framework.parse_device(device))
    lead = -framework.pointer(whole) % PAGE_NBYTES
    part: Array = whole[lead:][:wanted]  # in this order: an empty slice forgets where it starts
    return part


def choose_stream(framework: Framework[Array], stream: Any, context: Context) -> StreamOf:
    """Choose the stream that arrays are ordered on: the one given, or else the current ones.

    Raises
    ------
    TypeError, ValueError
        It is no stream (see `parse_stream`). What is returned raises ValueError for a GPU that the
        stream is not of.
    """
    if stream is None:
        return functools.cache(framework.current_stream)
    handle = parse_stream(stream)

    def stream_of(device: Device) -> int | None:
        if device.is_host:
            return None
        check_stream(handle, device, context.load_cuda())
        return handle

    return functools.cache(stream_of)


def check_mapping(tensors: Any, kind: type[object]) -> None:
    """Raise ValueError, as the official writers do, for anything but a dict of arrays."""
    library = f"{kind.__module__.split('.')[0]}.{kind.__name__}"
    if not isinstance(tensors, Mapping):
        raise ValueError(  # noqa: TRY004 (the official writers' own)
            f"tensors is {type(tensors).__name__}; pass a dict of names to {library}"
        )
    for name, array in tensors.items():
        if not isinstance(array, kind):
            raise ValueError(  # noqa: TRY004
                f"tensor {name!r} is {type(array).__module__}.{type(array).__qualname__}; pass "
                f"{library}"
            )


def _axes(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        return (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(operator.index(axis) for axis in shape)  # type: ignore[union-attr]


def numpy_dtype_name(dtype: Any) -> str:
    """Name of a type given as a safetensors name, or as anything that ``np.dtype`` takes."""
    if isinstance(dtype, str) and not dtype.startswith(("<", ">", "|", "=", "[")):
        with contextlib.suppress(FormatError):
            itembits(dtype)
            return dtype
    try:
        return dtype_name(np.dtype(dtype))
    except TypeError:
        importlib.import_module("ml_dtypes")  # which tells NumPy of bfloat16 and the fp8 types
        return dtype_name(np.dtype(dtype))


def numpy_tensor_dtype(name: str, dtype: np.dtype[Any]) -> str:
    """Name of a tensor's type once it is written, which is little-endian.

    Raises
    ------
    FormatError
        No file can hold such elements.
    """
    try:
        return dtype_name(dtype if dtype.isnative else dtype.newbyteorder("="))
    except FormatError as error:
        raise FormatError(f"tensor {name!r}: {error}") from error


def _load(
    framework: Framework[Array],
    want: Want,
    device: Any,
    route: str,
    progress: ShownProgress,
    stream_of: StreamOf,
    context: Context,
) -> dict[str, Array]:
    target = framework.parse_device(device)
    arrays: dict[str, Array] = {}

    def allocate(specs: tuple[TensorSpec, ...]) -> list[Buffer]:
        stream = stream_of(target)
        buffers = []
        with framework.on_stream(stream, target):
            for spec in specs:
                array = arrays[spec.name] = framework.empty(_as_bytes(spec), target)
                pointer, nbytes = framework.pointer(array), spec.file_range.nbytes
                buffers.append(Buffer(pointer, nbytes, target, array, stream))
        return buffers

    with shown(progress, want.label) as told:
        context.transfer(want, target, allocate, route=route, progress=told)
    return arrays


@contextlib.contextmanager
def shown(progress: ShownProgress, label: str) -> Iterator[OnProgress | None]:
    """What to tell of the progress: the caller's function, a bar, or nothing."""
    if not isinstance(progress, bool):
        if not callable(progress):
            raise TypeError(f"progress is {progress!r}; pass True, False or a function")
        yield progress
        return
    if not progress:
        yield None
        return
    from rich import progress as bars  # tens of milliseconds, for those who asked for a bar

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done: bar.update(task, completed=done.nbytes, total=done.total_nbytes)


def _as_bytes(spec: TensorSpec) -> TensorSpec:
    """The same tensor; as plain bytes where its elements are packed across byte borders."""
    if not is_subbyte(spec.dtype):
        return spec
    return replace(spec, dtype="U8", shape=(spec.file_range.nbytes,))


def _agreeing(catalog: Catalog, dtype: str | None, shape: tuple[int, ...] | None) -> Catalog:
    """A .npy catalog, once it is what the caller expects."""
    spec = catalog.tensors[0]
    wanted = (dtype or spec.dtype, spec.shape if shape is None else shape)
    if wanted != (spec.dtype, spec.shape):
        raise FormatError(
            f"{catalog.path}: the file holds {spec.dtype} {spec.shape}, but {wanted[0]} "
            f"{wanted[1]} was asked for; leave dtype and shape out, or pass nbytes to read "
            "the file as raw bytes"
        )
    return catalog

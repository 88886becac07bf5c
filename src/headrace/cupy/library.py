"""CuPy as a `headrace.framework.Framework`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cupy

from headrace import framework
from headrace.bindings.cuda import LEGACY_STREAM, PER_THREAD_STREAM
from headrace.errors import BufferMismatch, FormatError
from headrace.formats.catalog import TensorSpec
from headrace.formats.dtypes import numpy_dtype
from headrace.framework import StreamOf, Taken
from headrace.memory.buffer import Buffer
from headrace.types import Device, parse_device


class CuPy:
    """`Framework` of CuPy; see there."""

    def parse_device(self, device: Any) -> Device:
        """See `Framework.parse_device`."""
        if device is None or device == "cuda":
            return Device("cuda", int(cupy.cuda.runtime.getDevice()))
        if isinstance(device, (int, cupy.cuda.Device)):
            return Device("cuda", int(device))
        target = parse_device(str(device))
        if target.is_host:
            raise ValueError("CuPy arrays live on a GPU, not in host memory; use headrace.numpy")
        return target

    @property
    def out_of_memory(self) -> tuple[type[Exception], ...]:
        """See `Framework.out_of_memory`."""
        return (cupy.cuda.memory.OutOfMemoryError,)

    def idle_nbytes(self, device: Device) -> int:
        """See `Framework.idle_nbytes`."""
        with cupy.cuda.Device(device.index):
            return int(cupy.get_default_memory_pool().free_bytes())

    def dtype_name(self, dtype: Any) -> str:
        """See `Framework.dtype_name`."""
        return framework.numpy_dtype_name(dtype)

    def current_stream(self, device: Device) -> int | None:
        """See `Framework.current_stream`."""
        with cupy.cuda.Device(device.index):
            return int(cupy.cuda.get_current_stream().ptr)

    @contextlib.contextmanager
    def on_stream(self, stream: int | None, device: Device) -> Iterator[None]:
        """See `Framework.on_stream`."""
        if stream is None or stream == self.current_stream(device):
            yield
            return
        with cupy.cuda.Device(device.index), _wrap(stream):
            yield

    def empty(self, spec: TensorSpec, device: Device) -> cupy.ndarray:
        """See `Framework.empty`."""
        with cupy.cuda.Device(device.index):
            dtype = numpy_dtype(spec.dtype)
            try:
                return cupy.empty(spec.shape, dtype, order=spec.order)
            except (TypeError, ValueError) as error:
                raise FormatError(
                    f"tensor {spec.name!r} is of type {spec.dtype}, which CuPy "
                    f"{cupy.__version__} does not have: {error}; load it with headrace.torch"
                ) from error

    def pointer(self, array: cupy.ndarray) -> int:
        """See `Framework.pointer`."""
        return int(array.data.ptr)

    def memory(self, array: cupy.ndarray, stream_of: StreamOf, what: str = "the array") -> Buffer:
        """See `Framework.memory`."""
        if not isinstance(array, cupy.ndarray):
            raise BufferMismatch(f"{what} is {type(array).__name__}; pass a cupy.ndarray")
        if not array.flags.c_contiguous:
            raise BufferMismatch(
                f"{what} is not contiguous in C order; pass cupy.ascontiguousarray(array)"
            )
        device = _device_of(array)
        return Buffer(self.pointer(array), int(array.nbytes), device, array, stream_of(device))

    def take(self, tensors: Mapping[str, cupy.ndarray], stream_of: StreamOf) -> list[Taken]:
        """See `Framework.take`; arrays of strides are copied, on the GPU."""
        framework.check_mapping(tensors, cupy.ndarray)
        taken = []
        for name, array in tensors.items():
            dtype = framework.numpy_tensor_dtype(name, array.dtype)
            device = _device_of(array)
            with cupy.cuda.Device(device.index), self.on_stream(stream_of(device), device):
                plain = cupy.ascontiguousarray(array)
            taken.append(Taken(name, dtype, array.shape, self.memory(plain, stream_of)))
        return taken


def _device_of(array: cupy.ndarray) -> Device:
    return Device("cuda", int(array.device.id))


def _wrap(stream: int) -> Any:
    """CuPy's own object for a stream: its pool keeps memory apart by the handle."""
    if stream in (0, LEGACY_STREAM):
        return cupy.cuda.Stream.null
    if stream == PER_THREAD_STREAM:
        return cupy.cuda.Stream.ptds
    return cupy.cuda.Stream.from_external(_Handle(stream))


@dataclass(frozen=True, slots=True)
class _Handle:
    """A stream that CuPy takes by the protocol of cuda.core."""

    stream: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream

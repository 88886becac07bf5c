"""NumPy as a `headrace.framework.Framework`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import framework
from headrace.errors import BufferMismatch
from headrace.formats.catalog import TensorSpec
from headrace.formats.dtypes import numpy_dtype
from headrace.framework import StreamOf, Taken
from headrace.memory.buffer import Buffer, buffer_from
from headrace.types import HOST, Device, parse_device


class NumPy:
    """`Framework` of NumPy; see there."""

    def parse_device(self, device: Any) -> Device:
        """See `Framework.parse_device`."""
        target = HOST if device is None else parse_device(str(device))
        if not target.is_host:
            raise ValueError(f"NumPy arrays live in host memory, not on {target}; use 'cpu'")
        return target

    @property
    def out_of_memory(self) -> tuple[type[Exception], ...]:
        """See `Framework.out_of_memory`."""
        return (MemoryError,)

    def idle_nbytes(self, device: Device) -> int:
        """See `Framework.idle_nbytes`."""
        return 0

    def dtype_name(self, dtype: Any) -> str:
        """See `Framework.dtype_name`."""
        return framework.numpy_dtype_name(dtype)

    def current_stream(self, device: Device) -> None:
        """See `Framework.current_stream`."""
        return

    def on_stream(self, stream: int | None, device: Device) -> AbstractContextManager[object]:
        """See `Framework.on_stream`."""
        return nullcontext()

    def empty(self, spec: TensorSpec, device: Device) -> NDArray[Any]:
        """See `Framework.empty`."""
        # np.empty would make one-byte strings of empty ones.
        return np.ndarray(spec.shape, numpy_dtype(spec.dtype), order=spec.order)

    def pointer(self, array: NDArray[Any]) -> int:
        """See `Framework.pointer`."""
        return int(array.__array_interface__["data"][0])

    def memory(self, array: NDArray[Any], stream_of: StreamOf, what: str = "the array") -> Buffer:
        """See `Framework.memory`."""
        if not isinstance(array, np.ndarray):
            raise BufferMismatch(f"{what} is {type(array).__name__}; pass a numpy.ndarray")
        return buffer_from(array, _on_host, writable=False)

    def take(self, tensors: Mapping[str, NDArray[Any]], stream_of: StreamOf) -> list[Taken]:
        """See `Framework.take`; arrays of strides or of big-endian numbers are copied."""
        framework.check_mapping(tensors, np.ndarray)
        taken = []
        for name, array in tensors.items():
            dtype = framework.numpy_tensor_dtype(name, array.dtype)
            native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
            plain = np.asarray(array, native, order="C")
            taken.append(Taken(name, dtype, array.shape, self.memory(plain, stream_of)))
        return taken


def _on_host(pointer: int) -> None:
    """Where a pointer of NumPy's is."""

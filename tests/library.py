"""An array library whose arrays live on a `FakeCuda`, and NumPy's beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace import framework
from headrace.formats.catalog import TensorSpec
from headrace.framework import StreamOf, Taken
from headrace.memory.buffer import Buffer, buffer_from
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.types import Device
from tests.support import on_host


class Library:
    """A framework whose arrays live on a `FakeCuda`."""

    def __init__(self, cuda: FakeCuda, stream: int | None = None) -> None:
        self.cuda = cuda
        self.stream = stream
        self.made: list[TensorSpec] = []
        self.entered: list[tuple[int | None, Device]] = []
        self.fails_at = -1
        self.idle = 0

    @property
    def out_of_memory(self) -> tuple[type[Exception], ...]:
        return (MemoryError,)

    def idle_nbytes(self, device: Device) -> int:
        return self.idle

    def parse_device(self, device: Any) -> Device:
        return Device("cuda", int(device or 0))

    def dtype_name(self, dtype: Any) -> str:
        return framework.numpy_dtype_name(dtype)

    def current_stream(self, device: Device) -> int | None:
        return self.stream

    def on_stream(
        self, stream: int | None, device: Device
    ) -> contextlib.AbstractContextManager[object]:
        self.entered.append((stream, device))
        return contextlib.nullcontext()

    def memory(
        self, array: FakeDeviceArray | np.ndarray, stream_of: StreamOf, what: str = "the array"
    ) -> Buffer:
        if isinstance(array, np.ndarray):
            return buffer_from(array, on_host, writable=False)
        device = Device("cuda", self.cuda.pointer_device(array.pointer) or 0)
        return Buffer(array.pointer, array.nbytes, device, array, stream_of(device))

    def take(
        self, tensors: Mapping[str, FakeDeviceArray | np.ndarray], stream_of: StreamOf
    ) -> list[Taken]:
        return [
            Taken(name, "U8", (array.nbytes,), self.memory(array, stream_of))
            for name, array in tensors.items()
        ]

    def empty(self, spec: TensorSpec, device: Device) -> FakeDeviceArray:
        if len(self.made) == self.fails_at:
            raise MemoryError(f"no room for {spec.name}")
        self.made.append(spec)
        return FakeDeviceArray(self.cuda, spec.file_range.nbytes, device.index)

    def pointer(self, array: FakeDeviceArray) -> int:
        return array.pointer

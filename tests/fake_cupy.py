"""A stand-in for the part of CuPy that headrace uses, over a `FakeCuda`."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from headrace.testing import FakeCuda


class FakeCupy:
    """What ``import cupy`` gives; its current stream is one for each device."""

    __version__ = "14.2.0"

    def __init__(self, fake_cuda: FakeCuda) -> None:
        self.fake_cuda = fake_cuda
        self.current = dict.fromkeys(range(fake_cuda.device_count()), 0)
        self.idle = dict.fromkeys(range(fake_cuda.device_count()), 0)
        self.is_full = False

        def bound(kind: type) -> Any:
            return type(kind.__name__, (kind,), {"fake": self})

        stream = bound(Stream)
        self.Handle = stream
        self.ndarray = bound(Array)
        self.cuda = SimpleNamespace(
            Device=bound(Device),
            Stream=SimpleNamespace(
                null=stream(0),
                ptds=stream(2),
                from_external=lambda given: stream(given.__cuda_stream__()[1]),
            ),
            get_current_stream=lambda: stream(self.current[fake_cuda.current_device()]),
            runtime=SimpleNamespace(getDevice=fake_cuda.current_device),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        )

    def array(self, content: np.ndarray) -> Any:
        """A copy of an array on the current device."""
        return self.ndarray(content, self.fake_cuda.current_device())

    def empty(self, shape: tuple[int, ...], dtype: Any, order: Any = "C") -> Any:
        """A new array on the current device; in C order alone."""
        assert order == "C"
        if self.is_full:
            raise OutOfMemoryError("Out of memory allocating")
        return self.array(np.zeros(shape, dtype))

    def get_default_memory_pool(self) -> Any:
        """The pool, which tells of the current device."""
        device = self.fake_cuda.current_device()
        return SimpleNamespace(free_bytes=lambda: self.idle[device])

    def ascontiguousarray(self, array: Array) -> Any:
        """Queue a copy on the current stream, where the array is not contiguous."""
        if array.flags.c_contiguous:
            return array
        made = self.array(np.zeros(array.shape, array.dtype))
        stream = self.current[self.fake_cuda.current_device()]
        self.fake_cuda.enqueue_on(stream, lambda: made.put(array.get()))
        return made


class OutOfMemoryError(MemoryError):
    """``cupy.cuda.memory.OutOfMemoryError``."""


class Device:
    """``cupy.cuda.Device``."""

    fake: FakeCupy

    def __init__(self, index: int) -> None:
        self.id = index

    def __int__(self) -> int:
        return self.id

    def __enter__(self) -> None:
        self._before = self.fake.fake_cuda.current_device()
        self.fake.fake_cuda.set_device(self.id)

    def __exit__(self, *error: object) -> None:
        self.fake.fake_cuda.set_device(self._before)


class Stream:
    """``cupy.cuda.Stream``, which is entered on the current device."""

    fake: FakeCupy

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __enter__(self) -> None:
        device = self.fake.fake_cuda.current_device()
        self._before, self.fake.current[device] = self.fake.current[device], self.ptr

    def __exit__(self, *error: object) -> None:
        self.fake.current[self.fake.fake_cuda.current_device()] = self._before


class Array:
    """``cupy.ndarray``: elements in the memory of a device."""

    fake: FakeCupy

    def __init__(self, content: np.ndarray, device: int) -> None:
        self.device = self.fake.cuda.Device(device)
        self._values: np.ndarray = np.empty(content.shape, content.dtype)
        if content.nbytes:
            pointer = self.fake.fake_cuda.device_alloc(content.nbytes, device)
            memory: Any = (ctypes.c_char * content.nbytes).from_address(pointer)
            self._values = np.frombuffer(memory, content.dtype).reshape(content.shape)
        self.put(content)

    def put(self, content: Any) -> None:
        """Set all elements now, past every stream."""
        self._values[...] = content

    def get(self) -> np.ndarray:
        """Its elements now."""
        return self._values.copy()

    def view(self, index: Any) -> Any:
        """Part of it, in the same memory."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__, _values=self._values[index])
        return part

    @property
    def shape(self) -> Any:
        return self._values.shape

    @property
    def dtype(self) -> Any:
        return self._values.dtype

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    @property
    def flags(self) -> Any:
        return self._values.flags

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self._values.ctypes.data if self.nbytes else 0)


@contextlib.contextmanager
def installed(cuda: FakeCuda) -> Iterator[tuple[FakeCupy, ModuleType]]:
    """The stand-in in place of CuPy, and ``headrace.cupy`` over it."""
    import headrace

    def ours(name: str) -> bool:
        return name == "cupy" or name.split(".")[:2] == ["headrace", "cupy"]

    before = {name: module for name, module in sys.modules.items() if ours(name)}
    attribute = vars(headrace).pop("cupy", None)
    for name in before:
        del sys.modules[name]
    fake = FakeCupy(cuda)
    sys.modules["cupy"] = fake  # type: ignore[assignment]
    try:
        yield fake, importlib.import_module("headrace.cupy")
    finally:
        for name in list(filter(ours, sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)
        vars(headrace).pop("cupy", None)
        if attribute is not None:
            vars(headrace)["cupy"] = attribute

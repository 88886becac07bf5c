"""FakeDeviceArray: an array whose memory is that of a FakeCuda's device."""

from __future__ import annotations

from typing import Any

from headrace.testing.fake_cuda import POISON, FakeCuda


class FakeDeviceArray:
    """Bytes on a device of a `FakeCuda`, filled with `POISON`, to be the end of a transfer.

    An array of 0 bytes has no memory; `stream` is what ``__cuda_array_interface__`` tells the
    reader to wait for, None for nothing.
    """

    def __init__(
        self, cuda: FakeCuda, nbytes: int, device: int = 0, stream: int | None = None
    ) -> None:
        self.pointer = cuda.device_alloc(nbytes, device) if nbytes else 0
        self.nbytes = nbytes
        self.stream = stream
        self._cuda = cuda
        self.fill(POISON)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        memory = {"shape": (self.nbytes,), "data": (self.pointer, False)}
        return {"version": 3, "typestr": "|u1", "stream": self.stream, **memory}

    def view(self, offset: int, nbytes: int) -> FakeDeviceArray:
        """Part of this array, in the same memory; ValueError where it is not inside."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"view of bytes [{offset}, {offset + nbytes}) of {self.nbytes}")
        part = FakeDeviceArray(self._cuda, 0, stream=self.stream)
        part.pointer, part.nbytes = (self.pointer + offset if nbytes else 0), nbytes
        return part

    def tobytes(self) -> bytes:
        """Bytes that it holds now; copies that are still queued do not run."""
        return self._cuda.device_bytes(self.pointer, self.nbytes) if self.nbytes else b""

    def fill(self, value: int) -> None:
        """Set every byte to `value` now, past every stream."""
        if self.nbytes:
            self._cuda.device_write(self.pointer, bytes([value]) * self.nbytes)

"""Buffers for EngineSuite in the memory of a FakeCuda."""

from __future__ import annotations

from headrace.context import Context
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.testing.fake_cuda import POISON
from tests.engines.device_memory import DeviceMemory


class FakeBuffers(DeviceMemory):
    """Device memory at odd addresses, inside a larger allocation whose rest stays poisoned."""

    __test__ = False

    def setup_method(self) -> None:
        self.cuda = FakeCuda()
        self.stream: int | None = None
        self.whole: dict[int, FakeDeviceArray] = {}

    def make_buffer(self, nbytes: int) -> FakeDeviceArray:
        whole = FakeDeviceArray(self.cuda, nbytes + 2 * self.lead, stream=self.stream)
        part = whole.view(self.lead, nbytes)
        self.whole[id(part)] = whole
        return part

    def make_busy_buffer(self, nbytes: int) -> FakeDeviceArray:
        self.stream = self.cuda.create_stream()
        buffer = self.make_buffer(nbytes)
        self.cuda.enqueue_on(self.stream, lambda: buffer.fill(0))
        return buffer

    def read_back(self, buffer: FakeDeviceArray) -> bytes:
        whole = self.whole[id(buffer)].tobytes()
        guard = bytes([POISON]) * self.lead
        assert (whole[: self.lead], whole[self.lead + buffer.nbytes :]) == (guard, guard)
        return buffer.tobytes()


def check_cuda_released(cuda: FakeCuda, context: Context) -> None:
    """Check that a closed context left nothing on a GPU, and kept to its budget."""
    held = (cuda.live_streams, cuda.live_events, cuda.pinned_nbytes, cuda.pending_copies)
    assert held == (0, 0, 0, 0)
    assert cuda.mapped_nbytes == 0
    assert cuda.peak_pinned_nbytes <= context.options.pinned_nbytes
    assert cuda.errors == []
    cuda.peak_pinned_nbytes = 0

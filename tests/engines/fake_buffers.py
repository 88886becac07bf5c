"""Buffers for EngineSuite in the memory of a FakeCuda."""

from __future__ import annotations

from headrace.testing import EngineSuite, FakeCuda, FakeDeviceArray
from headrace.testing.fake_cuda import POISON


class FakeBuffers(EngineSuite):
    """Device memory at odd addresses, inside a larger allocation whose rest stays poisoned."""

    __test__ = False
    unfit_route = "host"
    lead = 3

    def setup_method(self) -> None:
        self.cuda = FakeCuda()
        self.stream: int | None = None
        self.whole: dict[int, FakeDeviceArray] = {}

    def make_buffer(self, nbytes: int) -> FakeDeviceArray:
        whole = FakeDeviceArray(self.cuda, nbytes + 2 * self.lead, stream=self.stream)
        part = whole.view(self.lead, nbytes)
        self.whole[id(part)] = whole
        return part

    def read_back(self, buffer: FakeDeviceArray) -> bytes:
        whole = self.whole[id(buffer)].tobytes()
        guard = bytes([POISON]) * self.lead
        assert (whole[: self.lead], whole[self.lead + buffer.nbytes :]) == (guard, guard)
        return buffer.tobytes()

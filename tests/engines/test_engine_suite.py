from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.bindings.cuda import Cuda, CudaRuntime
from headrace.context import Context
from headrace.errors import DeviceError
from headrace.options import Options
from headrace.reading import read_into
from headrace.testing import EngineSuite, FakeCuda, FakeDeviceArray
from headrace.testing.fake_cuda import POISON
from headrace.testing.route_suite import BLOCK, SMALL
from tests.engines.device_memory import DeviceMemory
from tests.engines.fake_buffers import FakeBuffers, check_cuda_released

BUSY_NBYTES = 1 << 30
BUSY_FILLS = 200
"""So many fills keep a GPU busy for longer than a small read takes, some 70 ms on an H200."""


@pytest.fixture(scope="session")
def _o_direct(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("o_direct") / "probe"
    path.touch()
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the temporary directory has no O_DIRECT: {error}")


class AroundThePageCache(EngineSuite):
    __test__ = False
    route = "direct"

    def test_short_read_is_not_finished_through_the_page_cache_in_silence(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        with self.open_context(no_dioalign=True, short_reads=512) as (context, files):
            with contextlib.suppress(OSError):
                self.check_read(context, path)
            assert files.buffered_nbytes == 0


class HostMemory(EngineSuite):
    __test__ = False
    unfit_route = "cached"

    def make_context(self, **arguments: Any) -> Context:
        return Context(**arguments)

    def make_buffer(self, nbytes: int) -> bytearray:
        return bytearray([POISON]) * nbytes

    def read_back(self, buffer: bytearray) -> bytes:
        return bytes(buffer)


class TestHost(HostMemory):
    route = "host"


@pytest.mark.usefixtures("_o_direct")
class TestDirectHost(AroundThePageCache, HostMemory):
    pass


class FakeDevice(FakeBuffers):
    __test__ = False

    def make_context(self, **arguments: Any) -> Context:
        return Context(**arguments, cuda=self.cuda)

    def check_released(self, context: Context) -> None:
        check_cuda_released(self.cuda, context)

    def test_user_work_queued_before_the_read_comes_first(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"\x01" * 9 * BLOCK)
        buffer = self.make_busy_buffer(9 * BLOCK)
        assert self.stream is not None
        with self.make_context(options=SMALL) as context:
            self.check_read(context, path)
            read_into(buffer, path, route=self.route, context=context)
        self.cuda.synchronize_stream(self.stream)
        assert set(self.read_back(buffer)) == {1}

    def test_user_work_on_the_legacy_stream_comes_first_too(self, tmp_path: Path) -> None:
        path, buffer = tmp_path / "file", self.make_buffer(9 * BLOCK)
        path.write_bytes(b"\x01" * 9 * BLOCK)
        self.cuda.enqueue_on(1, lambda: buffer.fill(0))
        with self.make_context(options=SMALL) as context:
            read_into(buffer, path, route=self.route, context=context)
        self.cuda.synchronize_stream(1)
        assert set(self.read_back(buffer)) == {1}

    @pytest.mark.parametrize("number", [1, 2, 9])
    def test_failed_copy_is_a_device_error_and_the_context_stays_usable(
        self, tmp_path: Path, number: int
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        self.cuda = FakeCuda(fail_copy_at=number)
        with self.open_context() as (context, files):
            with pytest.raises(DeviceError, match=f"copy {number} was told to fail"):
                self.check_read(context, path)
            assert not files.open_descriptors
            self.check_read(context, path)

    def test_without_page_locked_memory_the_bytes_are_right_and_the_report_says_so(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        self.cuda = FakeCuda(pinned_limit_nbytes=0)
        with self.open_context() as (context, _):
            report = self.check_read(context, path)
        assert any("cudaErrorMemoryAllocation" in each.why for each in report.rejected)
        assert (report.pinned_nbytes, self.cuda.pageable_copies > 0) == (0, True)

    def test_less_page_locked_memory_than_the_budget_is_enough(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(50 * BLOCK))
        self.cuda = FakeCuda(pinned_limit_nbytes=2 * BLOCK)
        with self.open_context(Options(workers=8, block_nbytes=BLOCK)) as (context, _):
            report = self.check_read(context, path)
        assert (report.pinned_nbytes, self.cuda.pageable_copies) == (2 * BLOCK, 0)

    def test_each_wanted_byte_is_copied_once(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(50 * BLOCK))
        with self.open_context() as (context, _):
            self.check_read(context, path, 5, 40 * BLOCK)
        assert self.cuda.copied_nbytes == 40 * BLOCK

    def test_second_device_is_served_and_the_callers_device_stays_current(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        self.cuda = FakeCuda(devices=2)
        with self.open_context() as (context, _):
            for device in (1, 0, 1):
                array = FakeDeviceArray(self.cuda, 9 * BLOCK, device)
                report = read_into(array, path, route=self.route, context=context)
                assert (array.tobytes(), report.device) == (path.read_bytes(), f"cuda:{device}")
                assert self.cuda.current_device() == 0

    def test_contexts_that_were_never_closed_do_not_harm_later_ones(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        for _ in range(3):
            self.check_read(self.make_context(options=SMALL), path)
            gc.collect()
        assert self.cuda.errors == []

    def test_closing_waits_for_a_read_that_is_under_way(self, tmp_path: Path) -> None:
        path, buffer = tmp_path / "file", self.make_buffer(9 * BLOCK)
        path.write_bytes(b"\x01" * 9 * BLOCK)
        closers: list[threading.Thread] = []

        with self.open_context() as (context, _):

            def close_meanwhile() -> None:
                closers.append(threading.Thread(target=context.close))
                closers[0].start()
                closers[0].join(0.1)
                assert closers[0].is_alive()

            self.cuda.enqueue_on(1, close_meanwhile)
            read_into(buffer, path, route=self.route, context=context)
            closers[0].join()
        assert set(self.read_back(buffer)) == {1}


class TestCached(FakeDevice):
    route = "cached"


@pytest.mark.usefixtures("_o_direct")
class TestDirect(AroundThePageCache, FakeDevice):
    pass


class TestCachedAligned(FakeDevice):
    route = "cached"
    lead = 0


class RealDevice(DeviceMemory):
    """Memory of a real GPU, from torch or CuPy; at odd addresses, as `FakeBuffers`."""

    __test__ = False
    device = 0

    def setup_method(self) -> None:
        self.make_array, self.to_host = find_framework(self.device)
        self.cuda: Cuda = CudaRuntime()
        self.whole: dict[int, Any] = {}

    def make_context(self, **arguments: Any) -> Context:
        return Context(**arguments, cuda=self.cuda)

    def make_buffer(self, nbytes: int) -> Any:
        whole = self.make_array(nbytes + 2 * self.lead)
        part = whole[self.lead : self.lead + nbytes]
        self.whole[id(part)] = (part, whole)
        return part

    def make_busy_buffer(self, nbytes: int) -> Any:
        buffer, other = self.make_buffer(nbytes), self.make_array(BUSY_NBYTES)
        for _ in range(BUSY_FILLS):
            other[:] = 0
        buffer[:] = 0
        return buffer

    def read_back(self, buffer: Any) -> bytes:
        got = self.to_host(self.whole[id(buffer)][1])
        stop = len(got) - self.lead
        guard = bytes([POISON]) * self.lead
        assert (got[: self.lead], got[stop:]) == (guard, guard)
        return got[self.lead : stop]


@pytest.mark.gpu
class TestCachedOnGpu(RealDevice):
    route = "cached"


@pytest.mark.gpu
@pytest.mark.usefixtures("_o_direct")
class TestDirectOnGpu(AroundThePageCache, RealDevice):
    pass


@pytest.mark.gpu
class TestCachedAlignedOnGpu(RealDevice):
    route = "cached"
    lead = 0


@pytest.mark.gpu2
class TestCachedOnSecondGpu(RealDevice):
    route = "cached"
    device = 1


def find_framework(device: int) -> tuple[Callable[[int], Any], Callable[[Any], bytes]]:
    """How to make a poisoned array on a GPU, and how to get its bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a framework says at import is not our matter
        with contextlib.suppress(ImportError):
            import torch

            if torch.cuda.is_available():
                where = f"cuda:{device}"
                return (
                    lambda nbytes: torch.full((nbytes,), POISON, dtype=torch.uint8, device=where),
                    lambda array: bytes(array.cpu().numpy()),
                )
        cupy = pytest.importorskip("cupy")

    def make_array(nbytes: int) -> Any:
        with cupy.cuda.Device(device):
            return cupy.full(nbytes, POISON, dtype=cupy.uint8)

    return make_array, lambda array: bytes(cupy.asnumpy(array))

"""WriteSuite from host memory, from the memory of a FakeCuda, and from that of real GPUs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace.bindings.cuda import LEGACY_STREAM, Cuda, CudaRuntime
from headrace.bindings.pymemory import address_of
from headrace.bindings.sysfs import Linux, read_mounts
from headrace.context import Context
from headrace.errors import DeviceError, RouteUnavailable
from headrace.options import Options
from headrace.probing.volume import find_mount
from headrace.reading import write_from
from headrace.testing import FakeCuda, FakeCuFile, FakeDeviceArray, WriteSuite
from headrace.testing.fake_cufile import Mode
from headrace.testing.route_suite import BLOCK, SMALL
from headrace.testing.write_checks import make_data
from tests.engines.fake_buffers import check_cuda_released
from tests.engines.in_folder import InFolder
from tests.engines.test_engine_suite import BUSY_FILLS, BUSY_NBYTES, find_framework
from tests.support import folder_with_direct

SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def temporary_tmpfs() -> Iterator[Path]:
    """A folder in a tmpfs that others may look into, for the length of a block."""
    if find_mount(str(SHARED_MEMORY), read_mounts(Linux())).file_system != "tmpfs":
        pytest.skip(f"{SHARED_MEMORY} is no tmpfs")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def _o_direct(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder_with_direct(tmp_path_factory.mktemp("o_direct"))


class HostWrites(WriteSuite):
    __test__ = False
    unfit_route = "cached"

    def make_context(self, **arguments: Any) -> Context:
        return Context(**arguments)

    def make_buffer(self, data: bytes) -> Any:
        return bytes(data)


class TestHostWrites(HostWrites):
    route = "host"


@pytest.mark.usefixtures("_o_direct")
class TestDirectHostWrites(HostWrites):
    route = "direct"


class DeviceWrites(WriteSuite):
    """Buffers inside larger allocations; 3 bytes of `lead` make the addresses odd."""

    __test__ = False
    unfit_route = "host"
    lead: ClassVar[int] = 3

    @abstractmethod
    def make_busy_buffer(self, data: bytes, stream: int | None = None) -> Any:
        """Make a buffer that holds the bytes once what is queued on a stream is done."""

    def test_user_work_queued_before_the_write_comes_first(self, tmp_path: Path) -> None:
        path, data = tmp_path / "file", make_data(9 * BLOCK)
        with self.make_context(options=SMALL) as context:
            self.check_write(context, path, data)  # what only a first write waits for is over
            for file_offset in (0, 5):
                buffer = self.make_busy_buffer(data)
                write_from(buffer, path, file_offset=file_offset, route=self.route, context=context)
                assert path.read_bytes()[file_offset:] == data


class FakeSources(DeviceWrites):
    """Buffers in the memory of a FakeCuda."""

    __test__ = False

    def setup_method(self) -> None:
        self.cuda = FakeCuda()

    def make_context(self, **arguments: Any) -> Context:
        return Context(**arguments, cuda=self.cuda)

    def make_array(
        self, data: bytes, device: int = 0, stream: int | None = None
    ) -> FakeDeviceArray:
        whole = FakeDeviceArray(self.cuda, len(data) + 2 * self.lead, device, stream)
        part = whole.view(self.lead, len(data))
        if data:
            self.cuda.device_write(part.pointer, data)
        return part

    def make_buffer(self, data: bytes) -> FakeDeviceArray:
        return self.make_array(data)

    def make_busy_buffer(self, data: bytes, stream: int | None = None) -> FakeDeviceArray:
        stream = stream or self.cuda.create_stream()
        buffer = self.make_array(bytes(len(data)), stream=stream)
        self.cuda.enqueue_on(stream, lambda: self.cuda.device_write(buffer.pointer, data))
        return buffer

    def check_released(self, context: Context) -> None:
        super().check_released(context)
        check_cuda_released(self.cuda, context)


class FakeWrites(FakeSources):
    __test__ = False

    def test_work_on_the_legacy_stream_and_on_a_given_one_comes_first_too(
        self, tmp_path: Path
    ) -> None:
        path, data = tmp_path / "file", make_data(9 * BLOCK)
        given = self.cuda.create_stream()
        with self.make_context(options=SMALL) as context:
            for stream in (1, given):
                buffer = self.make_busy_buffer(data, stream)
                buffer.stream = None
                where: dict[str, Any] = {"stream": stream} if stream == given else {}
                write_from(buffer, path, route=self.route, context=context, **where)
                assert path.read_bytes() == data
                path.unlink()

    @pytest.mark.parametrize("number", [1, 2, 9])
    def test_failed_copy_is_a_device_error_and_the_file_is_as_long_as_before(
        self, tmp_path: Path, number: int
    ) -> None:
        path, data = tmp_path / "file", make_data(9 * BLOCK)
        for old in (None, b"old"):
            self.cuda = FakeCuda(fail_copy_at=number)
            if old:
                path.write_bytes(old)
            with self.open_context() as (context, files):
                with pytest.raises(DeviceError, match=f"copy {number} was told to fail"):
                    self.check_write(context, path, data, 3)
                assert not files.open_descriptors
                assert (path.read_bytes() if path.exists() else None) == old
                self.check_write(context, path, data, 3)
            path.unlink()

    def test_without_page_locked_memory_the_bytes_are_right_and_the_report_says_so(
        self, tmp_path: Path
    ) -> None:
        self.cuda = FakeCuda(pinned_limit_nbytes=0)
        with self.open_context() as (context, _):
            report = self.check_write(context, tmp_path / "file", make_data(9 * BLOCK), 5)
        assert any("cudaErrorMemoryAllocation" in each.why for each in report.rejected)
        assert (report.pinned_nbytes, self.cuda.pageable_copies > 0) == (0, True)

    def test_each_byte_is_copied_once(self, tmp_path: Path) -> None:
        with self.open_context() as (context, _):
            self.check_write(context, tmp_path / "file", make_data(40 * BLOCK), 5)
        assert self.cuda.copied_nbytes == 40 * BLOCK

    def test_second_device_is_served_and_the_callers_device_stays_current(
        self, tmp_path: Path
    ) -> None:
        path, data = tmp_path / "file", make_data(9 * BLOCK)
        self.cuda = FakeCuda(devices=2)
        with self.open_context() as (context, _):
            for device in (1, 0, 1):
                array = self.make_array(data, device)
                report = write_from(array, path, route=self.route, context=context)
                assert (path.read_bytes(), report.device) == (data, f"cuda:{device}")
                assert self.cuda.current_device() == 0
                path.unlink()


class TestCachedWrites(FakeWrites):
    route = "cached"


class TestCachedWritesAligned(FakeWrites):
    route = "cached"
    lead = 0


@pytest.mark.usefixtures("_o_direct")
class TestDirectWrites(FakeWrites):
    route = "direct"


@pytest.mark.usefixtures("_o_direct")
class TestDirectWritesAligned(FakeWrites):
    route = "direct"
    lead = 0

    def test_unaligned_bytes_are_those_outside_of_whole_pages(self, tmp_path: Path) -> None:
        with self.open_context() as (context, _):
            for file_offset, nbytes, unaligned in (
                (0, 9 * BLOCK, 0),
                (1, 9 * BLOCK, BLOCK),
                (5, 2 * BLOCK - 10, 2 * BLOCK - 10),
            ):
                report = self.check_write(
                    context, tmp_path / "file", make_data(nbytes), file_offset
                )
                assert report.observed[0].unaligned_nbytes == unaligned


class GdsWrites(FakeWrites):
    __test__ = False
    route = "gds"
    mode: ClassVar[Mode] = "p2p"

    def setup_method(self) -> None:
        super().setup_method()
        self.cufiles: list[FakeCuFile] = []
        self.codes: dict[str, int] = {}

    def make_context(self, **arguments: Any) -> Context:
        files = arguments.get("files")
        self.cufiles.append(FakeCuFile(self.cuda, files, mode=self.mode, codes=self.codes))
        return Context(**arguments, cuda=self.cuda, cufile=self.cufiles[-1])

    def check_released(self, context: Context) -> None:
        super().check_released(context)
        for cufile in self.cufiles:
            assert (cufile.handles, cufile.buffers, cufile.driver_uses) == ({}, {}, 0)
            assert cufile.errors == []

    def test_whole_pages_go_by_the_route_and_the_ends_by_the_page_cache(
        self, tmp_path: Path
    ) -> None:
        folder_with_direct(tmp_path)
        with self.open_context() as (context, files):
            self.check_write(context, tmp_path / "file", make_data(20 * BLOCK + 700), 3)
        ends = BLOCK - 3 + 703
        assert files.buffered_written_nbytes == ends
        assert files.direct_written_nbytes == 20 * BLOCK + 700 - ends

    def test_report_says_what_the_statistics_say(self, tmp_path: Path) -> None:
        with self.open_context() as (context, _):
            report = self.check_write(context, tmp_path / "file", make_data(9 * BLOCK), 3)
        (observed,) = report.to_dict()["observed"]
        assert "cuFile statistics" in observed["evidence"]
        assert ("compatibility mode" in observed["evidence"]) is (self.mode == "compat")

    @pytest.mark.parametrize("number", [1, 2])
    def test_failed_copy_is_a_device_error_and_the_file_is_as_long_as_before(
        self, tmp_path: Path, number: int
    ) -> None:
        """Only the ends are copied."""
        super().test_failed_copy_is_a_device_error_and_the_file_is_as_long_as_before(
            tmp_path, number
        )

    def test_each_byte_is_copied_once(self, tmp_path: Path) -> None:
        """By the ring, those at the ends; by cuFile, the others."""
        with self.open_context() as (context, _):
            self.check_write(context, tmp_path / "file", make_data(40 * BLOCK), 5)
        counters = self.cufiles[-1].read_counters()
        assert counters is not None
        assert (self.cuda.copied_nbytes, counters.written_nbytes) == (BLOCK, 39 * BLOCK)

    def test_without_page_locked_memory_the_bytes_are_right_and_the_report_says_so(
        self, tmp_path: Path
    ) -> None:
        """Nothing is to be said: hardly any byte needs it."""
        self.cuda = FakeCuda(pinned_limit_nbytes=0)
        with self.open_context() as (context, _):
            report = self.check_write(context, tmp_path / "file", make_data(9 * BLOCK), 5)
        assert report.pinned_nbytes == 0

    @pytest.mark.parametrize("call", ["cuFileWrite", "cuFileHandleRegister"])
    def test_failed_call_leaves_the_file_as_long_as_before(self, tmp_path: Path, call: str) -> None:
        path = tmp_path / "file"
        self.codes = {call: 5011}
        with self.open_context() as (context, files):
            with pytest.raises(
                (DeviceError, RouteUnavailable), match=rf"{call} failed: .*\(5011\)"
            ):
                self.check_write(context, path, make_data(9 * BLOCK), 3)
            assert not files.open_descriptors
            assert not path.exists()
            self.cufiles[-1].codes.clear()
            self.check_write(context, path, make_data(9 * BLOCK), 3)

    def test_part_without_a_whole_page_fits_into_a_block(self, tmp_path: Path) -> None:
        with self.open_context(Options(workers=1, block_nbytes=BLOCK, pinned_nbytes=BLOCK)) as (
            context,
            _,
        ):
            self.check_write(context, tmp_path / "file", make_data(2 * BLOCK - 2), 1)


class TestGdsWrites(GdsWrites):
    pass


class TestGdsWritesThroughNvidiaFs(GdsWrites):
    mode = "nvfs"
    lead = 0

    def test_cufile_is_asked_for_whole_pages_alone_also_after_a_short_count(
        self, tmp_path: Path
    ) -> None:
        with self.open_context(short_writes=3 * 512) as (context, files):
            report = self.check_write(context, tmp_path / "file", make_data(9 * BLOCK))
        counters = self.cufiles[-1].read_counters()
        assert counters is not None
        assert ((counters.nvfs_writes or 0) > 0, counters.unaligned_writes) == (True, 0)
        assert files.buffered_written_nbytes > 0
        assert report.observed[0].unaligned_nbytes == 0

    def test_report_tells_what_bounces(self, tmp_path: Path) -> None:
        path, data = tmp_path / "file", make_data(2 << 20)
        with self.open_context() as (context, _):
            straight, ends, shifted = (
                self.check_write(context, path, data[skipped:], file_offset).observed[0].bounce
                for skipped, file_offset in ((0, 0), (5, 0), (0, 5))
            )
        assert straight == ""
        assert ends == "a ring of page-locked blocks (unaligned ends)"
        assert shifted == f"cuFile's own buffers and {ends}"


class TestGdsWritesInCompatibilityMode(GdsWrites):
    mode = "compat"


class InSharedMemory(InFolder, WriteSuite):
    """Files of the tests lie in a tmpfs."""

    __test__ = False
    route = "mapped"

    @pytest.fixture
    def folder(self) -> Iterator[Path]:
        with temporary_tmpfs() as folder:
            yield folder


class MappedWrites(InSharedMemory, FakeWrites):
    __test__ = False

    def check_released(self, context: Context) -> None:
        self.cuda.peak_pinned_nbytes = 0  # of pages of the file, which no budget is for
        super().check_released(context)

    @pytest.mark.parametrize("number", [1])
    def test_failed_copy_is_a_device_error_and_the_file_is_as_long_as_before(
        self, tmp_path: Path, number: int
    ) -> None:
        super().test_failed_copy_is_a_device_error_and_the_file_is_as_long_as_before(
            tmp_path, number
        )

    def test_without_page_locked_memory_the_bytes_are_right_and_the_report_says_so(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        self.cuda = FakeCuda(pinned_limit_nbytes=0)
        with self.open_context() as (context, _):
            with pytest.raises(RouteUnavailable, match="cudaErrorMemoryAllocation"):
                self.check_write(context, path, make_data(9 * BLOCK))
            assert not path.exists()


class TestMappedWrites(MappedWrites):
    pass


class TestMappedWritesAligned(MappedWrites):
    lead = 0


class RealWrites(DeviceWrites):
    """Memory of a real GPU, from torch or CuPy."""

    __test__ = False
    device: ClassVar[int] = 0

    def setup_method(self) -> None:
        self.make_array, self.to_host = find_framework(self.device)
        self.cuda: Cuda = CudaRuntime()

    def make_context(self, **arguments: Any) -> Context:
        return Context(**arguments, cuda=self.cuda)

    def make_buffer(self, data: bytes) -> Any:
        array = self.make_array(len(data) + 2 * self.lead)[self.lead : self.lead + len(data)]
        if data:
            place = array.__cuda_array_interface__["data"][0]
            source, _anchor = address_of(memoryview(data))
            self.cuda.set_device(self.device)
            self.cuda.copy_to_device([(place, source, len(data))], LEGACY_STREAM)
            self.cuda.synchronize_stream(LEGACY_STREAM)
            self.cuda.set_device(0)
        return array

    def make_busy_buffer(self, data: bytes, stream: int | None = None) -> Any:
        source, buffer = self.make_buffer(data), self.make_buffer(bytes(len(data)))
        other = self.make_array(BUSY_NBYTES)
        for _ in range(BUSY_FILLS):
            other[:] = 0
        buffer[:] = source
        return buffer


@pytest.mark.gpu
class TestCachedWritesOnGpu(RealWrites):
    route = "cached"


@pytest.mark.gpu
@pytest.mark.usefixtures("_o_direct")
class TestDirectWritesOnGpu(RealWrites):
    route = "direct"


@pytest.mark.gpu
@pytest.mark.usefixtures("_o_direct")
class TestDirectWritesAlignedOnGpu(RealWrites):
    route = "direct"
    lead = 0


@pytest.mark.gpu
class TestMappedWritesOnGpu(InSharedMemory, RealWrites):
    pass


@pytest.mark.gpu2
class TestCachedWritesOnSecondGpu(RealWrites):
    route = "cached"
    device = 1

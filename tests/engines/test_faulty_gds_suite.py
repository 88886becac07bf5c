"""EngineSuite and WriteSuite on the route gds over the real cuFile, which FaultyCuFile breaks.

The same tests run over FakeCuFile, which knows nothing of the faults there: this shows without a
GPU that they arrive.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bindings.cuda import Cuda
from headrace.context import Context
from headrace.engines.gds_session import GdsLease, GdsSession, process_session
from headrace.testing import FakeCuda, FaultyFiles
from headrace.testing.fake_cufile import FakeCuFile
from headrace.testing.route_suite import BLOCK, SMALL
from headrace.testing.write_checks import make_data
from tests.engines.fake_buffers import FakeBuffers, check_cuda_released
from tests.engines.faulty_cufile import FaultyCuFile
from tests.engines.gds_suite import GdsSuite
from tests.engines.in_folder import InFolder
from tests.engines.test_engine_suite import RealDevice
from tests.engines.test_write_suite import DeviceWrites, FakeSources, RealWrites
from tests.testbed import mounted_testbed


class OneDriver(InFolder):
    """Contexts over one open driver, whose calls FaultyCuFile breaks."""

    __test__ = False
    cuda: Cuda
    lease: GdsLease

    def make_context(self, **arguments: Any) -> Context:
        files = arguments.setdefault("files", FaultyFiles())
        cufile = FaultyCuFile(self.lease.cufile, files)
        return Context(**arguments, cuda=self.cuda, cufile=cufile)

    def check_released(self, context: Context) -> None:
        super().check_released(context)
        cufile = context.bindings.cufile
        assert isinstance(cufile, FaultyCuFile)
        assert (cufile.handles, cufile.buffers, cufile.driver_uses) == ({}, set(), 0)


class FaultyGds(OneDriver, GdsSuite):
    __test__ = False
    mode = "compat"

    @pytest.mark.parametrize("fault", [{}, {"short_reads": 1000}], ids=str)
    def test_statistics_count_each_wanted_byte_once(
        self, tmp_path: Path, fault: dict[str, Any]
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(50 * BLOCK))
        before = self.lease.cufile.read_counters()
        with self.open_context(**fault) as (context, files):
            self.check_read(context, path, 5, 40 * BLOCK)
        after = self.lease.cufile.read_counters()
        assert before is not None
        assert after is not None
        done = after - before
        assert done.read_nbytes == files.nbytes_read == 40 * BLOCK
        assert done.compatibility("reads")

    def test_short_counts_and_interruptions_reach_the_reads_of_cufile(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        with self.open_context(short_reads=BLOCK, eintr_every=2) as (context, files):
            self.check_read(context, path)
        assert files.reads >= 2 * 9 - 1  # without the faults, at most one for each of 4 workers

    def test_large_buffer_gets_the_right_bytes_too(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom((40 << 20) + 13))
        with self.open_context() as (context, _):
            self.check_read(context, path, slack=9)
            self.check_read(context, path, 5, 33 << 20)


class OneFakeDriver(OneDriver):
    __test__ = False
    cuda: FakeCuda

    def setup_method(self) -> None:
        super().setup_method()  # type: ignore[misc]
        self.cufile = FakeCuFile(self.cuda, mode="compat")
        self.lease = GdsSession(self.cufile).lease()

    def teardown_method(self) -> None:
        self.lease.close()
        assert (self.cufile.driver_uses, self.cufile.errors) == (0, [])

    def check_released(self, context: Context) -> None:
        super().check_released(context)
        assert (self.cufile.handles, self.cufile.buffers) == ({}, {})
        check_cuda_released(self.cuda, context)


class FaultyFakeGds(OneFakeDriver, FaultyGds, FakeBuffers):
    __test__ = False


class TestFaultyGds(FaultyFakeGds):
    pass


class TestFaultyGdsAligned(FaultyFakeGds):
    lead = 0


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted_testbed(tmp_path_factory.mktemp("gds")) as folder:
        yield folder


@pytest.fixture(scope="module")
def real_lease(mount: Path) -> Iterator[GdsLease]:
    """The driver of the process, open as long as this module runs: opening it can take 2 s."""
    pytest.importorskip("cuda.bindings.cufile")
    lease = process_session().lease()
    yield lease
    lease.close()


class OneRealDriver(OneDriver):
    __test__ = False

    @pytest.fixture
    def folder(self, mount: Path, real_lease: GdsLease) -> Path:
        """The testbed; the lease comes first, so that cuFile's log does not lie there."""
        return mount

    @pytest.fixture(autouse=True)
    def _lend(self, real_lease: GdsLease) -> None:
        self.lease = real_lease


class RealGds(OneRealDriver, FaultyGds, RealDevice):
    __test__ = False

    def test_contexts_share_the_driver_of_the_process(self, tmp_path: Path) -> None:
        path, held = tmp_path / "file", process_session().leases
        path.write_bytes(os.urandom(9 * BLOCK))
        with Context(SMALL, cuda=self.cuda) as first, Context(SMALL, cuda=self.cuda) as second:
            self.check_read(first, path)
            self.check_read(second, path)
            assert process_session().leases == held + 2
        assert process_session().leases == held


@pytest.mark.gpu
@pytest.mark.root
class TestGdsOnGpu(RealGds):
    pass


@pytest.mark.gpu
@pytest.mark.root
class TestGdsAlignedOnGpu(RealGds):
    lead = 0


class FaultyGdsWrites(OneDriver, DeviceWrites):
    __test__ = False
    route = "gds"

    def test_whole_pages_go_by_the_route_and_the_ends_by_the_page_cache(
        self, tmp_path: Path
    ) -> None:
        ends = BLOCK - 3 + 703
        before = self.lease.cufile.read_counters()
        with self.open_context(short_writes=BLOCK) as (context, files):
            self.check_write(context, tmp_path / "file", make_data(20 * BLOCK + 700), 3)
        after = self.lease.cufile.read_counters()
        assert before is not None
        assert after is not None
        done = after - before
        assert done.written_nbytes == files.direct_written_nbytes == 20 * BLOCK + 700 - ends
        assert files.buffered_written_nbytes == ends
        assert done.compatibility("writes")

    def test_large_buffer_is_written_too(self, tmp_path: Path) -> None:
        with self.open_context() as (context, _):
            self.check_write(context, tmp_path / "file", make_data((33 << 20) + 13), 5)


class TestFaultyGdsWrites(OneFakeDriver, FaultyGdsWrites, FakeSources):
    pass


class RealGdsWrites(OneRealDriver, FaultyGdsWrites, RealWrites):
    __test__ = False


@pytest.mark.gpu
@pytest.mark.root
class TestGdsWritesOnGpu(RealGdsWrites):
    pass


@pytest.mark.gpu
@pytest.mark.root
class TestGdsWritesAlignedOnGpu(RealGdsWrites):
    lead = 0

"""EngineSuite on the route mapped, over FakeCuda and on a GPU; and what only this route does."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import headrace as hr
from headrace.bindings.posix import PosixFiles
from headrace.engines.base import Cargo
from headrace.engines.lanes import Lanes
from headrace.engines.mapped import MappedEngine
from headrace.memory.buffer import Buffer
from headrace.memory.mappings import Mappings
from headrace.planning.plan import Piece, Transfer
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.types import Device, Route
from tests.engines.test_engine_suite import FakeDevice, RealDevice
from tests.support import open_source

BLOCK = 8192
MIB = 1 << 20


class TestMapped(FakeDevice):
    route = "mapped"

    @pytest.mark.parametrize("number", [1])
    def test_failed_copy_is_a_device_error_and_the_context_stays_usable(
        self, tmp_path: Path, number: int
    ) -> None:
        super().test_failed_copy_is_a_device_error_and_the_context_stays_usable(tmp_path, number)

    def test_without_page_locked_memory_the_bytes_are_right_and_the_report_says_so(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        self.cuda = FakeCuda(pinned_limit_nbytes=0)
        with (
            self.open_context() as (context, _),
            pytest.raises(hr.RouteUnavailable, match="cudaErrorMemoryAllocation"),
        ):
            self.check_read(context, path)

    def test_less_page_locked_memory_than_the_budget_is_enough(self, tmp_path: Path) -> None:
        """The route locks the file's own pages: the budget of the ring is not its own."""
        path = tmp_path / "file"
        path.write_bytes(os.urandom(50 * BLOCK))
        with self.open_context(hr.Options(block_nbytes=4096, pinned_nbytes=4096)) as (context, _):
            assert self.check_read(context, path).pinned_nbytes == 0


@pytest.mark.gpu
class TestMappedOnGpu(RealDevice):
    route = "mapped"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(os.urandom(5 * MIB + 123))
    return path


def read(path: Path, context: hr.Context, cuda: FakeCuda, route: str = "auto") -> hr.Report:
    array = FakeDeviceArray(cuda, path.stat().st_size)
    report = hr.read_into(array, path, route=route, context=context)
    assert array.tobytes() == path.read_bytes()
    return report


def routes(report: hr.Report) -> list[str]:
    return [str(each.route) for each in report.observed]


def test_thrift_maps_resident_bytes_and_speed_does_not(model: Path) -> None:
    for policy, route in (("cpu", "mapped"), ("speed", "cached")):
        cuda = FakeCuda()
        with hr.Context(hr.Options(policy=policy), cuda=cuda) as context:  # type: ignore[arg-type]
            assert routes(read(model, context, cuda)) == [route]


def test_nothing_stays_registered_without_a_budget(model: Path) -> None:
    cuda = FakeCuda()
    with hr.Context(cuda=cuda) as context:
        report = read(model, context, cuda, "mapped")
        assert (report.mapped_nbytes, cuda.mapped_nbytes) == (0, 0)


def test_kept_windows_serve_the_next_load_without_a_new_registration(model: Path) -> None:
    cuda, files = FakeCuda(), FaultyFiles()
    options = hr.Options(mapped_nbytes=64 * MIB)
    with hr.Context(options, cuda=cuda, files=files) as context:
        first, second = read(model, context, cuda), read(model, context, cuda)
        assert routes(first) == routes(second) == ["mapped"]
        assert "registered" in first.observed[0].evidence
        assert "kept" in second.observed[0].evidence
        assert files.mapped_nbytes == model.stat().st_size
        assert second.mapped_nbytes == cuda.mapped_nbytes == -(-model.stat().st_size // 4096) * 4096
    assert cuda.mapped_nbytes == 0


def test_budget_too_small_for_the_load_leaves_it_to_the_ring(model: Path) -> None:
    cuda = FakeCuda()
    with hr.Context(hr.Options(mapped_nbytes=MIB), cuda=cuda) as context:
        report = read(model, context, cuda)
        assert (routes(report), report.mapped_nbytes) == (["cached"], 0)


def test_least_recently_used_windows_leave_first(tmp_path: Path) -> None:
    cuda, files = FakeCuda(), FaultyFiles()
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(os.urandom(MIB))
    with hr.Context(hr.Options(mapped_nbytes=2 * MIB), cuda=cuda, files=files) as context:
        for path in (paths[0], paths[1], paths[0], paths[2]):
            assert read(path, context, cuda).mapped_nbytes <= 2 * MIB
        before = files.mapped_nbytes
        read(paths[0], context, cuda)
        assert files.mapped_nbytes == before
        read(paths[1], context, cuda)
        assert files.mapped_nbytes == before + MIB


def test_rewritten_file_is_mapped_anew(model: Path) -> None:
    cuda = FakeCuda()
    with hr.Context(hr.Options(mapped_nbytes=64 * MIB), cuda=cuda) as context:
        read(model, context, cuda)
        model.write_bytes(os.urandom(3 * MIB))
        report = read(model, context, cuda)
        assert "registered" in report.observed[0].evidence
        assert report.mapped_nbytes == 3 * MIB


def test_file_truncated_while_it_is_mapped_kills_nobody(model: Path) -> None:
    cuda = FakeCuda()
    files = FaultyFiles(truncate_after=1, to=0)
    array = FakeDeviceArray(cuda, model.stat().st_size)
    with (
        hr.Context(cuda=cuda, files=files) as context,
        pytest.raises(hr.SourceChanged),
    ):
        hr.read_into(array, model, route="mapped", context=context)


def test_pages_that_cannot_be_registered_are_a_stated_downgrade(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoFilePages(FakeCuda):
        def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
            if read_only:
                raise hr.DeviceError("cudaHostRegister failed: cudaErrorNotSupported (801)")
            super().register_host(pointer, nbytes)

    cuda = NoFilePages()
    with hr.Context(hr.Options(policy="cpu"), cuda=cuda) as context:
        with caplog.at_level(logging.WARNING, logger="headrace"):
            report = read(model, context, cuda)
        assert routes(report) == ["cached"]
        assert "cudaErrorNotSupported" in caplog.text
        assert any("cudaErrorNotSupported" in each.why for each in report.rejected)
    strict = hr.Options(policy="cpu", strict=True)
    with hr.Context(strict, cuda=cuda) as context, pytest.raises(hr.RouteUnavailable):
        read(model, context, cuda)


def test_device_that_cannot_read_registered_pages_has_no_such_route(model: Path) -> None:
    class Old(FakeCuda):
        def device_attribute(self, name: str, device: int) -> int:
            return 0

    cuda = Old()
    with hr.Context(cuda=cuda) as context, pytest.raises(hr.RouteUnavailable, match="HostRegister"):
        read(model, context, cuda, "mapped")


def test_windows_follow_the_file_across_their_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engines.mapped.WINDOW_NBYTES", 64 << 10)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB + 7))
    cuda = FakeCuda()
    with hr.Context(cuda=cuda) as context:
        for file_offset, nbytes in ((0, MIB + 7), (1, MIB), (65_535, 2), (65_536, 65_536)):
            array = FakeDeviceArray(cuda, nbytes)
            hr.read_into(
                array, path, file_offset=file_offset, nbytes=nbytes, route="mapped", context=context
            )
            assert array.tobytes() == path.read_bytes()[file_offset : file_offset + nbytes]
    assert cuda.mapped_nbytes == 0


def test_limit_met_in_the_middle_of_a_load_makes_room_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engines.mapped.WINDOW_NBYTES", 64 << 10)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    cuda = FakeCuda(pinned_limit_nbytes=100 << 10)
    with hr.Context(hr.Options(mapped_nbytes=MIB), cuda=cuda) as context:
        assert routes(read(path, context, cuda)) == ["mapped"]
        assert routes(read(path, context, cuda)) == ["mapped"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_engine_that_fails_leaves_no_copy_on_the_stream_of_the_caller(
    model: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("headrace.engines.mapped.WINDOW_NBYTES", MIB)
    size, cuda = model.stat().st_size, FakeCuda(fail_copy_at=number)
    array, stream = FakeDeviceArray(cuda, size), cuda.create_stream()
    lanes, mappings = Lanes(cuda), Mappings(cuda, PosixFiles(), 64 * MIB)
    buffer = Buffer(array.pointer, size, Device("cuda", 0), array, stream)
    transfer = Transfer(0, Route.MAPPED, "test", (Piece(0, size, 0, 0),))
    with open_source(model) as source:
        cargo = Cargo([transfer], [source], [buffer], 1, BLOCK, stream=stream)
        with pytest.raises(hr.DeviceError, match="told to fail"):
            MappedEngine(cuda, lanes, mappings).run(cargo)
        assert (cuda.pending_copies, cuda.errors) == (0, [])
        assert MappedEngine(cuda, lanes, mappings).run(cargo).nbytes == size
    cuda.synchronize_stream(stream)
    assert array.tobytes() == model.read_bytes()
    mappings.close()
    assert (cuda.mapped_nbytes, cuda.live_events) == (0, 0)

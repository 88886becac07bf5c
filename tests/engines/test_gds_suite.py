"""EngineSuite on the route gds, over FakeCuFile in each of its modes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.context import Context
from headrace.errors import DeviceError, RouteUnavailable
from headrace.probing.fact import Fact
from headrace.reading import read_into
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.fake_cufile import FakeCuFile
from headrace.testing.faulty_files import pages_where
from headrace.testing.route_suite import BLOCK, SMALL
from tests.engines.fake_buffers import FakeBuffers
from tests.engines.gds_suite import GdsSuite


class FakeGds(GdsSuite, FakeBuffers):
    __test__ = False

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
        assert (self.cuda.live_streams, self.cuda.live_events) == (0, 0)
        assert (self.cuda.pinned_nbytes, self.cuda.errors) == (0, [])

    @pytest.mark.parametrize("call", ["cuFileRead", "cuFileHandleRegister"])
    def test_failed_call_is_a_device_error_and_the_context_stays_usable(
        self, tmp_path: Path, call: str
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        self.codes = {call: 5011}
        with self.open_context() as (context, files):
            with pytest.raises(
                (DeviceError, RouteUnavailable), match=rf"{call} failed: .*\(5011\)"
            ):
                self.check_read(context, path)
            assert not files.open_descriptors
            self.cufiles[-1].codes.clear()
            self.check_read(context, path)


class TestGds(FakeGds):
    pass


class TestGdsThroughNvidiaFs(FakeGds):
    mode = "nvfs"


class TestGdsInCompatibilityMode(FakeGds):
    mode = "compat"


class TestGdsAligned(FakeGds):
    lead = 0


def test_context_that_holds_the_driver_is_refused_after_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cuda = tmp_path / "file", FakeCuda()
    path.write_bytes(os.urandom(BLOCK))
    with Context(SMALL, cuda=cuda, cufile=FakeCuFile(cuda)) as context:
        read_into(FakeDeviceArray(cuda, BLOCK), path, route="gds", context=context)
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            with pytest.raises(RouteUnavailable, match="forked"):
                read_into(FakeDeviceArray(cuda, BLOCK), path, route="gds", context=context)


def test_gds_that_fails_before_the_first_byte_leaves_the_load_to_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cuda = tmp_path / "file", FakeCuda()
    path.write_bytes(os.urandom(20 << 20))
    yes = Fact("GPUDirect Storage", True, "made up", "made up")
    monkeypatch.setattr("headrace.equipment.Equipment.gds_fact", lambda *_: yes)
    cufile = FakeCuFile(cuda, codes={"cuFileHandleRegister": 5027})
    files = FaultyFiles(resident=pages_where(lambda _: False))
    array = FakeDeviceArray(cuda, 20 << 20)
    with Context(cuda=cuda, cufile=cufile, files=files) as context:
        report = read_into(array, path, context=context)
    assert array.tobytes() == path.read_bytes()
    assert [str(each.route) for each in report.observed] == ["direct"]
    assert "direct" not in {str(each.route) for each in report.rejected}
    assert any("5027" in each.why for each in report.rejected)

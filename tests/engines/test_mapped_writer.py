"""What only the route mapped has to get right when it writes."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.bindings.posix import Mapping
from headrace.engines import mapped_writer
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.write_checks import make_data, overlay
from tests.engines.test_write_suite import temporary_tmpfs
from tests.support import needs_mount

PAGE = 4096
WINDOW = 4 * PAGE
LARGE = (17 << 20) + 5


@pytest.fixture
def folder() -> Iterator[Path]:
    with temporary_tmpfs() as folder:
        yield folder


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_writer, "WINDOW_NBYTES", WINDOW)


def on_gpu(cuda: FakeCuda, data: bytes) -> FakeDeviceArray:
    array = FakeDeviceArray(cuda, len(data))
    cuda.device_write(array.pointer, data)
    return array


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("file_offset", [0, 1, PAGE - 1, WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("nbytes", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW + 7])
def test_windows_whose_edges_lie_inside_of_pages_change_only_the_range(
    folder: Path, file_offset: int, nbytes: int
) -> None:
    path, cuda, data = folder / "file", FakeCuda(), make_data(nbytes)
    for old in (b"", b"\x55" * 2 * WINDOW, b"\x55" * 9 * WINDOW):
        path.write_bytes(old)
        with hr.Context(cuda=cuda) as context:
            array = on_gpu(cuda, data)
            hr.write_from(array, path, file_offset=file_offset, route="mapped", context=context)
        assert path.read_bytes() == overlay(old, data, file_offset)
        assert (cuda.pinned_nbytes, cuda.errors) == (0, [])


class Changing(FaultyFiles):
    """Somebody changes the file just before, or just after, a window of it is mapped."""

    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None

    def map_for_writing(self, fd: int, file_offset: int, nbytes: int) -> Mapping:
        if self.before:
            self.before()
        mapping = FaultyFiles.map_for_writing(self, fd, file_offset, nbytes)
        if self.after:
            self.after()
        return mapping


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("left", [0, 1, PAGE + 1, WINDOW])
def test_file_that_is_truncated_meanwhile_kills_nobody_and_is_an_error(
    folder: Path, moment: str, left: int
) -> None:
    path, cuda, files = folder / "file", FakeCuda(), Changing()
    setattr(files, moment, lambda: os.truncate(path, left))
    path.write_bytes(b"old" * PAGE)
    array = on_gpu(cuda, make_data(3 * WINDOW))
    with (
        hr.Context(cuda=cuda, files=files) as context,
        pytest.raises(OSError, match=f"truncated to {left} bytes while") as caught,
    ):
        hr.write_from(array, path, route="mapped", context=context)
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))
    assert path.stat().st_size == min(left, 3 * PAGE)
    assert (cuda.pinned_nbytes, cuda.errors, files.open_descriptors) == (0, [], ())


def test_file_that_others_make_longer_meanwhile_is_not_cut(folder: Path) -> None:
    """Not even by the extension that comes before the mapping."""
    path, cuda, data = folder / "file", FakeCuda(), make_data(WINDOW)

    class Raced(FaultyFiles):
        def pwritev(self, fd: int, views: object, file_offset: int) -> int:
            os.truncate(path, 2 * WINDOW)
            return FaultyFiles.pwritev(self, fd, views, file_offset)  # type: ignore[arg-type]

    with hr.Context(cuda=cuda, files=Raced()) as context:
        hr.write_from(on_gpu(cuda, data), path, route="mapped", context=context)
    assert path.read_bytes() == data + bytes(WINDOW)


# What goes another way beside the windows.

MIB = 1 << 20


def small_ring(workers: int) -> hr.Options:
    return hr.Options(workers=workers, block_nbytes=4 * PAGE, pinned_nbytes=8 * PAGE)


def slowly() -> None:
    """Give the worker beside those that map the time to take some."""
    time.sleep(0.004)


@pytest.fixture
def megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_writer, "WINDOW_NBYTES", MIB)


@pytest.mark.usefixtures("megabytes")
@pytest.mark.parametrize("workers", [2, 3, 16])
@pytest.mark.parametrize("file_offset", [0, 3 * MIB + 77])
def test_one_worker_writes_through_the_page_cache_meanwhile_and_the_report_tells_how_much(
    folder: Path, workers: int, file_offset: int
) -> None:
    path, cuda, files, data = folder / "file", FakeCuda(), Changing(), make_data(LARGE)
    files.before, told = slowly, list[hr.Progress]()
    old = b"\x55" * (LARGE + 7 * MIB)
    path.write_bytes(old)
    with hr.Context(small_ring(workers), cuda=cuda, files=files) as context:
        request = context.request(
            "write_from", on_gpu(cuda, data), path, file_offset=file_offset, nbytes=None,
            stream=None, writable=False,
        )  # fmt: skip
        report = context.write(request, progress=told.append)
    assert path.read_bytes() == overlay(old, data, file_offset)
    assert [str(each.route) for each in report.observed] == ["mapped", "cached"]
    mapped, beside = report.observed
    assert min(mapped.nbytes, beside.nbytes) > 0
    assert mapped.nbytes + beside.nbytes == report.nbytes == told[-1].nbytes == LARGE
    assert ("beside what was mapped" in beside.evidence, "ring" in beside.bounce) == (True, True)
    assert (mapped.bounce, report.rejected[0].why) == (
        "",
        "the bytes are in cuda:0, not host memory",
    )
    assert (cuda.pinned_nbytes, cuda.errors, files.open_descriptors) == (0, [], ())


class NoBlocks(FakeCuda):
    """No block of the ring can be registered."""

    def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        if nbytes <= 8 * PAGE:
            raise hr.DeviceError("cudaHostRegister failed: cudaErrorMemoryAllocation (2)")
        super().register_host(pointer, nbytes, read_only=read_only)


@pytest.mark.parametrize(
    ("window", "route", "make_cuda"),
    [(MIB, "mapped", FakeCuda), (4 * MIB, "auto", FakeCuda), (MIB, "auto", NoBlocks)],
    ids=["forced", "few windows", "no page-locked memory"],
)
def test_all_is_mapped_where_the_route_is_forced_or_nothing_is_gained(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    route: str,
    make_cuda: Callable[[], FakeCuda],
) -> None:
    monkeypatch.setattr(mapped_writer, "WINDOW_NBYTES", window)
    path, cuda, files, data = folder / "file", make_cuda(), Changing(), make_data(17 * MIB)
    files.before = slowly
    with hr.Context(small_ring(workers=5), cuda=cuda, files=files) as context:
        report = hr.write_from(on_gpu(cuda, data), path, route=route, context=context)
    assert path.read_bytes() == data
    assert [str(each.route) for each in report.observed] == ["mapped"]
    assert (cuda.pinned_nbytes, cuda.errors) == (0, [])


@pytest.mark.usefixtures("megabytes")
@pytest.mark.parametrize("call", ["pwritev", "map_for_writing"])
def test_disk_that_is_full_for_one_way_ends_the_other(folder: Path, call: str) -> None:
    path, cuda, files = folder / "file", FakeCuda(), Changing(fail={call: errno.ENOSPC})
    path.write_bytes(b"old" * 7 * MIB)
    files.before = slowly
    with (
        hr.Context(small_ring(4), cuda=cuda, files=files) as context,
        pytest.raises(OSError, match="No space left") as caught,
    ):
        hr.write_from(on_gpu(cuda, bytes(LARGE)), path, file_offset=8 * MIB, context=context)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.stat().st_size == 21 * MIB
    assert (cuda.pinned_nbytes, cuda.errors, files.open_descriptors) == (0, [], ())


@pytest.mark.root
@pytest.mark.parametrize("route", ["mapped", "auto"])
@pytest.mark.parametrize("old", [None, 100])
def test_full_tmpfs_is_enospc_and_the_old_length(
    tmp_path: Path, route: str, old: int | None
) -> None:
    needs_mount("-t", "tmpfs", "-o", "size=9m", "none", str(tmp_path))
    try:
        path, cuda = tmp_path / "file", FakeCuda()
        if old:
            path.write_bytes(b"o" * old)
        with hr.Context(cuda=cuda) as context:
            with pytest.raises(OSError, match="No space left") as caught:
                hr.write_from(on_gpu(cuda, bytes(LARGE)), path, route=route, context=context)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
            assert (path.read_bytes() == b"o" * old) if old else not path.exists()
            data = make_data(8 << 20)
            hr.write_from(on_gpu(cuda, data), path, file_offset=5, route=route, context=context)
            assert path.read_bytes()[5:] == data
        assert (cuda.pinned_nbytes, cuda.errors) == (0, [])
    finally:
        os.system(f"umount {tmp_path}")


class FewRegistrations(FakeCuda):
    """Only so many windows of files can be registered; the driver locks no more."""

    left = 2

    def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        if nbytes > 8 * PAGE:  # a window, not a block of the ring
            self.left -= 1
            if self.left < 0:
                raise hr.DeviceError("cudaHostRegister failed: cudaErrorMemoryAllocation (2)")
        super().register_host(pointer, nbytes, read_only=read_only)


def test_registration_that_fails_on_the_way_is_a_stated_downgrade_with_the_right_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapped_writer, "WINDOW_NBYTES", 4 << 20)
    path, cuda, data = folder / "file", FewRegistrations(), make_data(LARGE)
    path.write_bytes(b"old" * LARGE)
    options = hr.Options(workers=2, block_nbytes=4 * PAGE, pinned_nbytes=32 * PAGE)
    with hr.Context(options, cuda=cuda) as context, caplog.at_level(logging.WARNING, "headrace"):
        report = hr.write_from(on_gpu(cuda, data), path, file_offset=7, context=context)
    assert path.read_bytes() == overlay(b"old" * LARGE, data, 7)
    assert [str(each.route) for each in report.observed] == ["cached"]
    assert any("cudaErrorMemoryAllocation" in each.why for each in report.rejected)
    assert "cudaErrorMemoryAllocation" in caplog.text
    assert (cuda.pinned_nbytes, cuda.errors) == (0, [])


def test_forced_route_that_fails_on_the_way_is_unavailable_and_the_file_as_long_as_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_writer, "WINDOW_NBYTES", 4 << 20)
    path, cuda = folder / "file", FewRegistrations()
    with (
        hr.Context(cuda=cuda) as context,
        pytest.raises(hr.RouteUnavailable, match="cudaErrorMemoryAllocation"),
    ):
        hr.write_from(on_gpu(cuda, bytes(LARGE)), path, route="mapped", context=context)
    assert not path.exists()


def test_kernel_that_cannot_back_mappings_leaves_the_write_to_the_ring(folder: Path) -> None:
    path, cuda, data = folder / "file", FakeCuda(), make_data(LARGE)
    files = FaultyFiles(fail={"map_for_writing": errno.EINVAL})
    with hr.Context(cuda=cuda, files=files) as context:
        report = hr.write_from(on_gpu(cuda, data), path, context=context)
    assert path.read_bytes() == data
    assert [str(each.route) for each in report.observed] == ["cached"]


def test_other_file_systems_have_no_such_route(tmp_path: Path) -> None:
    """Elsewhere the kernel has to learn of each change, and a GPU does not tell."""
    path, cuda = tmp_path / "file", FakeCuda()
    with (
        hr.Context(cuda=cuda, files=FaultyFiles()) as context,
        pytest.raises(hr.RouteUnavailable, match="no storage"),
    ):
        hr.write_from(on_gpu(cuda, b"x"), path, route="mapped", context=context)
    assert not path.exists()

"""Saves in the background: what is in the file, where the snapshot was, and how they end."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file as official_save_file
from xxhash import xxh3_64_hexdigest

import headrace as hr
import headrace.numpy as hn
from headrace import saving
from headrace.formats.checksums import stored_checksums
from headrace.formats.safetensors import read_catalog
from headrace.saving import Manner
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.types import Device
from tests.fake_cupy import installed
from tests.library import Library
from tests.support import PAGE, TIMEOUT_S, HeldFiles, RecordedSystem, folder_with_direct, run_python

SIZE = 50_001
BLOCK = 4 * PAGE
SMALL = hr.Options(workers=3, block_nbytes=BLOCK, pinned_nbytes=4 * BLOCK)
OLD = {"old": np.arange(1000.0)}
BEFORE, AFTER = 7, 9
TMPFS = RecordedSystem({"/proc/self/mountinfo": "21 1 0:20 / / rw - tmpfs tmpfs rw\n"})
"""Where a GPU may write into pages of a file."""
AT_ONCE = 4
"""Threads that make submitted transfers."""


class Arena(FakeDeviceArray):
    """Memory from a `Recycler`; `FakeCuda` takes note if a copy is still to come."""

    def __init__(self, cuda: FakeCuda, nbytes: int, device: int) -> None:
        super().__init__(cuda, nbytes, device)
        weakref.finalize(self, cuda.device_free, self.pointer)


class Recycler(Library):
    """A library whose memory is freed with the arrays."""

    def __init__(self, cuda: FakeCuda, stream: int | None = None) -> None:
        super().__init__(cuda, stream)
        self.arenas: list[weakref.ref[Arena]] = []

    @property
    def live_arenas(self) -> int:
        return sum(ref() is not None for ref in self.arenas)

    def empty(self, spec: Any, device: Device) -> FakeDeviceArray:
        super().empty(spec, device)
        arena = Arena(self.cuda, spec.file_range.nbytes, device.index)
        self.arenas.append(weakref.ref(arena))
        return arena


def save_file_async(
    library: Library,
    tensors: Any,
    path: Any,
    context: hr.Context,
    metadata: Any = None,
    **options: Any,
) -> hr.TransferFuture:
    progress, stream = options.pop("progress", False), options.pop("stream", None)
    return saving.save_file_async(
        library,
        tensors,
        path,
        metadata,
        Manner(**options),
        progress=progress,
        stream=stream,
        context=context,
    )


def filled(cuda: FakeCuda, value: int, nbytes: int = SIZE, device: int = 0) -> FakeDeviceArray:
    array = FakeDeviceArray(cuda, nbytes, device)
    array.fill(value)
    return array


def bytes_of(path: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(path).items()}


@pytest.fixture
def files() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.let_go.set()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [each for each in threading.enumerate() if each.name.startswith("headrace")]
    for each in left:
        each.join(TIMEOUT_S)
    assert not [each for each in left if each.is_alive()]


# What is in the file.


def test_arrays_may_be_changed_once_the_call_has_returned(tmp_path: Path, files: HeldFiles) -> None:
    tensors = {
        "big": np.arange(SIZE, dtype=np.float32),
        "strided": np.arange(600.0).reshape(20, 30)[:, ::3],
        "swapped": np.arange(9, dtype=">i4"),
        "one": np.array(3.5),
        "none": np.zeros((0, 3)),
    }
    official_save_file(
        {n: np.array(a, a.dtype.newbyteorder("="), order="C") for n, a in tensors.items()},
        tmp_path / "official",
        metadata={"a": "b"},
    )
    metadata = {"a": "b"}
    with hr.Context(files=files) as context:
        future = hn.save_file_async(tensors, tmp_path / "ours", metadata, context=context)
        for array in tensors.values():
            array[...] = 0
        metadata["a"] = "changed"
        tensors.clear()
        files.let_go.set()
        report = future.result(TIMEOUT_S)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "official").read_bytes()
    assert report.snapshot is not None
    nbytes = 4 * SIZE + 8 * 200 + 4 * 9 + 8
    assert (report.snapshot.device, report.snapshot.nbytes, report.nbytes) == (
        *("cpu", nbytes),
        nbytes,
    )


@pytest.mark.parametrize("free", [None, 0], ids=["device", "host"])
@pytest.mark.parametrize("checksum", [False, True])
def test_file_has_what_is_queued_before_and_nothing_of_what_is_queued_after(
    tmp_path: Path, files: HeldFiles, free: int | None, checksum: bool
) -> None:
    cuda = FakeCuda(free_nbytes=free)
    stream, array, ran = cuda.create_stream(), filled(cuda, 0), []
    cuda.enqueue_on(stream, lambda: array.fill(BEFORE))
    with hr.Context(SMALL, cuda=cuda, files=files) as context:
        future = save_file_async(
            Recycler(cuda), {"a": array}, tmp_path / "a", context, stream=stream, checksum=checksum
        )
        cuda.enqueue_on(stream, lambda: array.fill(AFTER))
        cuda.enqueue_on(stream, lambda: ran.append(1))
        assert cuda.pending_copies == (free is None)
        files.let_go.set()
        future.result(TIMEOUT_S)
        assert ran == []
    assert bytes_of(tmp_path / "a") == {"a": bytes([BEFORE]) * SIZE}
    assert set(stored_checksums(read_catalog(str(tmp_path / "a"))).values()) == (
        {xxh3_64_hexdigest(bytes([BEFORE]) * SIZE)} if checksum else set()
    )
    assert cuda.errors == []


@pytest.mark.parametrize("free", [None, 0], ids=["device", "host"])
def test_without_a_stream_anybody_may_change_the_tensors(
    tmp_path: Path, files: HeldFiles, free: int | None
) -> None:
    cuda = FakeCuda(2, free_nbytes=free)
    current = cuda.create_stream()
    array, host = filled(cuda, 0), np.full(SIZE, BEFORE, np.uint8)
    cuda.enqueue_on(current, lambda: array.fill(BEFORE))
    with hr.Context(SMALL, cuda=cuda, files=files) as context:
        tensors = {"gpu": array, "host": host}
        future = save_file_async(Recycler(cuda, current), tensors, tmp_path / "a", context)
        assert cuda.pending_copies == 0
        array.fill(AFTER)  # past every stream
        host[:] = AFTER
        files.let_go.set()
        future.result(TIMEOUT_S)
    wanted = bytes([BEFORE]) * SIZE
    assert bytes_of(tmp_path / "a") == {"gpu": wanted, "host": wanted}
    assert cuda.errors == []


def test_tensors_of_two_devices_and_the_host_go_into_one_file(tmp_path: Path) -> None:
    cuda = FakeCuda(2)
    rng = np.random.default_rng(1)
    wanted: dict[str, bytes] = {}
    held: dict[str, Any] = {}
    for number, nbytes in enumerate((70_001, 0, 17, 60_003, 4 * PAGE, 1, 0, 5, 8)):
        name, content = f"tensor.{number}", rng.bytes(nbytes)
        wanted[name] = content
        if number % 3 == 2:
            held[name] = np.frombuffer(content, np.uint8)
        else:
            held[name] = FakeDeviceArray(cuda, nbytes, number % 3)
            if nbytes:
                cuda.device_write(held[name].pointer, content)
    with hr.Context(SMALL, cuda=cuda) as context:
        library = Recycler(cuda)
        report = save_file_async(library, held, tmp_path / "a", context).result(TIMEOUT_S)
        assert library.entered == [(None, Device("cuda", 0)), (None, Device("cuda", 1))]
    assert bytes_of(tmp_path / "a") == wanted
    assert report.snapshot is not None
    assert report.snapshot.device == "cuda:0, cpu, cuda:1"
    assert sorted(report.device.split(", ")) == ["cpu", "cuda:0", "cuda:1"]
    assert report.snapshot.nbytes == report.nbytes == sum(map(len, wanted.values()))
    assert cuda.errors == []


@pytest.mark.parametrize("route", ["auto", "cached", "direct", "mapped"])
@pytest.mark.parametrize("align", [False, True])
def test_many_tensors_become_the_official_file(tmp_path: Path, route: str, align: bool) -> None:
    folder, cuda, rng = folder_with_direct(tmp_path), FakeCuda(), np.random.default_rng(2)
    contents = {
        f"t{number}": np.frombuffer(rng.bytes(nbytes), np.uint8)
        for number, nbytes in enumerate([*rng.integers(0, 3000, 300), 2 * PAGE, 10 * PAGE])
    }
    held = {name: FakeDeviceArray(cuda, each.nbytes) for name, each in contents.items()}
    for name, array in held.items():
        if array.nbytes:
            cuda.device_write(array.pointer, contents[name].tobytes())
    system = TMPFS if route == "mapped" else None
    with hr.Context(SMALL, cuda=cuda, system=system) as context:
        future = save_file_async(
            Recycler(cuda), held, folder / "a", context, {"a": "b"}, route=route, align=align
        )
        report = future.result(TIMEOUT_S)
    assert route in ("auto", *(str(each.route) for each in report.observed))
    official_save_file(contents, folder / "official", metadata={"a": "b"})
    if align:
        found = {spec.name: spec for spec in read_catalog(str(folder / "a")).tensors}
        assert found["t300"].file_range.start % PAGE == 0
        assert bytes_of(folder / "a") == bytes_of(folder / "official")
    else:
        assert (folder / "a").read_bytes() == (folder / "official").read_bytes()
    assert cuda.errors == []


@pytest.mark.parametrize(
    ("free", "idle", "full", "device"),
    [
        (None, 0, False, "cuda:1"),
        (0, 1 << 20, False, "cuda:1"),
        (0, 0, False, "cpu"),
        (None, 0, True, "cpu"),
    ],
    ids=["free", "idle", "neither", "out of memory"],
)
def test_arrays_of_cupy_are_copied_into_memory_of_its_pool(
    tmp_path: Path, free: int | None, idle: int, full: bool, device: str
) -> None:
    cuda = FakeCuda(2, free_nbytes=free)
    wanted = np.arange(600.0).reshape(20, 30)
    with installed(cuda) as (cupy, hc), hr.Context(SMALL, cuda=cuda) as context:
        cupy.idle[1] = idle
        with cupy.cuda.Device(1):
            array = cupy.array(wanted)
            cupy.current[1] = cuda.create_stream()
        cupy.is_full = full
        tensors = {"strided": array.view(np.s_[:, ::3]), "whole": array}
        future = hc.save_file_async(tensors, tmp_path / "a", context=context)
        array.put(0)
        report = future.result(TIMEOUT_S)
        assert report.snapshot.device == device
    found = load_file(tmp_path / "a")
    assert np.array_equal(found["whole"], wanted)
    assert np.array_equal(found["strided"], wanted[:, ::3])
    assert cuda.errors == []


# The snapshot.


@pytest.mark.parametrize(
    ("free", "idle", "fails_at", "device"),
    [
        (None, 0, -1, "cuda:1"),
        (0, 1 << 20, -1, "cuda:1"),
        (SIZE, 0, -1, "cpu"),
        (None, 0, 0, "cpu"),
    ],
    ids=["free", "idle", "too little", "out of memory"],
)
def test_report_says_where_the_snapshot_was_and_what_it_cost(
    tmp_path: Path, free: int | None, idle: int, fails_at: int, device: str
) -> None:
    cuda = FakeCuda(2, free_nbytes=free)
    library = Recycler(cuda)
    library.idle, library.fails_at = idle, fails_at
    with hr.Context(SMALL, cuda=cuda) as context, hr.trace() as trace:
        began = time.perf_counter()
        tensors = {"a": filled(cuda, BEFORE, device=1)}
        future = save_file_async(library, tensors, tmp_path / "a", context)
        returned = time.perf_counter()
        report = future.result(TIMEOUT_S)
    assert bytes_of(tmp_path / "a") == {"a": bytes([BEFORE]) * SIZE}
    assert report.snapshot is not None
    assert (report.snapshot.device, report.snapshot.nbytes) == (device, SIZE)
    assert 0 < report.snapshot.seconds < returned - began
    assert f"; snapshot of 50 kB on {device} in " in str(report)
    assert report.to_dict()["snapshot"] == {
        "device": device,
        "nbytes": SIZE,
        "seconds": report.snapshot.seconds,
    }
    assert (report.device, report.operation, report.durable) == (device, "write", True)
    assert trace.reports == [report]
    assert cuda.errors == []


def test_snapshot_in_host_memory_stays_within_the_pinned_budget(tmp_path: Path) -> None:
    cuda = FakeCuda(free_nbytes=0)
    tensors = {f"t{number}": filled(cuda, number, 20 * BLOCK + number) for number in range(5)}
    with hr.Context(SMALL, cuda=cuda) as context:
        save_file_async(Recycler(cuda), tensors, tmp_path / "a", context).result(TIMEOUT_S)
    assert 0 < cuda.peak_pinned_nbytes <= SMALL.pinned_nbytes
    assert cuda.pageable_copies == 0
    assert bytes_of(tmp_path / "a") == {name: each.tobytes() for name, each in tensors.items()}


def test_save_of_tensors_themselves_has_no_snapshot(tmp_path: Path) -> None:
    report = hn.save_file(OLD, tmp_path / "a")
    assert (report.snapshot, report.to_dict()["snapshot"]) == (None, None)
    assert "snapshot" not in str(report)


def test_snapshot_is_freed_when_the_result_is_given_though_the_handle_is_kept(
    tmp_path: Path,
) -> None:
    cuda = FakeCuda(2)
    library = Recycler(cuda)
    with hr.Context(SMALL, cuda=cuda) as context:
        tensors = {"a": filled(cuda, 1), "b": filled(cuda, 2, device=1)}
        futures = [
            save_file_async(library, tensors, tmp_path / str(number), context)
            for number in range(10)
        ]
        for future in futures:
            future.result(TIMEOUT_S)
        assert (len(library.arenas), library.live_arenas) == (20, 0)
    assert cuda.errors == []


def test_failed_save_keeps_its_snapshot_no_longer_than_its_handle(tmp_path: Path) -> None:
    """Without the garbage collector: memory of a GPU must not wait for it."""
    cuda = FakeCuda()
    library = Recycler(cuda)
    with hr.Context(SMALL, cuda=cuda, files=FaultyFiles(enospc_after=9)) as context:
        future = save_file_async(library, {"a": filled(cuda, 1)}, tmp_path / "a", context)
        with pytest.raises(OSError, match="ENOSPC") as caught:
            future.result(TIMEOUT_S)
        del caught, future
        assert (len(library.arenas), library.live_arenas) == (1, 0)
    assert cuda.errors == []


@pytest.mark.parametrize("free", [None, 0], ids=["device", "host"])
def test_callers_tensors_are_not_kept_alive(
    tmp_path: Path, files: HeldFiles, free: int | None
) -> None:
    cuda = FakeCuda(free_nbytes=free)
    tensors: dict[str, Any] = {"gpu": filled(cuda, 1), "host": np.full(SIZE, 2, np.uint8)}
    tensors["empty"] = FakeDeviceArray(cuda, 0)
    gone = [weakref.ref(array) for array in tensors.values()]
    with hr.Context(SMALL, cuda=cuda, files=files) as context:
        future = save_file_async(Recycler(cuda), tensors, tmp_path / "a", context)
        tensors.clear()
        files.wait_for(1)
        assert [ref() for ref in gone] == [None] * 3
        files.let_go.set()
        future.result(TIMEOUT_S)
    assert bytes_of(tmp_path / "a") == {
        "gpu": b"\x01" * SIZE,
        "host": b"\x02" * SIZE,
        "empty": b"",
    }


# How it is saved.


def test_save_without_fsync_says_so(tmp_path: Path) -> None:
    files = FaultyFiles()
    with hr.Context(files=files) as context:
        report = hn.save_file_async(OLD, tmp_path / "a", fsync=False, context=context).result()
    assert (report.durable, files.synced) == (False, [])
    assert "not synced to storage" in str(report)


def test_checksums_of_arrays_are_right(tmp_path: Path) -> None:
    hn.save_file_async(OLD, tmp_path / "a", {"k": "v"}, checksum=True).result(TIMEOUT_S)
    assert np.array_equal(hn.load_file(tmp_path / "a", verify=True)["old"], OLD["old"])
    catalog = read_catalog(str(tmp_path / "a"))
    assert stored_checksums(catalog) == {"old": xxh3_64_hexdigest(OLD["old"].tobytes())}
    assert set(catalog.metadata) == {"k", "headrace.xxh3_64.old"}


def test_progress_is_told_in_another_thread_and_reaches_the_end(tmp_path: Path) -> None:
    told: list[tuple[int, int, bool]] = []

    def note(done: hr.Progress) -> None:
        here = threading.current_thread() is threading.main_thread()
        told.append((done.nbytes, done.total_nbytes, here))

    hn.save_file_async(OLD, tmp_path / "a", progress=note).result(TIMEOUT_S)
    assert told[-1] == (8000, 8000, False)


def test_progress_that_raises_fails_the_save_and_keeps_the_old_file(tmp_path: Path) -> None:
    def refuse(done: hr.Progress) -> None:
        raise LookupError("enough")

    hn.save_file(OLD, tmp_path / "a")
    future = hn.save_file_async({"b": np.zeros(9)}, tmp_path / "a", progress=refuse)
    with pytest.raises(LookupError, match="enough"):
        future.result(TIMEOUT_S)
    assert bytes_of(tmp_path / "a") == {"old": OLD["old"].tobytes()}
    assert os.listdir(tmp_path) == ["a"]


def test_relative_path_means_the_folder_of_the_call(
    tmp_path: Path, files: HeldFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "before")
    with hr.Context(files=files) as context:
        future = hn.save_file_async(OLD, "a", context=context)
        monkeypatch.chdir(tmp_path / "after")
        files.let_go.set()
        future.result(TIMEOUT_S)
    assert (os.listdir(tmp_path / "before"), os.listdir(tmp_path / "after")) == (["a"], [])


def test_save_is_awaited(tmp_path: Path) -> None:
    async def work() -> hr.Report:
        return await hn.save_file_async(OLD, tmp_path / "a")

    assert asyncio.run(work()).nbytes == 8000


# What goes wrong.


@pytest.mark.parametrize(
    ("tensors", "metadata", "error"),
    [
        ([np.zeros(2)], None, ValueError),
        ({"a": None}, None, ValueError),
        ({"a": np.zeros(2, object)}, None, hr.FormatError),
        ({"__metadata__": np.zeros(2)}, None, hr.FormatError),
        ({"\ud800": np.zeros(2)}, None, hr.FormatError),
        ({1: np.zeros(2)}, None, TypeError),
        ({"a": np.zeros(2)}, {"a": 1}, TypeError),
        ({"a": np.zeros(2)}, "text", TypeError),
    ],
    ids=repr,
)
@pytest.mark.parametrize("checksum", [False, True])
def test_what_the_format_forbids_is_told_by_the_call(
    tmp_path: Path, tensors: Any, metadata: Any, error: type[Exception], checksum: bool
) -> None:
    with pytest.raises(error):
        hn.save_file_async(tensors, tmp_path / "a", metadata, checksum=checksum)
    assert os.listdir(tmp_path) == []


def test_what_else_is_wrong_with_the_call_is_told_by_the_call(tmp_path: Path) -> None:
    cuda = FakeCuda(2)
    stream, library = cuda.create_stream(), Recycler(cuda)
    tensors = {"a": filled(cuda, 1, device=1)}
    with hr.Context(SMALL, cuda=cuda) as context:
        with pytest.raises(ValueError, match=r"belongs to cuda:0, but the memory is on cuda:1"):
            save_file_async(library, tensors, tmp_path / "a", context, stream=stream)
        with pytest.raises(TypeError, match="pass a torch"):
            save_file_async(library, tensors, tmp_path / "a", context, stream="nonsense")
        with pytest.raises(ValueError, match="route 'fast' does not exist"):
            save_file_async(library, tensors, tmp_path / "a", context, route="fast")
        with pytest.raises(TypeError):
            save_file_async(library, tensors, 7, context)
    with pytest.raises(ValueError, match="the context is closed"):
        save_file_async(library, tensors, tmp_path / "a", context)
    assert (os.listdir(tmp_path), library.arenas, cuda.errors) == ([], [], [])


def test_checksums_without_xxhash_are_an_import_error_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"extra \[checksum\]"):
        hn.save_file_async(OLD, tmp_path / "a", checksum=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"enospc_after": 30_000}, errno.ENOSPC),
        ({"enospc_after": 10}, errno.ENOSPC),
        ({"write_eio_at": 20_000}, errno.EIO),
        ({"fail": {"create": errno.EACCES}}, errno.EACCES),
        ({"fail": {"sync": errno.EIO}}, errno.EIO),
        ({"fail": {"rename": errno.EIO}}, errno.EIO),
    ],
    ids=str,
)
def test_failure_of_the_file_is_told_by_the_result_and_the_old_file_stays(
    tmp_path: Path, faults: dict[str, Any], code: int
) -> None:
    path, cuda = tmp_path / "model", FakeCuda()
    hn.save_file(OLD, path)
    library = Recycler(cuda)
    with hr.Context(SMALL, cuda=cuda, files=FaultyFiles(**faults)) as context:
        future = save_file_async(library, {"a": filled(cuda, 1)}, path, context)
        with pytest.raises(OSError, match="model") as caught:
            future.result(TIMEOUT_S)
    assert caught.value.errno == code
    assert bytes_of(path) == {"old": OLD["old"].tobytes()}
    assert (os.listdir(tmp_path), cuda.errors) == (["model"], [])


def test_directory_and_missing_folder_are_told_by_the_result(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        hn.save_file_async(OLD, tmp_path).result(TIMEOUT_S)
    with pytest.raises(FileNotFoundError, match="missing"):
        hn.save_file_async(OLD, tmp_path / "missing" / "a").result(TIMEOUT_S)
    with pytest.raises(hr.RouteUnavailable, match="gds"):
        hn.save_file_async(OLD, tmp_path / "a", route="gds").result(TIMEOUT_S)
    assert os.listdir(tmp_path) == []


def test_forced_route_has_to_serve_where_the_snapshot_is(tmp_path: Path) -> None:
    cuda = FakeCuda(free_nbytes=0)
    with hr.Context(SMALL, cuda=cuda) as context:
        tensors = {"a": filled(cuda, 1)}
        future = save_file_async(Recycler(cuda), tensors, tmp_path / "a", context, route="cached")
        with pytest.raises(hr.RouteUnavailable, match="host memory"):
            future.result(TIMEOUT_S)
        save_file_async(Recycler(cuda), tensors, tmp_path / "b", context, route="host").result()
    assert os.listdir(tmp_path) == ["b"]


def test_copy_that_the_gpu_refuses_is_a_device_error_of_the_call(tmp_path: Path) -> None:
    cuda = FakeCuda(fail_copy_at=1)
    with hr.Context(SMALL, cuda=cuda) as context:
        with pytest.raises(hr.DeviceError, match="copy 1 was told to fail"):
            save_file_async(Recycler(cuda), {"a": filled(cuda, 1)}, tmp_path / "a", context)
        assert os.listdir(tmp_path) == []
    assert cuda.errors == []


# The end.


def test_queued_save_is_cancelled_and_its_snapshot_freed(tmp_path: Path, files: HeldFiles) -> None:
    cuda = FakeCuda()
    stream = cuda.create_stream()
    library = Recycler(cuda, stream)
    with hr.Context(SMALL, cuda=cuda, files=files) as context:
        busy = [
            hn.save_file_async(OLD, tmp_path / f"busy{number}", context=context)
            for number in range(AT_ONCE)
        ]
        files.wait_for(AT_ONCE)
        future = save_file_async(library, {"a": filled(cuda, 1)}, tmp_path / "a", context)
        assert (library.live_arenas, cuda.live_events) == (1, 1)
        assert (future.cancel(), future.cancelled()) == (True, True)
        assert (library.live_arenas, cuda.live_events) == (0, 0)
        with pytest.raises(CancelledError):
            future.result()
        files.let_go.set()
        for each in busy:
            each.result(TIMEOUT_S)
    assert sorted(os.listdir(tmp_path)) == [f"busy{number}" for number in range(AT_ONCE)]
    cuda.destroy_stream(stream)
    assert (cuda.errors, cuda.live_streams) == ([], 0)


def test_closing_the_context_finishes_the_saves(tmp_path: Path, files: HeldFiles) -> None:
    cuda = FakeCuda()
    library, array = Recycler(cuda), filled(cuda, BEFORE)
    context = hr.Context(SMALL, cuda=cuda, files=files)
    for number in range(AT_ONCE + 2):
        save_file_async(library, {"a": array}, tmp_path / str(number), context)
    array.fill(AFTER)
    closing = threading.Thread(target=context.close)
    closing.start()
    files.wait_for(AT_ONCE)
    assert closing.is_alive()
    files.let_go.set()
    closing.join(TIMEOUT_S)
    for number in range(AT_ONCE + 2):
        assert bytes_of(tmp_path / str(number)) == {"a": bytes([BEFORE]) * SIZE}
    assert library.live_arenas == 0
    assert (cuda.errors, cuda.live_streams, cuda.live_events, cuda.pinned_nbytes) == ([], 0, 0, 0)


EXIT = """
import sys, time
import numpy as np
import headrace as hr
import headrace.numpy as hn
from headrace.testing import FaultyFiles

class SlowFiles(FaultyFiles):
    def create(self, path, mode):
        time.sleep(0.3)
        return super().create(path, mode)

array = np.full(9 << 20, 7, np.uint8)
context = hr.Context(files=SlowFiles())
future = hn.save_file_async({"a": array}, sys.argv[1], checksum=True, context=context)
array[:] = 9
print(future.done())
"""


def test_process_does_not_end_before_its_saves(tmp_path: Path) -> None:
    assert run_python(EXIT, str(tmp_path / "a")) == "False\n"
    assert bytes_of(tmp_path / "a") == {"a": b"\x07" * (9 << 20)}
    assert os.listdir(tmp_path) == ["a"]


# The same path again.


def test_of_two_saves_to_the_same_path_the_later_one_wins(tmp_path: Path, files: HeldFiles) -> None:
    path, tensors = tmp_path / "a", {"a": np.full(SIZE, 1, np.uint8)}
    (tmp_path / "link").symlink_to(path)
    with hr.Context(files=files) as context:
        first = hn.save_file_async(tensors, path, context=context)
        files.wait_for(1)
        small = hn.save_file_async(
            {"a": np.full(1, 2, np.uint8)}, tmp_path / "link", context=context
        )
        elsewhere = hn.save_file_async(
            {"a": np.ones(1)}, tmp_path / "b", fsync=False, context=context
        )
        files.let_go.set()
        assert [each.result(TIMEOUT_S).nbytes for each in (first, small)] == [SIZE, 1]
        elsewhere.result(TIMEOUT_S)
    assert bytes_of(path)["a"] == b"\x02"
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "link"]


def test_last_rename_wins_over_a_save_that_ended_before(tmp_path: Path, files: HeldFiles) -> None:
    path = tmp_path / "a"
    with hr.Context(files=files) as context:
        future = hn.save_file_async({"a": np.ones(SIZE)}, path, context=context)
        files.wait_for(1)
        hn.save_file(OLD, path)
        assert list(bytes_of(path)) == ["old"]
        files.let_go.set()
        future.result(TIMEOUT_S)
    assert list(bytes_of(path)) == ["a"]
    assert os.listdir(tmp_path) == ["a"]


def test_save_at_once_after_one_in_the_background_leaves_one_of_both(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a", {"a": np.full(1 << 20, 1, np.uint8)}
    for _ in range(5):
        future = hn.save_file_async(tensors, path, fsync=False)
        hn.save_file(OLD, path, fsync=False)
        future.result(TIMEOUT_S)
        assert bytes_of(path) in (
            {"a": b"\x01" * (1 << 20)},
            {"old": OLD["old"].tobytes()},
        )
        assert os.listdir(tmp_path) == ["a"]


def test_saves_of_many_threads_share_a_context(tmp_path: Path) -> None:
    cuda = FakeCuda()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            stream, array = cuda.create_stream(), filled(cuda, 0)
            for turn in range(5):
                path, value = tmp_path / f"{number}.{turn}", 10 * number + turn
                cuda.enqueue_on(stream, lambda value=value: array.fill(value))  # type: ignore[misc]
                future = save_file_async(
                    Recycler(cuda), {"a": array}, path, context, stream=stream, fsync=False
                )
                cuda.enqueue_on(stream, lambda: array.fill(0))
                future.result(TIMEOUT_S)
                assert bytes_of(path) == {"a": bytes([value]) * SIZE}
        except BaseException as failure:  # noqa: BLE001 (raised again below)
            failures.append(failure)

    with hr.Context(SMALL, cuda=cuda) as context:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert failures == []
    assert (cuda.errors, cuda.live_events) == ([], 0)

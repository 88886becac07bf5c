"""What is queued on a stream comes before a transfer, and nothing else waits for anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.bindings.cuda import Copy
from headrace.testing import FakeCuda, FakeCuFile, FakeDeviceArray, FaultyFiles
from tests.support import TIMEOUT_S, RecordedSystem, folder_with_direct, write_random

SIZE = 150_007
SMALL = hr.Options(workers=2, block_nbytes=16384, pinned_nbytes=65536)
ROUTES = ("cached", "direct", "gds", "mapped")
BEFORE, AFTER = 0x11, 0x22

each_route = pytest.mark.parametrize("route", ROUTES)
each_way = pytest.mark.parametrize("submit", [False, True], ids=["now", "submitted"])


class WatchedCuda(FakeCuda):
    """Notes what is put on which stream."""

    def __init__(self, devices: int = 1, **faults: Any) -> None:
        super().__init__(devices, **faults)
        self.told: list[tuple[str, int]] = []

    def wait_event(self, stream: int, event: int) -> None:
        self.told.append(("wait", stream))
        super().wait_event(stream, event)

    def synchronize_stream(self, stream: int) -> None:
        self.told.append(("synchronize", stream))
        super().synchronize_stream(stream)

    def copy_to_device(self, copies: Sequence[Copy], stream: int) -> None:
        self.told.append(("copy", stream))
        super().copy_to_device(copies, stream)

    def copy_to_host(self, copies: Sequence[Copy], stream: int) -> None:
        self.told.append(("copy", stream))
        super().copy_to_host(copies, stream)

    def on(self, stream: int) -> set[str]:
        """What headrace did with a stream, other than marking a moment on it."""
        return {call for call, where in self.told if where == stream}


class HeldFiles(FaultyFiles):
    """Files of which nothing is known before they are let go."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.let_go = threading.Event()
        self.let_go.set()

    def path_status(self, path: str) -> Any:
        assert self.let_go.wait(TIMEOUT_S)
        return super().path_status(path)


class Rig:
    """A context over fakes, and a file."""

    def __init__(self, path: Path, devices: int = 1, **faults: Any) -> None:
        self.path, self.content = path, write_random(path, SIZE)
        self.cuda, self.files = WatchedCuda(devices), HeldFiles(**faults)
        self.cufile = FakeCuFile(self.cuda, self.files)
        # Only there the GPU may write into pages of a file.
        system = RecordedSystem({"/proc/self/mountinfo": "21 1 0:20 / / rw - tmpfs tmpfs rw\n"})
        self.context = hr.Context(
            SMALL, cuda=self.cuda, files=self.files, cufile=self.cufile, system=system
        )

    def array(self, device: int = 0) -> FakeDeviceArray:
        return FakeDeviceArray(self.cuda, SIZE, device)

    def fill(self, stream: int, array: FakeDeviceArray, value: int) -> None:
        self.cuda.enqueue_on(stream, lambda: array.fill(value))

    def later(self, stream: int) -> list[int]:
        """Queue work that nobody needs; the list tells whether it ran."""
        ran: list[int] = []
        self.cuda.enqueue_on(stream, lambda: ran.append(1))
        return ran

    def read(self, submit: bool, array: Any, **arguments: Any) -> hr.Report:
        """Read; where it is submitted, nothing of it happens before the caller goes on."""
        if not submit:
            return hr.read_into(array, self.path, context=self.context, **arguments)
        return self._held(lambda: self.context.submit_read(array, self.path, **arguments))

    def write(self, submit: bool, array: Any, **arguments: Any) -> hr.Report:
        if not submit:
            return hr.write_from(array, self.path, context=self.context, **arguments)
        return self._held(lambda: self.context.submit_write(array, self.path, **arguments))

    def _held(self, submit: Callable[[], hr.TransferFuture]) -> hr.Report:
        self.files.let_go.clear()
        try:
            future = submit()
            self.after_submitting()
        finally:
            self.files.let_go.set()
        return future.result(TIMEOUT_S)

    def after_submitting(self) -> None:
        """What the caller does before the transfer begins."""

    def check_released(self, streams: int = 0) -> None:
        """Close the context; nothing may be left but streams of the test's own."""
        self.context.close()
        cuda = self.cuda
        assert (cuda.live_streams, cuda.live_events) == (streams, 0)
        assert (cuda.pending_copies, cuda.pinned_nbytes, cuda.mapped_nbytes) == (0, 0, 0)
        assert (cuda.errors, self.files.open_descriptors) == ([], ())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(folder_with_direct(tmp_path) / "file")
    yield made
    made.context.close()


# Order.


@each_way
@each_route
def test_read_comes_after_what_is_queued_and_is_there_on_return(
    rig: Rig, route: str, submit: bool
) -> None:
    array, stream = rig.array(), rig.cuda.create_stream()
    rig.fill(stream, array, BEFORE)
    report = rig.read(submit, array, route=route, stream=stream)
    assert array.tobytes() == rig.content
    assert {str(each.route) for each in report.planned} == {route}
    rig.cuda.synchronize_stream(stream)
    assert array.tobytes() == rig.content
    rig.check_released(streams=1)


@each_way
@each_route
def test_write_takes_what_is_queued_before(rig: Rig, route: str, submit: bool) -> None:
    array, stream = rig.array(), rig.cuda.create_stream()
    rig.fill(stream, array, BEFORE)
    report = rig.write(submit, array, route=route, stream=stream)
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE
    assert {str(each.route) for each in report.planned} == {route}
    rig.check_released(streams=1)


@each_route
def test_submitted_read_does_not_wait_for_what_is_queued_later(rig: Rig, route: str) -> None:
    array, stream = rig.array(), rig.cuda.create_stream()
    rig.fill(stream, array, BEFORE)
    ran: list[list[int]] = []
    rig.after_submitting = lambda: ran.append(rig.later(stream))  # type: ignore[method-assign]
    rig.read(True, array, route=route, stream=stream)
    assert (array.tobytes() == rig.content, ran) == (True, [[]])


@each_route
def test_submitted_write_does_not_wait_for_what_is_queued_later(rig: Rig, route: str) -> None:
    """Later work that changes the array would show in the file."""
    array, stream = rig.array(), rig.cuda.create_stream()
    rig.fill(stream, array, BEFORE)
    rig.after_submitting = lambda: rig.fill(stream, array, AFTER)  # type: ignore[method-assign]
    rig.write(True, array, route=route, stream=stream)
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE


@each_way
@each_route
def test_stream_of_the_caller_never_waits_for_a_transfer(
    rig: Rig, route: str, submit: bool
) -> None:
    array, stream = rig.array(), rig.cuda.create_stream()
    rig.read(submit, array, route=route, stream=stream)
    rig.write(submit, array, route=route, stream=stream)
    assert rig.cuda.on(stream) == set()


@each_way
@each_route
def test_later_work_sees_what_was_read(rig: Rig, route: str, submit: bool) -> None:
    array, stream = rig.array(), rig.cuda.create_stream()
    seen: list[bytes] = []
    rig.read(submit, array, route=route, stream=stream)
    rig.cuda.enqueue_on(stream, lambda: seen.append(array.tobytes()))
    rig.cuda.synchronize_stream(stream)
    assert seen == [rig.content]


@each_way
@each_route
def test_without_a_stream_that_of_the_array_counts(rig: Rig, route: str, submit: bool) -> None:
    stream = rig.cuda.create_stream()
    array = FakeDeviceArray(rig.cuda, SIZE, stream=stream)
    rig.fill(stream, array, BEFORE)
    rig.write(submit, array, route=route)
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE
    rig.path.write_bytes(rig.content)
    rig.fill(stream, array, AFTER)
    rig.read(submit, array, route=route)
    rig.cuda.synchronize_stream(stream)
    assert array.tobytes() == rig.content
    rig.check_released(streams=1)


# Which streams.


@each_way
@each_route
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_order_a_transfer_too(
    rig: Rig, route: str, submit: bool, stream: int
) -> None:
    array = rig.array()
    rig.fill(stream, array, BEFORE)
    rig.write(submit, array, route=route, stream=stream)
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE
    rig.path.write_bytes(rig.content)
    rig.fill(stream, array, AFTER)
    rig.read(submit, array, route=route, stream=stream)
    rig.cuda.synchronize_stream(stream)
    assert array.tobytes() == rig.content
    rig.check_released()


class LikeTorch:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def wait_event(self, event: object) -> None: ...


class LikeCuPy:
    def __init__(self, handle: int) -> None:
        self.ptr = handle

    def wait_event(self, event: object) -> None: ...


class LikeCudaCore:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@each_way
@pytest.mark.parametrize("wrap", [int, LikeTorch, LikeCuPy, LikeCudaCore])
def test_streams_of_every_library_order_a_transfer(
    rig: Rig, submit: bool, wrap: Callable[[int], Any]
) -> None:
    array, stream = rig.array(), rig.cuda.create_stream()
    rig.fill(stream, array, BEFORE)
    rig.write(submit, array, stream=wrap(stream))
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE
    rig.path.write_bytes(rig.content)
    rig.fill(stream, array, AFTER)
    rig.read(submit, array, stream=wrap(stream))
    rig.cuda.synchronize_stream(stream)
    assert array.tobytes() == rig.content


@each_way
def test_what_is_no_stream_is_refused_before_anything_is_opened(rig: Rig, submit: bool) -> None:
    for array in (rig.array(), bytearray(SIZE)):
        for wrong in ("main", 1.5, True, object()):
            with pytest.raises(TypeError, match="pass a torch"):
                rig.read(submit, array, stream=wrong)
            with pytest.raises(TypeError, match="pass a torch"):
                rig.write(submit, array, stream=wrong)
    assert (rig.files.opens, rig.cuda.live_events) == (0, 0)


@each_way
def test_stream_of_another_device_is_refused_before_anything_is_opened(
    tmp_path: Path, submit: bool
) -> None:
    rig = Rig(tmp_path / "file", devices=2)
    array, stream = rig.array(device=1), rig.cuda.create_stream()
    for move in (rig.read, rig.write):
        with pytest.raises(ValueError, match="belongs to cuda:0, but the memory is on cuda:1"):
            move(submit, array, stream=stream)
    assert (rig.files.opens, rig.cuda.live_events) == (0, 0)
    assert rig.path.read_bytes() == rig.content
    rig.check_released(streams=1)


@each_way
@each_route
@pytest.mark.parametrize("default", [None, 0, 2])
def test_streams_of_the_second_device_serve_its_memory(
    tmp_path: Path, route: str, submit: bool, default: int | None
) -> None:
    rig = Rig(folder_with_direct(tmp_path) / "file", devices=2)
    array = rig.array(device=1)
    rig.cuda.set_device(1)
    stream = rig.cuda.create_stream() if default is None else default
    rig.fill(stream, array, BEFORE)
    rig.cuda.set_device(0)
    rig.write(submit, array, route=route, stream=stream)
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE
    assert rig.cuda.current_device() == 0
    rig.path.write_bytes(rig.content)
    rig.read(submit, array, route=route, stream=stream)
    assert array.tobytes() == rig.content
    assert rig.cuda.current_device() == 0
    rig.check_released(streams=default is None)


# Host memory.


@each_way
@pytest.mark.parametrize("route", ["host", "direct"])
def test_host_memory_waits_for_the_stream(rig: Rig, route: str, submit: bool) -> None:
    array, stream = np.zeros(SIZE, np.uint8), rig.cuda.create_stream()
    rig.cuda.enqueue_on(stream, lambda: array.fill(BEFORE))
    rig.write(submit, array, route=route, stream=stream)
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE
    rig.path.write_bytes(rig.content)
    rig.cuda.enqueue_on(stream, lambda: array.fill(AFTER))
    rig.read(submit, array, route=route, stream=stream)
    rig.cuda.synchronize_stream(stream)
    assert array.tobytes() == rig.content
    rig.check_released(streams=1)


def test_host_memory_does_not_wait_for_what_is_queued_later(rig: Rig) -> None:
    array, stream = np.zeros(SIZE, np.uint8), rig.cuda.create_stream()
    rig.cuda.enqueue_on(stream, lambda: array.fill(BEFORE))
    ran: list[list[int]] = []
    rig.after_submitting = lambda: ran.append(rig.later(stream))  # type: ignore[method-assign]
    rig.write(True, array, stream=stream)
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE
    assert ran == [[]]


@each_way
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_host_memory_waits_for_default_streams(rig: Rig, submit: bool, stream: int) -> None:
    array = np.zeros(SIZE, np.uint8)
    rig.cuda.enqueue_on(stream, lambda: array.fill(BEFORE))
    rig.write(submit, array, stream=stream)
    assert rig.path.read_bytes() == bytes([BEFORE]) * SIZE


# What is left behind.


@each_way
@each_route
def test_failed_transfer_leaves_no_event_behind(tmp_path: Path, route: str, submit: bool) -> None:
    faults = {"eio_at": SIZE // 2, "write_eio_at": SIZE // 2}
    rig = Rig(folder_with_direct(tmp_path) / "file", **({} if route == "gds" else faults))
    rig.cufile.codes = {"cuFileRead": 5008, "cuFileWrite": 5008}
    array, stream = rig.array(), rig.cuda.create_stream()
    for move in (rig.read, rig.write):
        rig.fill(stream, array, BEFORE)
        with pytest.raises((OSError, hr.DeviceError), match=r"EIO|5008"):
            move(submit, array, route=route, stream=stream)
        lanes = (rig.cuda.live_streams - 1) // 2
        assert rig.cuda.live_events == lanes  # one of each lane
    rig.check_released(streams=1)


@each_way
def test_events_are_gone_when_the_call_returns(rig: Rig, submit: bool) -> None:
    array, stream = rig.array(), rig.cuda.create_stream()
    rig.read(submit, array, route="cached", stream=stream)
    settled = rig.cuda.live_events
    for _ in range(3):
        rig.read(submit, array, route="cached", stream=stream)
        rig.write(submit, array, route="cached", stream=stream)
        with pytest.raises(hr.ShortRead):
            rig.read(submit, array, route="cached", stream=stream, file_offset=1)
        assert rig.cuda.live_events <= settled + 2  # a second worker may have made its lane


def test_event_that_cannot_be_recorded_is_given_back(tmp_path: Path) -> None:
    class Failing(WatchedCuda):
        def record_event(self, event: int, stream: int) -> None:
            raise hr.DeviceError("cudaEventRecord failed: cudaErrorIllegalAddress (700)")

    cuda, files = Failing(), FaultyFiles()
    array, stream = FakeDeviceArray(cuda, SIZE), cuda.create_stream()
    write_random(tmp_path / "file", SIZE)
    with hr.Context(cuda=cuda, files=files) as context:
        with pytest.raises(hr.DeviceError, match="cudaEventRecord"):
            context.submit_read(array, tmp_path / "file", stream=stream)
        with pytest.raises(hr.DeviceError, match="cudaEventRecord"):
            context.submit_write(array, tmp_path / "new", stream=stream)
        with pytest.raises(hr.DeviceError, match="cudaEventRecord"):
            hr.read_into(array, tmp_path / "file", stream=stream, context=context)
        assert cuda.live_events == 0
    assert (cuda.errors, files.open_descriptors, (tmp_path / "new").exists()) == ([], (), False)

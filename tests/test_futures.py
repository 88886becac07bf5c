"""Submitted transfers: their handles, their threads, and what happens to them at the end."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.engines.lanes import Fence
from headrace.observers import Observers
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from tests.support import TIMEOUT_S, ends_in_time, run_python, write_random

SIZE = 50_001
AT_ONCE = 4
"""Threads that make submitted transfers."""


class HeldFiles(FaultyFiles):
    """Files that neither give nor take a byte before they are let go."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.reached = threading.Semaphore(0)
        self.let_go = threading.Event()

    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        self._hold()
        return super().preadv(fd, views, file_offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        self._hold()
        return super().pwritev(fd, views, file_offset)

    def wait_for(self, transfers: int) -> None:
        """Wait until so many transfers are held here."""
        for _ in range(transfers):
            assert self.reached.acquire(timeout=TIMEOUT_S)

    def _hold(self) -> None:
        self.reached.release()
        assert self.let_go.wait(TIMEOUT_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_random(tmp_path / "file", SIZE)
    return tmp_path / "file"


@pytest.fixture
def files() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.let_go.set()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_for_threads()
    assert submitting() == []


def submitting() -> list[threading.Thread]:
    """Threads that make submitted transfers."""
    return [each for each in threading.enumerate() if each.name == "headrace-submitted"]


def wait_for_threads() -> None:
    for each in submitting():
        each.join(TIMEOUT_S)


def occupy(context: hr.Context, path: Path, files: HeldFiles) -> list[hr.TransferFuture]:
    """Keep every thread of a context busy with reads that are held."""
    futures = [context.submit_read(bytearray(SIZE), path) for _ in range(AT_ONCE)]
    files.wait_for(AT_ONCE)
    return futures


# The handle.


def test_read_is_in_place_when_its_result_is_given(path: Path) -> None:
    with hr.Context() as context:
        buffer = bytearray(1000)
        future = context.submit_read(buffer, path, file_offset=77, nbytes=900)
        report = future.result()
        assert (future.done(), future.cancelled()) == (True, False)
        assert future.result(timeout=0) is report
    assert bytes(buffer[:900]) == path.read_bytes()[77:977]
    assert not any(buffer[900:])
    assert (report.nbytes, report.source, str(report.planned[0].route)) == (900, str(path), "host")


def test_write_is_in_the_file_when_its_result_is_given(path: Path) -> None:
    before = path.read_bytes()
    with hr.Context() as context:
        report = context.submit_write(b"headrace", path, file_offset=1000, nbytes=4).result()
    assert path.read_bytes() == before[:1000] + b"head" + before[1004:]
    assert report.nbytes == 4


def test_submitting_returns_though_the_file_system_does_not_answer(
    path: Path, tmp_path: Path, files: HeldFiles
) -> None:
    cuda = FakeCuda()
    array, buffer = FakeDeviceArray(cuda, SIZE), bytearray(SIZE)
    with hr.Context(files=files, cuda=cuda) as context:
        futures = [
            context.submit_read(array, path),
            context.submit_read(buffer, path),
            context.submit_write(b"some", tmp_path / "new"),
        ]
        files.wait_for(len(futures))
        for future in futures:
            assert not future.done()
            with pytest.raises(TimeoutError):
                future.result(timeout=0)
            assert not future.done()
        files.let_go.set()
        assert [future.result(TIMEOUT_S).nbytes for future in futures] == [SIZE, SIZE, 4]
    assert array.tobytes() == buffer == path.read_bytes()
    assert (tmp_path / "new").read_bytes() == b"some"


def test_submitting_returns_though_the_gpu_does_not_answer(path: Path, tmp_path: Path) -> None:
    class HeldCuda(FakeCuda):
        def synchronize_stream(self, stream: int) -> None:
            reached.release()
            assert let_go.wait(TIMEOUT_S)
            super().synchronize_stream(stream)

    reached, let_go, cuda = threading.Semaphore(0), threading.Event(), HeldCuda()
    array, full = FakeDeviceArray(cuda, SIZE), FakeDeviceArray(cuda, SIZE)
    full.fill(7)
    with hr.Context(cuda=cuda) as context:
        try:
            futures = [
                context.submit_read(array, path, stream=cuda.create_stream()),
                context.submit_write(full, tmp_path / "new", stream=cuda.create_stream()),
            ]
            for _ in futures:
                assert reached.acquire(timeout=TIMEOUT_S)
            assert not any(future.done() for future in futures)
        finally:
            let_go.set()
        for future in futures:
            future.result(TIMEOUT_S)
    assert array.tobytes() == path.read_bytes()
    assert (tmp_path / "new").read_bytes() == b"\x07" * SIZE


def test_queued_transfer_is_cancelled_before_a_byte_moves(path: Path, files: HeldFiles) -> None:
    cuda = FakeCuda()
    array, stream = FakeDeviceArray(cuda, SIZE), cuda.create_stream()
    untouched = array.tobytes()
    with hr.Context(files=files, cuda=cuda) as context:
        busy = occupy(context, path, files)
        opens, events = files.opens, cuda.live_events
        future = context.submit_read(array, path, stream=stream)
        assert cuda.live_events == events + 1
        assert (future.cancel(), future.cancelled(), future.done()) == (True, True, True)
        assert cuda.live_events == events
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result()
        files.let_go.set()
        for each in busy:
            each.result(TIMEOUT_S)
    assert (files.opens, array.tobytes()) == (opens, untouched)
    assert (cuda.live_events, cuda.errors) == (0, [])


def test_cancelled_write_makes_no_file(path: Path, tmp_path: Path, files: HeldFiles) -> None:
    with hr.Context(files=files) as context:
        occupy(context, path, files)
        assert context.submit_write(b"x", tmp_path / "new").cancel()
        files.let_go.set()
    assert not (tmp_path / "new").exists()


def test_cancelled_transfer_lets_go_of_its_buffer_at_once(path: Path, files: HeldFiles) -> None:
    with hr.Context(files=files) as context:
        occupy(context, path, files)
        array = np.zeros(SIZE, np.uint8)
        gone, future = weakref.ref(array), context.submit_read(array, path)
        del array
        assert gone() is not None
        assert future.cancel()
        assert gone() is None
        files.let_go.set()


def test_transfer_under_way_or_done_is_not_cancelled(path: Path, files: HeldFiles) -> None:
    buffer = bytearray(SIZE)
    with hr.Context(files=files) as context:
        future = context.submit_read(buffer, path)
        files.wait_for(1)
        assert (future.cancel(), future.cancelled()) == (False, False)
        files.let_go.set()
        future.result(TIMEOUT_S)
        assert (future.cancel(), future.cancelled()) == (False, False)
    assert buffer == path.read_bytes()


# await.


def test_many_are_awaited_together(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    buffers = [bytearray(1000) for _ in range(20)]

    async def work() -> list[hr.Report]:
        reads = [
            context.submit_read(buffer, path, file_offset=1000 * number)
            for number, buffer in enumerate(buffers)
        ]
        write = context.submit_write(content, tmp_path / "copy")
        assert (await write).nbytes == SIZE
        assert await write is write.result(0)
        return await asyncio.gather(*reads)

    with hr.Context() as context:
        reports = asyncio.run(work())
    assert [report.nbytes for report in reports] == [1000] * 20
    assert b"".join(buffers) == content[:20_000]
    assert (tmp_path / "copy").read_bytes() == content


def test_awaited_failure_is_that_of_the_synchronous_call(tmp_path: Path) -> None:
    async def work() -> None:
        await context.submit_read(bytearray(1), tmp_path / "missing")

    with hr.Context() as context, pytest.raises(FileNotFoundError, match="missing"):
        asyncio.run(work())


def test_cancelled_task_cancels_what_is_queued_and_leaves_what_is_under_way(
    path: Path, files: HeldFiles
) -> None:
    cuda, buffer = FakeCuda(), bytearray(SIZE)

    async def work() -> None:
        under_way = context.submit_read(buffer, path)
        files.wait_for(1)
        busy = [context.submit_read(bytearray(SIZE), path) for _ in range(AT_ONCE - 1)]
        files.wait_for(AT_ONCE - 1)
        events = cuda.live_events
        queued = context.submit_read(FakeDeviceArray(cuda, SIZE), path, stream=cuda.create_stream())
        for future in (queued, under_way):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, 0.01)
        assert (queued.cancelled(), cuda.live_events) == (True, events)
        assert not under_way.done()
        files.let_go.set()
        await asyncio.gather(under_way, *busy)

    with hr.Context(files=files, cuda=cuda) as context:
        asyncio.run(work())
    assert buffer == path.read_bytes()


def test_loop_that_ends_first_disturbs_nobody(
    path: Path, files: HeldFiles, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> hr.TransferFuture:
        future = context.submit_read(buffer, path)
        files.wait_for(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)
        return future

    buffer = bytearray(SIZE)
    with hr.Context(files=files) as context:
        future = asyncio.run(work())
        files.let_go.set()
        assert future.result(TIMEOUT_S).nbytes == SIZE
    assert buffer == path.read_bytes()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


# Whom it keeps alive.


def test_dropped_read_ends_and_keeps_its_buffer_until_then(path: Path, files: HeldFiles) -> None:
    cuda = FakeCuda()
    arrays: list[Any] = [np.zeros(SIZE, np.uint8), FakeDeviceArray(cuda, SIZE)]
    with hr.Context(files=files, cuda=cuda) as context:
        gone = [weakref.ref(each) for each in arrays]
        ended = [threading.Event() for _ in arrays]
        for array, event in zip(arrays, ended, strict=True):
            weakref.finalize(array, event.set)
            context.submit_read(array, path)
        del array, arrays
        files.wait_for(2)
        assert [ref() is not None for ref in gone] == [True, True]
        kept = gone[0]()
        files.let_go.set()
        assert ended[1].wait(TIMEOUT_S)
    assert kept is not None
    assert kept.tobytes() == path.read_bytes()
    del kept
    assert gone[0]() is None
    assert files.open_descriptors == ()


def test_dropped_write_ends(path: Path, tmp_path: Path, files: HeldFiles) -> None:
    with hr.Context(files=files) as context:
        context.submit_write(bytes(range(256)), tmp_path / "new")
        files.wait_for(1)
        files.let_go.set()
    assert (tmp_path / "new").read_bytes() == bytes(range(256))


def test_buffer_is_free_when_the_result_is_given_though_the_handle_is_kept(path: Path) -> None:
    with hr.Context() as context:
        for _ in range(50):
            array = np.zeros(SIZE, np.uint8)
            gone, future = weakref.ref(array), context.submit_read(array, path)
            del array
            future.result(TIMEOUT_S)
            assert gone() is None
            del future


def test_failed_transfer_keeps_its_buffer_no_longer_than_its_handle(tmp_path: Path) -> None:
    """Without the garbage collector: memory of a GPU must not wait for it."""
    with hr.Context() as context:
        array = np.zeros(SIZE, np.uint8)
        gone, future = weakref.ref(array), context.submit_read(array, tmp_path / "missing")
        del array
        with pytest.raises(FileNotFoundError) as caught:
            future.result(TIMEOUT_S)
        del caught, future
        assert gone() is None


def test_context_that_nobody_holds_ends_what_was_submitted(path: Path, files: HeldFiles) -> None:
    context, buffer = hr.Context(files=files), bytearray(SIZE)
    gone, future = weakref.ref(context), context.submit_read(buffer, path)
    del context
    files.wait_for(1)
    files.let_go.set()
    assert future.result(TIMEOUT_S).nbytes == SIZE
    assert buffer == path.read_bytes()
    del future
    wait_for_threads()
    assert gone() is None


# Failures.


def failing_reads(folder: Path) -> dict[str, Callable[[], tuple[Any, ...]]]:
    return {
        "missing": lambda: (bytearray(1), folder / "missing"),
        "directory": lambda: (bytearray(1), folder),
        "short": lambda: (bytearray(SIZE + 1), folder / "file"),
        "io": lambda: (bytearray(SIZE), folder / "file"),
    }


@pytest.mark.parametrize("case", ["missing", "directory", "short", "io"])
def test_failed_read_raises_what_the_synchronous_call_raises(
    path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = failing_reads(path.parent)[case]
    with hr.Context(files=FaultyFiles(eio_at=SIZE - 1)) as context:
        with pytest.raises((hr.HeadraceError, OSError)) as wanted:
            hr.read_into(*arguments(), context=context)
        caplog.clear()
        future = context.submit_read(*arguments())
        for _ in range(2):
            with pytest.raises(type(wanted.value)) as caught:
                future.result(TIMEOUT_S)
            assert str(caught.value) == str(wanted.value)
    assert type(caught.value) is type(wanted.value)
    assert (future.done(), future.cancelled(), future.cancel()) == (True, False, False)


@pytest.mark.parametrize(
    ("faults", "offset"), [({"write_eio_at": 3}, 0), ({"enospc_after": 100}, 0), ({}, -1)], ids=str
)
def test_failed_write_raises_what_the_synchronous_call_raises_and_leaves_no_new_file(
    tmp_path: Path, faults: dict[str, Any], offset: int
) -> None:
    path = tmp_path / "new" if offset == 0 else tmp_path
    with (
        hr.Context(files=FaultyFiles(**faults)) as context,
        pytest.raises(OSError, match=str(path)) as wanted,
    ):
        hr.write_from(bytes(SIZE), path, context=context)
    with hr.Context(files=FaultyFiles(**faults)) as context:
        future = context.submit_write(bytes(SIZE), path)
        with pytest.raises(OSError, match=str(path)) as caught:
            future.result(TIMEOUT_S)
    assert (type(caught.value), str(caught.value)) == (type(wanted.value), str(wanted.value))
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_the_call_itself_is_raised_at_once(path: Path) -> None:
    with hr.Context() as context:
        with pytest.raises(hr.BufferMismatch, match="submit_read: 9 bytes were asked for"):
            context.submit_read(bytearray(8), path, nbytes=9)
        with pytest.raises(hr.BufferMismatch, match="read-only"):
            context.submit_read(bytes(8), path)
        with pytest.raises(ValueError, match="submit_write: file_offset is -1"):
            context.submit_write(bytes(8), path, file_offset=-1)
        for submit in (context.submit_read, context.submit_write):
            with pytest.raises(ValueError, match="route 'fast' does not exist"):
                submit(bytearray(8), path, route="fast")
            with pytest.raises(TypeError):
                submit(bytearray(8), 7)  # type: ignore[arg-type]


def test_failure_of_a_dropped_transfer_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hr.Context() as context:
        context.submit_read(bytearray(1), tmp_path / "missing")
        context.submit_write(b"x", tmp_path)
    told = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert {each.name for each in told} == {"headrace"}
    words = [each.getMessage() for each in told]
    assert len(words) == 2
    assert any("missing" in each and "No such file or directory" in each for each in words)
    assert any("Is a directory" in each for each in words)


def test_observer_that_raises_fails_the_transfer_and_not_its_thread(path: Path) -> None:
    def angry(report: hr.Report) -> None:
        raise SystemExit("enough")

    observers, buffer = Observers(), bytearray(SIZE)
    with hr.Context(observers=observers) as context:
        observers.add(angry)
        futures = [context.submit_read(bytearray(8), path) for _ in range(2 * AT_ONCE)]
        for future in futures:
            with pytest.raises(SystemExit, match="enough"):
                future.result(TIMEOUT_S)
        observers.remove(angry)
        context.submit_read(buffer, path).result(TIMEOUT_S)
    assert buffer == path.read_bytes()


# Threads.


def test_many_more_than_there_are_threads_all_arrive(path: Path, files: HeldFiles) -> None:
    cuda, content = FakeCuda(), path.read_bytes()
    options = hr.Options(workers=2, block_nbytes=4096, pinned_nbytes=8192)
    arrays = [FakeDeviceArray(cuda, 20_000) for _ in range(40)]
    buffers = [bytearray(20_000) for _ in range(40)]
    with hr.Context(options, files=files, cuda=cuda) as context:
        futures = [
            context.submit_read(buffer, path, file_offset=100 * number, route=route)
            for number, pair in enumerate(zip(arrays, buffers, strict=True))
            for buffer, route in zip(pair, ("cached", "host"), strict=True)
        ]
        files.wait_for(AT_ONCE)
        assert len(submitting()) == AT_ONCE
        files.let_go.set()
        assert {future.result(TIMEOUT_S).nbytes for future in futures} == {20_000}
    for number, (array, buffer) in enumerate(zip(arrays, buffers, strict=True)):
        part = content[100 * number : 100 * number + 20_000]
        assert (array.tobytes(), bytes(buffer)) == (part, part)
    assert (cuda.pinned_nbytes, cuda.live_streams, cuda.live_events, cuda.errors) == (0, 0, 0, [])


def test_no_thread_is_kept_when_there_is_nothing_to_do(path: Path) -> None:
    context = hr.Context()
    for _ in range(3):
        context.submit_read(bytearray(8), path).result(TIMEOUT_S)
        wait_for_threads()
        assert submitting() == []
    context.close()


def test_system_without_threads_refuses_and_nothing_happens(
    path: Path, files: HeldFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    cuda = FakeCuda()
    array, late = FakeDeviceArray(cuda, SIZE), bytearray(SIZE)
    untouched, stream = array.tobytes(), cuda.create_stream()
    with hr.Context(files=files, cuda=cuda) as context:
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                context.submit_read(array, path, stream=stream)
        assert (cuda.live_events, files.opens) == (0, 0)
        busy = context.submit_read(bytearray(SIZE), path)
        files.wait_for(1)
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", refuse)
            future = context.submit_read(late, path)
        files.let_go.set()
        busy.result(TIMEOUT_S)
        future.result(TIMEOUT_S)
    assert late == path.read_bytes()
    assert array.tobytes() == untouched


# The end of the context.


def test_closed_context_takes_nothing(path: Path, tmp_path: Path) -> None:
    cuda = FakeCuda()
    array, stream = FakeDeviceArray(cuda, SIZE), cuda.create_stream()
    context = hr.Context(cuda=cuda)
    context.submit_read(array, path, stream=stream).result(TIMEOUT_S)
    context.close()
    closed = "the context is closed; make a new one"
    with pytest.raises(ValueError, match=closed):
        context.submit_read(array, path, stream=stream)
    with pytest.raises(ValueError, match=closed):
        context.submit_read(bytearray(8), path)
    with pytest.raises(ValueError, match=closed):
        context.submit_write(array, tmp_path / "new", stream=stream)
    assert not (tmp_path / "new").exists()
    cuda.destroy_stream(stream)
    assert (cuda.pinned_nbytes, cuda.live_streams, cuda.live_events, cuda.errors) == (0, 0, 0, [])


@pytest.mark.parametrize("closers", [1, 2])
def test_closing_waits_for_all_that_was_submitted(
    path: Path, tmp_path: Path, files: HeldFiles, closers: int
) -> None:
    cuda = FakeCuda()
    arrays = [FakeDeviceArray(cuda, SIZE) for _ in range(3 * AT_ONCE)]
    full = FakeDeviceArray(cuda, SIZE)
    full.fill(9)
    context = hr.Context(files=files, cuda=cuda)
    futures = [context.submit_read(array, path) for array in arrays]
    futures += [context.submit_write(full, tmp_path / f"new{number}") for number in range(3)]
    futures.append(context.submit_read(bytearray(8), tmp_path / "missing"))
    files.wait_for(AT_ONCE)
    threads = [threading.Thread(target=context.close) for _ in range(closers)]
    for thread in threads:
        thread.start()
    refused = False
    while not refused:  # until the closing has begun, what is submitted is done as well
        try:
            futures.insert(0, context.submit_read(bytearray(8), path))
        except ValueError:
            refused = True
    assert all(thread.is_alive() for thread in threads)
    files.let_go.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert all(future.done() for future in futures)
    assert [future.result(0) is not None for future in futures[:-1]]
    with pytest.raises(FileNotFoundError):
        futures[-1].result(0)
    assert {array.tobytes() for array in arrays} == {path.read_bytes()}
    for number in range(3):
        assert (tmp_path / f"new{number}").read_bytes() == b"\x09" * SIZE
    assert (cuda.pinned_nbytes, cuda.live_streams, cuda.live_events) == (0, 0, 0)
    assert (cuda.pending_copies, cuda.errors, files.open_descriptors) == (0, [], ())
    for array in arrays:  # a copy that came later would be misuse
        cuda.device_free(array.pointer)


def test_closing_after_cancelling_waits_only_for_what_is_under_way(
    path: Path, files: HeldFiles
) -> None:
    context = hr.Context(files=files)
    busy = occupy(context, path, files)
    queued = [context.submit_read(bytearray(8), path) for _ in range(50)]
    assert all(future.cancel() for future in queued)
    files.let_go.set()
    context.close()
    assert all(future.result(0).nbytes == SIZE for future in busy)
    assert all(future.cancelled() for future in queued)


def test_closing_from_an_observer_of_a_submitted_transfer_is_refused(path: Path) -> None:
    def close(report: hr.Report) -> None:
        with pytest.raises(RuntimeError, match="close\\(\\) within a transfer"):
            context.close()
        refused.set()

    observers, refused, buffer = Observers(), threading.Event(), bytearray(SIZE)
    observers.add(close)
    context = hr.Context(observers=observers)
    assert context.submit_read(buffer, path).result(TIMEOUT_S).nbytes == SIZE
    assert refused.is_set()
    observers.remove(close)
    assert context.submit_read(buffer, path).result(TIMEOUT_S).nbytes == SIZE  # it is still open
    assert ends_in_time(context.close)


def test_closing_from_the_progress_of_a_submitted_transfer_is_refused(path: Path) -> None:
    context, buffer = hr.Context(), bytearray(SIZE)
    request = context.request("test", buffer, path, file_offset=0, nbytes=None, stream=None)
    told: list[str] = []

    def close(progress: hr.Progress) -> None:
        with pytest.raises(RuntimeError) as caught:
            context.close()
        told.append(str(caught.value))

    def run(fence: Fence) -> hr.Report:
        return context.transfer(
            request.want(),
            request.buffer.device,
            lambda _: (request.buffer,),
            progress=close,
            fence=fence,
        )

    context.submit(run, "test", (request.buffer,)).result(TIMEOUT_S)
    assert told
    assert "close() within a transfer" in told[0]
    assert buffer == path.read_bytes()
    assert ends_in_time(context.close)


def test_another_context_may_be_closed_by_a_submitted_transfer(path: Path) -> None:
    observers = Observers()
    other = hr.Context()
    observers.add(lambda report: other.close())
    with hr.Context(observers=observers) as context:
        context.submit_read(bytearray(8), path).result(TIMEOUT_S)
    with pytest.raises(ValueError, match="closed"):
        other.submit_read(bytearray(8), path)


# The end of the process, and its children.

_HELD_UNTIL_THE_END = """
import sys, threading, weakref
import numpy as np
import headrace as hr
import headrace.storage.residency as residency
from headrace.bindings.posix import PosixFiles
residency._PARALLEL_S = -1.0
residency._PART_NBYTES = 4096
class Held(PosixFiles):
    def path_status(self, path):
        threading.main_thread().join()
        return super().path_status(path)
context = hr.Context(hr.Options(block_nbytes=4096), files=Held())
"""


def test_process_ends_after_the_writes_that_it_submitted(tmp_path: Path) -> None:
    code = (
        _HELD_UNTIL_THE_END
        + """
for number in range(10):
    data = np.full(3_000_000, number, np.uint8)
    context.submit_write(data, f"{sys.argv[1]}/{number}")
print("end")
"""
    )
    assert run_python(code, str(tmp_path)).strip() == "end"
    for number in range(10):
        content = (tmp_path / str(number)).read_bytes()
        assert (len(content), set(content)) == (3_000_000, {number})


def test_process_ends_after_the_reads_that_it_submitted(path: Path) -> None:
    code = (
        _HELD_UNTIL_THE_END
        + """
buffer = bytearray(40_000)
future = context.submit_read(buffer, sys.argv[1])
def look():
    threading.main_thread().join()
    report = future.result()
    print(report.nbytes, bytes(buffer) == open(sys.argv[1], "rb").read(40_000))
threading.Thread(target=look).start()
"""
    )
    assert run_python(code, str(path)).split() == ["40000", "True"]


def test_forked_child_submits_while_its_parent_is_busy(path: Path) -> None:
    """The parent's threads are not in the child, and what they hold is never given back."""
    code = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
import headrace as hr
from headrace.bindings.posix import PosixFiles
class Held(PosixFiles):
    def preadv(self, fd, views, offset):
        reached.release()
        if os.getpid() == parent:
            let_go.wait()
        return super().preadv(fd, views, offset)
parent, reached, let_go = os.getpid(), threading.Semaphore(0), threading.Event()
context, size = hr.Context(files=Held()), os.stat(sys.argv[1]).st_size
buffers = [bytearray(size) for _ in range(9)]
futures = [context.submit_read(buffer, sys.argv[1]) for buffer in buffers]
for _ in range(4):
    reached.acquire()
child = os.fork()
if not child:
    buffer = bytearray(size)
    future = context.submit_read(buffer, sys.argv[1])
    right = future.result(20).nbytes == size and buffer == open(sys.argv[1], "rb").read()
    written = context.submit_write(buffer, sys.argv[1] + ".copy").result(20).nbytes == size
    context.close()
    os._exit(7 if right and written else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
let_go.set()
context.close()
print(all(buffer == open(sys.argv[1], "rb").read() for buffer in buffers))
print(all(future.done() for future in futures))
"""
    assert run_python(code, str(path)).split() == ["7", "True", "True"]
    assert path.with_name("file.copy").read_bytes() == path.read_bytes()


def test_failed_transfer_lets_go_of_its_buffer_though_its_future_is_held(tmp_path: Path) -> None:
    array = np.ones(SIZE, np.uint8)
    gone = weakref.ref(array)
    with hr.Context() as context:
        future = context.submit_write(array, tmp_path / "no" / "file")
        del array
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                future.result(TIMEOUT_S)
        wait_for_threads()
        assert gone() is None
        assert not future.cancelled()


def test_relative_path_is_that_of_the_moment_of_submission(
    tmp_path: Path, path: Path, files: HeldFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"another")
    monkeypatch.chdir(tmp_path)
    buffer = bytearray(SIZE)
    with hr.Context(files=files) as context:
        futures = occupy(context, path, files)
        futures += [context.submit_read(buffer, "file"), context.submit_write(b"new", "made")]
        monkeypatch.chdir(elsewhere)
        files.let_go.set()
        for future in futures:
            future.result(TIMEOUT_S)
    assert buffer == path.read_bytes()
    assert (tmp_path / "made").read_bytes() == b"new"
    assert not (elsewhere / "made").exists()

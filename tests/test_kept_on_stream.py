"""Reads with a stream from kept registrations: copies that are left under way when they return."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.bindings.cuda import Copy
from headrace.memory.mappings import Mappings, Window, WindowKey
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.fake_cuda import POISON
from headrace.testing.faulty_files import pages_where
from tests.support import (
    PAGE,
    TIMEOUT_S,
    disk_folder,
    ends_in_time,
    folder_with_direct,
    write_random,
)

WINDOW = 64 << 10
SIZE = 4 * WINDOW + 123
"""Five windows, the last one small."""
MIB = 1 << 20
KEEPING = hr.Options(mapped_nbytes=MIB)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engines.mapped.WINDOW_NBYTES", WINDOW)


class Rig:
    """A context that keeps registrations, and a file that it has read once."""

    def __init__(
        self,
        folder: Path,
        cuda: FakeCuda | None = None,
        options: hr.Options = KEEPING,
        files: FaultyFiles | None = None,
    ) -> None:
        self.path, self.content = folder / "file", write_random(folder / "file", SIZE)
        self.cuda, self.files = cuda or FakeCuda(), files or FaultyFiles()
        self.context = hr.Context(options, cuda=self.cuda, files=self.files)
        self.stream = self.cuda.create_stream()

    def warmed(self) -> Rig:
        """Have the file registered, by a read that is over."""
        self.read(self.array())
        self.cuda.synchronize_stream(self.stream)
        assert self.cuda.mapped_nbytes == -(-SIZE // PAGE) * PAGE
        return self

    def array(self, nbytes: int = SIZE) -> FakeDeviceArray:
        return FakeDeviceArray(self.cuda, nbytes)

    def read(self, array: FakeDeviceArray, path: Path | None = None, **arguments: Any) -> hr.Report:
        arguments = {"stream": self.stream, **arguments}
        return hr.read_into(array, path or self.path, context=self.context, **arguments)

    def check_idle(self) -> None:
        """Nothing is under way, and nothing was misused."""
        assert (self.cuda.pending_copies, self.cuda.errors) == (0, [])

    def check_released(self, streams: int = 1) -> None:
        self.context.close()
        self.check_idle()
        cuda = self.cuda
        assert (cuda.mapped_nbytes, cuda.pinned_nbytes) == (0, 0)
        assert (cuda.live_streams, cuda.live_events) == (streams, 0)
        assert self.files.open_descriptors == ()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path).warmed()
    yield made
    made.check_released()


def is_untouched(array: FakeDeviceArray) -> bool:
    return set(array.tobytes()) == {POISON}


def route_of(report: hr.Report) -> str:
    (observed,) = report.observed
    return str(observed.route)


# Order.


def test_read_returns_with_its_copies_queued_and_the_stream_brings_the_bytes(rig: Rig) -> None:
    array, before = rig.array(), rig.files.mapped_nbytes
    report = rig.read(array)
    assert (route_of(report), report.nbytes) == ("mapped", SIZE)
    assert "not waited for" in report.observed[0].evidence
    assert " mapped (enqueued)" in str(report)  # its rate is that of the call, not of the bytes
    assert (is_untouched(array), rig.cuda.pending_copies) == (True, 5)
    rig.cuda.synchronize_stream(rig.stream)
    assert array.tobytes() == rig.content
    assert rig.files.mapped_nbytes == before


def test_earlier_work_is_not_overtaken_and_later_work_sees_the_bytes(rig: Rig) -> None:
    array, seen = rig.array(), list[bytes]()
    rig.cuda.enqueue_on(rig.stream, lambda: array.fill(0))
    rig.read(array)
    rig.cuda.enqueue_on(rig.stream, lambda: seen.append(array.tobytes()))
    rig.cuda.enqueue_on(rig.stream, lambda: array.fill(1))
    assert (is_untouched(array), seen) == (True, [])
    rig.cuda.synchronize_stream(rig.stream)
    assert (seen, set(array.tobytes())) == ([rig.content], {1})


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_carry_the_copies_too(rig: Rig, stream: int) -> None:
    array = rig.array()
    rig.cuda.enqueue_on(stream, lambda: array.fill(0))
    rig.read(array, stream=stream)
    assert is_untouched(array)
    rig.cuda.synchronize_stream(stream)
    assert array.tobytes() == rig.content


def test_reads_queue_up_on_one_stream_and_events_do_not_pile_up(rig: Rig) -> None:
    arrays = [rig.array() for _ in range(4)]
    for array in arrays:
        rig.read(array)
    assert all(map(is_untouched, arrays))
    rig.cuda.synchronize_stream(rig.stream)
    assert {array.tobytes() for array in arrays} == {rig.content}
    rig.read(arrays[0])
    lanes = (rig.cuda.live_streams - 1) // 2
    assert rig.cuda.live_events == 1 + lanes  # the windows of one read share it


def test_any_part_of_the_file_arrives(rig: Rig) -> None:
    for first, nbytes in ((1, SIZE - 1), (WINDOW - 1, 2), (WINDOW, WINDOW), (SIZE - 1, 1)):
        array = rig.array(nbytes)
        rig.read(array, file_offset=first)
        rig.cuda.synchronize_stream(rig.stream)
        assert array.tobytes() == rig.content[first : first + nbytes]


def test_submitted_read_is_complete_when_its_result_is_given(rig: Rig) -> None:
    array = rig.array()
    rig.cuda.enqueue_on(rig.stream, lambda: array.fill(0))
    report = rig.context.submit_read(array, rig.path, stream=rig.stream).result(TIMEOUT_S)
    assert (array.tobytes(), route_of(report)) == (rig.content, "mapped")
    rig.check_idle()


def test_without_a_stream_the_bytes_are_there_on_return(rig: Rig) -> None:
    queued, array = rig.array(), rig.array()
    rig.read(queued)
    rig.read(array, stream=None)
    assert (array.tobytes() == rig.content, is_untouched(queued)) == (True, True)
    rig.cuda.synchronize_stream(rig.stream)
    assert queued.tobytes() == rig.content


@pytest.mark.parametrize("options", [hr.Options(), hr.Options(mapped_nbytes=WINDOW)], ids=str)
def test_without_a_budget_for_it_the_read_is_complete_on_return(
    tmp_path: Path, options: hr.Options
) -> None:
    rig = Rig(tmp_path, options=options)
    for route in ("mapped", "auto"):
        for _ in range(2):
            array = rig.array()
            rig.cuda.enqueue_on(rig.stream, lambda array=array: array.fill(0))  # type: ignore[misc]
            rig.read(array, route=route)
            assert array.tobytes() == rig.content
    rig.check_released()


def test_budget_of_just_the_file_keeps_all_of_it(tmp_path: Path) -> None:
    """Registrations are whole pages, and the file is not."""
    rig = Rig(tmp_path, options=hr.Options(mapped_nbytes=SIZE)).warmed()
    mapped = rig.files.mapped_nbytes
    array = rig.array()
    rig.read(array)
    assert (is_untouched(array), rig.files.mapped_nbytes) == (True, mapped)
    rig.check_released()


def test_pages_that_are_registered_are_not_counted_again(tmp_path: Path) -> None:
    """To count them takes milliseconds where they are small, and they cannot leave."""
    rig = Rig(disk_folder(tmp_path)).warmed()
    asked: list[int] = []
    rig.files.resident = lambda file_offset, nbytes: asked.append(nbytes) or 0  # type: ignore[func-returns-value]
    for first, nbytes in ((0, SIZE), (5, WINDOW)):
        report = rig.read(rig.array(nbytes), file_offset=first)
        assert (route_of(report), report.resident_nbytes, asked) == ("mapped", nbytes, [])
    rig.path.write_bytes(rig.content)
    os.utime(rig.path, ns=(1, 1))
    rig.read(rig.array())
    assert asked
    rig.check_released()


def plan_of(report: hr.Report) -> tuple[Any, ...]:
    return report.planned, report.rejected, report.resident_nbytes


def test_plan_of_registered_bytes_is_the_same_again(rig: Rig) -> None:
    """It is not made anew for each read; other bytes of the file are other plans."""
    parts = [(0, SIZE), (5, WINDOW), *((number, 100) for number in range(40))]
    first = [plan_of(rig.read(rig.array(n), file_offset=at)) for at, n in parts]
    again = [plan_of(rig.read(rig.array(n), file_offset=at)) for at, n in parts]
    assert first == again
    assert [planned[0].nbytes for planned, _, _ in again] == [nbytes for _, nbytes in parts]
    host = bytearray(SIZE)
    assert route_of(hr.read_into(host, rig.path, context=rig.context)) == "host"
    report = rig.read(rig.array(), route="cached")
    assert (route_of(report), report.planned[0].why) == ("cached", "route='cached' was asked for")
    rig.cuda.synchronize_stream(rig.stream)
    assert host == rig.content


def test_plan_is_made_anew_once_the_pages_are_not_registered_any_more(tmp_path: Path) -> None:
    rig = Rig(disk_folder(tmp_path), options=hr.Options(mapped_nbytes=SIZE)).warmed()
    whys = []
    for name in ("file", "file", "other", "file", "file"):
        if name == "other":
            write_random(rig.path.with_name(name), SIZE)
        whys.append(rig.read(rig.array(), rig.path.with_name(name)).rejected)
        rig.cuda.synchronize_stream(rig.stream)
    assert whys[0] == whys[1] == whys[4]
    assert rig.cuda.errors == []
    rig.check_released()


def test_read_that_leaves_registered_pages_after_all_keeps_its_place_on_the_stream(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan was made on pages that are gone when it is carried out."""
    array, seen = rig.array(), list[bytes]()

    def refuse(mappings: Mappings, fd: int, key: WindowKey) -> Window:
        raise hr.DeviceError("cudaHostRegister failed: made up")

    rig.cuda.enqueue_on(rig.stream, lambda: array.fill(0))
    rig.cuda.enqueue_on(rig.stream, lambda: seen.append(array.tobytes()))
    with monkeypatch.context() as refusing:
        refusing.setattr(Mappings, "take", refuse)
        report = rig.read(array)
    assert route_of(report) == "cached"
    assert [str(each.route) for each in report.rejected].count("mapped") == 1
    assert (array.tobytes(), seen) == (rig.content, [bytes(SIZE)])


# Registrations outlive the copies.


def test_closing_the_context_waits_for_the_copies(tmp_path: Path) -> None:
    rig = Rig(tmp_path).warmed()
    array = rig.array()
    rig.read(array)
    rig.check_released()
    assert array.tobytes() == rig.content


def test_context_that_nobody_closes_waits_for_the_copies(tmp_path: Path) -> None:
    rig = Rig(tmp_path).warmed()
    array = rig.array()
    rig.read(array)
    del rig.context
    rig.check_idle()
    assert array.tobytes() == rig.content
    assert (rig.cuda.mapped_nbytes, rig.cuda.live_events) == (0, 0)


def test_stream_that_is_destroyed_meanwhile_still_does_the_copies(tmp_path: Path) -> None:
    rig = Rig(tmp_path).warmed()
    array = rig.array()
    rig.read(array)
    rig.cuda.destroy_stream(rig.stream)
    rig.check_released(streams=0)
    assert array.tobytes() == rig.content


def test_file_that_takes_the_room_waits_for_the_copies_of_the_other(tmp_path: Path) -> None:
    rig = Rig(tmp_path, options=hr.Options(mapped_nbytes=SIZE)).warmed()
    array, other = rig.array(), rig.array()
    content = write_random(tmp_path / "other", SIZE)
    rig.read(array)
    rig.read(other, tmp_path / "other")
    assert array.tobytes() == rig.content
    assert rig.cuda.errors == []
    rig.cuda.synchronize_stream(rig.stream)
    assert other.tobytes() == content
    rig.check_released()


def test_file_rewritten_before_the_call_is_registered_anew(rig: Rig) -> None:
    queued, array = rig.array(), rig.array()
    rig.read(queued)
    rig.path.write_bytes(bytes(reversed(rig.content)))
    os.utime(rig.path, ns=(1, 1))  # a tick of the clock may be longer than this test
    before = rig.files.mapped_nbytes
    rig.read(array)
    assert rig.files.mapped_nbytes - before == SIZE
    assert rig.cuda.mapped_nbytes == -(-SIZE // PAGE) * PAGE
    rig.cuda.synchronize_stream(rig.stream)
    assert array.tobytes() == bytes(reversed(rig.content))


def test_file_replaced_before_the_call_is_not_read_from_old_pages(rig: Rig) -> None:
    array, other = rig.array(), rig.path.with_name("other")
    content = os.urandom(SIZE)
    other.write_bytes(content)
    other.rename(rig.path)
    rig.read(array)
    rig.cuda.synchronize_stream(rig.stream)
    assert array.tobytes() == content


def test_file_changed_during_the_call_is_told_and_nothing_is_left_under_way(
    tmp_path: Path,
) -> None:
    class Changing(FakeCuda):
        armed = False

        def copy_to_device(self, copies: Sequence[Copy], stream: int) -> None:
            if self.armed:
                os.utime(tmp_path / "file", ns=(1, 1))
            super().copy_to_device(copies, stream)

    cuda = Changing()
    rig = Rig(tmp_path, cuda).warmed()
    cuda.armed = True
    with pytest.raises(hr.SourceChanged):
        rig.read(rig.array())
    rig.check_idle()
    assert (rig.cuda.mapped_nbytes, rig.cuda.live_events) == (0, 0)
    cuda.armed = False
    array = rig.array()
    rig.read(array)
    rig.cuda.synchronize_stream(rig.stream)
    assert array.tobytes() == rig.content
    rig.check_released()


def test_failure_of_another_part_leaves_nothing_under_way(tmp_path: Path) -> None:
    """The first half is resident and registered; the second half comes from storage, and fails."""
    half = 64 * PAGE
    files = FaultyFiles(resident=pages_where(lambda page: page < half // PAGE))
    path = folder_with_direct(tmp_path) / "big"
    content = write_random(path, 17 * MIB + half)
    options = hr.Options(mapped_nbytes=32 * MIB, block_nbytes=half)
    rig = Rig(tmp_path, options=options, files=files)
    array = rig.array(len(content))
    rig.read(array, path)
    rig.cuda.synchronize_stream(rig.stream)
    assert array.tobytes() == content
    files.eio_at = half + 1
    array.fill(POISON)
    with pytest.raises(OSError, match="EIO"):
        rig.read(array, path)
    rig.check_idle()
    assert array.tobytes()[:half] == content[:half]
    rig.check_released()


# What CUDA refuses.


def test_pages_that_cannot_be_registered_go_another_way_and_are_complete_on_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoFilePages(FakeCuda):
        def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
            if read_only:
                raise hr.DeviceError("cudaHostRegister failed: cudaErrorNotSupported (801)")
            super().register_host(pointer, nbytes)

    rig = Rig(tmp_path, NoFilePages())
    array = rig.array()
    rig.cuda.enqueue_on(rig.stream, lambda: array.fill(0))
    with caplog.at_level(logging.WARNING, logger="headrace"):
        report = rig.read(array)
    assert (array.tobytes(), route_of(report)) == (rig.content, "cached")
    assert any("cudaErrorNotSupported" in each.why for each in report.rejected)
    assert "cudaErrorNotSupported" in caplog.text
    with pytest.raises(hr.RouteUnavailable, match="cudaErrorNotSupported"):
        rig.read(array, route="mapped")
    rig.check_released()


def test_limit_met_on_the_way_leaves_no_copy_that_could_come_too_late(tmp_path: Path) -> None:
    class Limited(FakeCuda):
        left = 2

        def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
            if read_only:
                self.left -= 1
                if self.left < 0:
                    raise hr.DeviceError("cudaHostRegister failed: cudaErrorMemoryAllocation (2)")
            super().register_host(pointer, nbytes, read_only=read_only)

    rig = Rig(tmp_path, Limited())
    array = rig.array()
    report = rig.read(array)
    assert (array.tobytes(), route_of(report)) == (rig.content, "cached")
    rig.check_idle()
    rig.check_released()


def test_room_is_made_by_releasing_what_is_kept_of_others(tmp_path: Path) -> None:
    limit = 6 * WINDOW
    rig = Rig(tmp_path, FakeCuda(pinned_limit_nbytes=limit)).warmed()
    array, other = rig.array(), rig.array()
    content = write_random(tmp_path / "other", SIZE)
    rig.read(array)
    assert route_of(rig.read(other, tmp_path / "other")) == "mapped"
    assert array.tobytes() == rig.content
    rig.cuda.synchronize_stream(rig.stream)
    assert other.tobytes() == content
    rig.check_released()


@pytest.mark.parametrize("number", range(1, 7))
def test_failed_copy_leaves_nothing_under_way_and_the_context_usable(
    tmp_path: Path, number: int
) -> None:
    rig = Rig(tmp_path, FakeCuda(fail_copy_at=5 + number)).warmed()
    array = rig.array()
    rig.cuda.enqueue_on(rig.stream, lambda: array.fill(0))
    if number <= 5:
        with pytest.raises(hr.DeviceError, match="told to fail"):
            rig.read(array)
        rig.check_idle()
    array.fill(POISON)
    if number <= 5:
        rig.read(array)
        rig.cuda.synchronize_stream(rig.stream)
        assert array.tobytes() == rig.content
    rig.check_released()


@pytest.mark.parametrize(
    "call", ["create_event", "record_event", "event_is_done", "destroy_event", "copy_to_device"]
)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_whatever_call_fails_no_window_is_lost_and_no_copy_left(
    tmp_path: Path, call: str, number: int
) -> None:
    cuda = FakeCuda()
    rig = Rig(tmp_path, cuda).warmed()
    rig.read(rig.array())  # so that there are events to look at
    rig.cuda.synchronize_stream(rig.stream)
    real, count = getattr(cuda, call), itertools.count(1)

    def fail(*arguments: Any) -> Any:
        if next(count) == number:
            raise hr.DeviceError(f"{call} failed: cudaErrorUnknown (999)")
        return real(*arguments)

    setattr(cuda, call, fail)
    array = rig.array()
    failed = False
    try:
        rig.read(array)
    except hr.DeviceError as error:
        failed = call in str(error)
    delattr(cuda, call)
    is_reached = next(count) > number
    assert failed or not is_reached or call in ("event_is_done", "destroy_event")  # looks for room
    if failed:
        rig.check_idle()
    rig.read(array)
    rig.cuda.synchronize_stream(rig.stream)
    assert array.tobytes() == rig.content
    rig.context.close()
    assert (cuda.pending_copies, cuda.mapped_nbytes, cuda.errors) == (0, 0, [])
    # An event that CUDA would not destroy is CUDA's own.
    assert cuda.live_events <= (call == "destroy_event")


# Threads.


def test_threads_with_streams_of_their_own_share_a_file(tmp_path: Path) -> None:
    rig = Rig(tmp_path).warmed()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            stream = rig.cuda.create_stream()
            for turn in range(15):
                first = 1000 * number + turn
                array = rig.array(SIZE - first)
                rig.cuda.enqueue_on(stream, lambda array=array: array.fill(0))  # type: ignore[misc]
                rig.read(array, stream=stream, file_offset=first)
                if turn % 2:
                    rig.cuda.synchronize_stream(stream)
                    assert array.tobytes() == rig.content[first:]
            rig.cuda.synchronize_stream(stream)
            rig.cuda.destroy_stream(stream)
        except BaseException as failure:  # noqa: BLE001 (the test's own thread raises it)
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert failures == []
    rig.check_released()


def test_closing_while_others_read_waits_for_all_copies(tmp_path: Path) -> None:
    class Slow(FakeCuda):
        def copy_to_device(self, copies: Sequence[Copy], stream: int) -> None:
            if armed.is_set():
                reached.set()
                assert let_go.wait(TIMEOUT_S)
            super().copy_to_device(copies, stream)

    armed, reached, let_go = threading.Event(), threading.Event(), threading.Event()
    rig = Rig(tmp_path, Slow()).warmed()
    array = rig.array()
    armed.set()
    reader = threading.Thread(target=rig.read, args=(array,))
    reader.start()
    assert reached.wait(TIMEOUT_S)
    closer = threading.Thread(target=rig.context.close)
    closer.start()
    armed.clear()
    let_go.set()
    assert ends_in_time(lambda: (reader.join(), closer.join()))  # type: ignore[func-returns-value]
    assert array.tobytes() == rig.content
    rig.check_released()


# Everything together.

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("read"),
            st.integers(0, 2),
            st.integers(0, SIZE - 1),
            st.integers(1, SIZE),
            st.integers(0, 1),
        ),
        st.tuples(st.sampled_from(["synchronize", "write", "replace"]), st.integers(0, 2)),
    ),
    min_size=1,
    max_size=12,
)


class Walk:
    """Reads of three files on two streams; none changes while a copy is left under way."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self.rig = Rig(folder, options=hr.Options(mapped_nbytes=budget))
        self.paths = [folder / name for name in "abc"]
        for path in self.paths:
            path.write_bytes(os.urandom(SIZE))
        self.streams = [self.rig.stream, self.rig.cuda.create_stream()]
        self.clock = itertools.count(1)
        self.waiting: list[tuple[FakeDeviceArray, bytes]] = []

    def read(self, which: int, first: int, nbytes: int, on: int) -> None:
        nbytes = min(nbytes, SIZE - first)
        array, path, stream = self.rig.array(nbytes), self.paths[which], self.streams[on]
        self.rig.cuda.enqueue_on(stream, lambda: array.fill(0))
        self.rig.read(array, path, file_offset=first, stream=stream)
        self.waiting.append((array, path.read_bytes()[first : first + nbytes]))

    def synchronize(self, *_: int) -> None:
        for stream in self.streams:
            self.rig.cuda.synchronize_stream(stream)
        for array, content in self.waiting:
            assert array.tobytes() == content
        self.waiting.clear()

    def write(self, which: int) -> None:
        self.synchronize()
        self.paths[which].write_bytes(os.urandom(SIZE))
        now = next(self.clock)
        os.utime(self.paths[which], ns=(now, now))

    def replace(self, which: int) -> None:
        self.synchronize()
        (self.folder / "new").write_bytes(os.urandom(SIZE))
        (self.folder / "new").rename(self.paths[which])


@settings(deadline=None, max_examples=60)
@given(steps=steps, budget=st.sampled_from([SIZE, 2 * SIZE, 6 * SIZE]))
def test_whatever_happens_in_between_the_bytes_are_those_of_the_file_at_the_call(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]], budget: int
) -> None:
    walk = Walk(tmp_path_factory.mktemp("walk"), budget)
    for step, *numbers in steps:
        getattr(walk, step)(*numbers)
    walk.synchronize()
    walk.rig.check_released(streams=2)


def test_file_that_is_gone_is_missed_though_its_pages_are_kept(rig: Rig) -> None:
    rig.path.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        rig.read(rig.array())
    assert caught.value.errno == errno.ENOENT
    rig.check_idle()

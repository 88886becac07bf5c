from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bindings.posix import FileStatus, PosixFiles
from headrace.errors import DeviceError
from headrace.memory.mappings import Mappings, Window, WindowKey
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.types import ByteRange
from tests.support import PAGE, write_random

WINDOW = 4 * PAGE


class Rig:
    """A file of eight windows, and a budget for three of them."""

    def __init__(self, path: Path, budget_nbytes: int = 3 * WINDOW) -> None:
        self.content = write_random(path, 8 * WINDOW)
        self.cuda, self.fd = FakeCuda(), os.open(path, os.O_RDONLY)
        self.mappings = Mappings(self.cuda, PosixFiles(), budget_nbytes)
        self.stream = self.cuda.create_stream()
        self.identity = PosixFiles().status(self.fd)

    def take(self, number: int, identity: FileStatus | None = None) -> Window:
        start = number * WINDOW
        key = WindowKey(identity or self.identity, start, start + WINDOW)
        return self.mappings.take(self.fd, key)

    def leave(self, number: int, stream: int | None = None) -> FakeDeviceArray:
        """Leave a copy of a window under way."""
        window, array = self.take(number), FakeDeviceArray(self.cuda, WINDOW)
        stream = stream or self.stream
        self.cuda.copy_to_device([(array.pointer, window.pointer, WINDOW)], stream)
        self.mappings.leave([window], stream)
        return array

    def holds(self, array: FakeDeviceArray, number: int) -> bool:
        return array.tobytes() == self.content[number * WINDOW : (number + 1) * WINDOW]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "file")
    yield made
    made.mappings.close()
    os.close(made.fd)
    assert (made.cuda.mapped_nbytes, made.cuda.live_events, made.mappings.nbytes) == (0, 0, 0)
    assert (made.cuda.pending_copies, made.cuda.errors) == (0, [])


def test_window_left_under_way_is_kept_and_taken_again(rig: Rig) -> None:
    array = rig.leave(0)
    assert (rig.mappings.nbytes, rig.cuda.live_events, rig.cuda.pending_copies) == (WINDOW, 1, 1)
    window = rig.take(0)
    assert (window.kept, len(window.marks), rig.mappings.nbytes) == (True, 1, 0)
    rig.mappings.give_back(window)
    rig.mappings.close()
    assert rig.holds(array, 0)


def test_copies_on_several_streams_are_all_waited_for(rig: Rig) -> None:
    streams = [rig.cuda.create_stream() for _ in range(3)]
    arrays = [rig.leave(0, stream) for stream in streams]
    assert rig.cuda.live_events == 3
    rig.mappings.close()
    assert all(rig.holds(array, 0) for array in arrays)


def test_events_that_have_happened_are_given_up_when_the_window_is_taken(rig: Rig) -> None:
    other = rig.cuda.create_stream()
    rig.leave(0, other)
    rig.leave(0)
    rig.cuda.synchronize_stream(rig.stream)
    window = rig.take(0)
    assert (len(window.marks), rig.cuda.live_events) == (1, 1)
    rig.mappings.give_back(window)


def test_windows_of_one_transfer_share_an_event_until_the_last_lets_go(rig: Rig) -> None:
    windows = [rig.take(number) for number in range(3)]
    arrays = [FakeDeviceArray(rig.cuda, WINDOW) for _ in windows]
    for window, array in zip(windows, arrays, strict=True):
        rig.cuda.copy_to_device([(array.pointer, window.pointer, WINDOW)], rig.stream)
    rig.mappings.leave(windows, rig.stream)
    assert (windows, rig.cuda.live_events, rig.mappings.nbytes) == ([], 1, 3 * WINDOW)
    rig.mappings.drop(rig.take(1))
    assert rig.holds(arrays[1], 1)
    assert rig.cuda.live_events == 1
    rig.mappings.give_back(rig.take(0))  # its copy is done, so it needs the event no more
    assert rig.cuda.live_events == 1
    rig.mappings.give_back(rig.take(2))
    assert rig.cuda.live_events == 0
    assert all(rig.holds(array, number) for number, array in enumerate(arrays))


def test_event_that_cuda_will_not_destroy_costs_the_window_that_let_go_last(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [rig.leave(number) for number in range(1)]
    windows = [rig.take(number) for number in range(3)]
    rig.mappings.leave(windows, rig.stream)
    rig.cuda.synchronize_stream(rig.stream)
    left = list[int]()

    def fail(event: int) -> None:
        left.append(event)
        raise DeviceError("cudaEventDestroy failed: cudaErrorUnknown (999)")

    kept = [rig.take(1), rig.take(2)]
    with monkeypatch.context() as failing:
        failing.setattr(rig.cuda, "destroy_event", fail)
        with pytest.raises(DeviceError, match="cudaEventDestroy"):
            rig.take(0)
    assert rig.cuda.mapped_nbytes == 2 * WINDOW
    assert [window.marks for window in kept] == [(), ()]
    for window in kept:
        rig.mappings.give_back(window)
    assert rig.holds(arrays[0], 0)
    for event in left:
        rig.cuda.destroy_event(event)


def test_window_that_cuda_will_not_release_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "file", budget_nbytes=2 * WINDOW)
    windows = [rig.take(number) for number in range(4)]
    real, told = rig.cuda.unregister_host, list[int]()

    def fail_once(pointer: int) -> None:
        told.append(pointer)
        if len(told) == 1:
            raise DeviceError("cudaHostUnregister failed: cudaErrorUnknown (999)")
        real(pointer)

    with monkeypatch.context() as failing:
        failing.setattr(rig.cuda, "unregister_host", fail_once)
        with pytest.raises(DeviceError, match="cudaHostUnregister"):
            rig.mappings.leave(windows, rig.stream)
    assert (len(told), rig.mappings.nbytes) == (2, 2 * WINDOW)
    rig.cuda.unregister_host(told[0])
    rig.mappings.close()
    os.close(rig.fd)
    assert (rig.cuda.mapped_nbytes, rig.cuda.live_events, rig.cuda.errors) == (0, 0, [])


def test_nothing_is_marked_for_no_windows(rig: Rig) -> None:
    rig.mappings.leave([], rig.stream)
    assert rig.cuda.live_events == 0


def test_window_that_leaves_waits_for_its_copies_alone(rig: Rig) -> None:
    streams = [rig.cuda.create_stream() for _ in range(4)]
    arrays = [rig.leave(number, stream) for number, stream in enumerate(streams)]
    assert [rig.holds(array, number) for number, array in enumerate(arrays)] == [True, *3 * [False]]
    assert rig.mappings.nbytes == 3 * WINDOW


def test_second_window_of_the_same_bytes_is_released_after_its_copies(rig: Rig) -> None:
    first, array = rig.take(0), FakeDeviceArray(rig.cuda, WINDOW)
    second = rig.take(0)
    rig.cuda.copy_to_device([(array.pointer, second.pointer, WINDOW)], rig.stream)
    rig.mappings.leave([first], rig.stream)
    assert not rig.holds(array, 0)
    rig.mappings.leave([second], rig.stream)
    assert rig.holds(array, 0)
    assert rig.cuda.mapped_nbytes == WINDOW


def test_forgetting_an_older_state_waits_for_its_copies(rig: Rig, tmp_path: Path) -> None:
    array = rig.leave(0)
    os.utime(tmp_path / "file", ns=(1, 1))
    newer = PosixFiles().status(rig.fd)
    rig.mappings.forget_older(rig.identity)
    assert not rig.holds(array, 0)
    rig.mappings.forget_older(newer)
    assert rig.holds(array, 0)
    assert (rig.mappings.nbytes, rig.cuda.mapped_nbytes) == (0, 0)


@pytest.mark.parametrize(
    ("ranges", "covered"),
    [
        ([], True),
        ([(0, 1)], False),
        ([(WINDOW - 1, WINDOW + 1)], False),
        ([(WINDOW, 3 * WINDOW)], True),
        ([(WINDOW + 5, WINDOW + 6), (2 * WINDOW - 1, 2 * WINDOW + 1)], True),
        ([(WINDOW, 3 * WINDOW + 1)], False),
        ([(3 * WINDOW, 3 * WINDOW + 1)], False),
        ([(WINDOW, 2 * WINDOW), (5 * WINDOW, 6 * WINDOW)], True),
        ([(WINDOW, 6 * WINDOW)], False),
        ([(6 * WINDOW - 1, 6 * WINDOW)], True),
        ([(6 * WINDOW - 1, 6 * WINDOW + 1)], False),
    ],
    ids=str,
)
def test_covered_is_what_kept_windows_hold_together(
    rig: Rig, ranges: list[tuple[int, int]], covered: bool, tmp_path: Path
) -> None:
    for number in (5, 1, 2):
        rig.mappings.give_back(rig.take(number))
    wanted = [ByteRange(start, stop) for start, stop in ranges]
    assert rig.mappings.covers(rig.identity, wanted) is covered
    os.utime(tmp_path / "file", ns=(1, 1))
    assert rig.mappings.covers(PosixFiles().status(rig.fd), wanted) is (not ranges)


def test_budget_counts_whole_pages(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "file", budget_nbytes=2 * WINDOW - PAGE + 1)
    for number in (0, 1):
        rig.mappings.give_back(rig.take(number))
    assert rig.mappings.nbytes == 2 * WINDOW
    assert rig.mappings.keeps(2 * WINDOW)
    assert not rig.mappings.keeps(2 * WINDOW + 1)
    rig.mappings.close()
    os.close(rig.fd)


@pytest.mark.parametrize("call", ["unregister_host", "destroy_event"])
def test_one_window_that_cuda_will_not_release_does_not_keep_the_others(
    rig: Rig, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [rig.leave(number) for number in range(3)]
    real, told = getattr(rig.cuda, call), list[int]()

    def fail_once(handle: int) -> None:
        told.append(handle)
        if len(told) == 1:
            raise DeviceError(f"{call} failed: cudaErrorUnknown (999)")
        real(handle)

    with monkeypatch.context() as failing:
        failing.setattr(rig.cuda, call, fail_once)
        with pytest.raises(DeviceError, match=call):
            rig.mappings.close()
    assert len(told) == 3
    assert (rig.mappings.nbytes, rig.cuda.pending_copies) == (0, 0)
    assert all(rig.holds(array, number) for number, array in enumerate(arrays))
    if call == "unregister_host":
        rig.cuda.unregister_host(told[0])
    else:
        rig.cuda.destroy_event(told[0])


def test_window_whose_copies_cannot_be_waited_for_stays_registered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To release pages under a copy would be worse than to lose them."""
    array = rig.leave(0)
    rig.leave(1)
    window = rig.take(0)

    def fail(event: int) -> None:
        if event in [mark.event for mark in window.marks]:
            raise DeviceError("cudaEventSynchronize failed: cudaErrorUnknown (999)")

    with monkeypatch.context() as failing:
        failing.setattr(rig.cuda, "synchronize_event", fail)
        with pytest.raises(DeviceError, match="cudaEventSynchronize"):
            rig.mappings.drop(window)
    assert rig.cuda.mapped_nbytes == 2 * WINDOW
    rig.mappings.drop(window)
    assert rig.holds(array, 0)

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace as hr
from headrace.observers import Observers, Trace, process_observers
from headrace.report import Report
from tests.support import write_random


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Report]:
    """Read a small file; each call is one transfer."""
    path = tmp_path / "file"
    write_random(path, 1000)

    def call(context: hr.Context | None = None) -> Report:
        return hr.read_into(bytearray(1000), path, context=context)

    return call


def test_trace_holds_each_report_in_order(read: Callable[..., Report]) -> None:
    read()
    with hr.trace() as trace:
        made = [read(), read(), read()]
    read()
    assert len(trace.reports) == 3
    assert all(kept is each for kept, each in zip(trace.reports, made, strict=True))


def test_trace_hears_threads_and_contexts(read: Callable[..., Report]) -> None:
    with hr.Context() as first, hr.Context() as second, hr.trace() as trace:
        threads = [
            threading.Thread(target=lambda context=context: [read(context) for _ in range(10)])
            for context in (first, second, None, first)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(trace.reports) == 40
    assert {report.nbytes for report in trace.reports} == {1000}


def test_nested_traces_each_hear_what_is_inside_them(read: Callable[..., Report]) -> None:
    with hr.trace() as outer:
        with hr.trace() as inner:
            read()
        read()
    assert (len(outer.reports), len(inner.reports)) == (2, 1)


def test_traces_with_equal_content_are_told_apart(read: Callable[..., Report]) -> None:
    first, second = hr.trace(), hr.trace()
    with first:
        with second:
            assert first.reports == second.reports == []
        read()
    assert (len(first.reports), len(second.reports)) == (1, 0)


def test_trace_ends_when_its_block_raises(read: Callable[..., Report]) -> None:
    trace = hr.trace()

    def fail() -> None:
        with trace:
            read()
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    read()
    assert len(trace.reports) == 1


def test_trace_may_be_entered_again_and_goes_on(read: Callable[..., Report]) -> None:
    trace = hr.trace()
    for _ in range(2):
        with trace:
            read()
        read()
    assert len(trace.reports) == 2


def test_failed_transfer_has_no_report(tmp_path: Path) -> None:
    with hr.trace() as trace, pytest.raises(FileNotFoundError):
        hr.read_into(bytearray(3), tmp_path / "missing")
    assert trace.reports == []


def test_explaining_has_no_report(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_random(path, 100)
    with hr.trace() as trace:
        hr.explain(path, device="cpu", raw=True)
    assert trace.reports == []


def test_context_with_observers_of_its_own_tells_them_alone(read: Callable[..., Report]) -> None:
    own = Observers()
    with hr.Context(observers=own) as context, hr.trace() as public, Trace(own) as private:
        read(context)
    assert (len(public.reports), len(private.reports)) == (0, 1)


def test_observer_is_told_until_it_is_removed(read: Callable[..., Report]) -> None:
    heard: list[Report] = []
    observers = Observers()
    with hr.Context(observers=observers) as context:
        observers.add(heard.append)
        observers.add(heard.append)
        read(context)
        observers.remove(heard.append)
        read(context)
    assert len(heard) == 2


def test_observer_may_leave_while_it_is_told(read: Callable[..., Report]) -> None:
    observers, heard = Observers(), []

    def once(report: Report) -> None:
        heard.append(report)
        observers.remove(once)

    observers.add(once)
    observers.add(heard.append)
    with hr.Context(observers=observers) as context:
        read(context)
        read(context)
    assert len(heard) == 3


def test_observers_of_the_process_are_one_object() -> None:
    assert process_observers() is process_observers()
    with hr.Context() as context:
        assert context.observers is process_observers()

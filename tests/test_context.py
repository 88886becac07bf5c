from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headrace as hr
import headrace.numpy as hn
from headrace.observers import Observers
from headrace.planning.route import parse_route
from headrace.survey import want_checkpoint
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.faulty_files import pages_where
from headrace.types import HOST, Route
from tests.support import (
    PAGE,
    TIMEOUT_S,
    RecordedSystem,
    ends_in_time,
    folder_with_direct,
    no_workers_left,
    run_python,
    write_random,
)

MIB = 1 << 20
SIZE = 40 * MIB + 333
"""More than what is read through the page cache because it is little."""
HALF = 20 * MIB
MOUNTINFO = "/proc/self/mountinfo"

nothing = pages_where(lambda _: False)
first_half = pages_where(lambda page: page < HALF // PAGE)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = folder_with_direct(tmp_path_factory.mktemp("context")) / "sample.bin"
    return path, write_random(path, SIZE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({name: np.arange(1000, dtype=np.float32) for name in "abc"}, path)
    return path


@pytest.fixture
def log() -> Iterator[list[logging.LogRecord]]:
    """What the logger `headrace` is told meanwhile."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("headrace")
    setattr(handler, "emit", records.append)  # noqa: B010 (mypy forbids the assignment)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(before)


def load(path: Path, context: hr.Context, **arguments: Any) -> hr.Report:
    return hr.read_into(bytearray(path.stat().st_size), path, context=context, **arguments)


def planned(made: hr.Report | hr.Explanation) -> dict[str, int]:
    return {str(each.route): each.nbytes for each in made.planned}


# The report.


def test_report_of_a_half_resident_file_has_both_routes(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    with hr.Context(files=FaultyFiles(resident=first_half)) as context:
        buffer = bytearray(SIZE)
        report = hr.read_into(buffer, path, context=context)
    assert buffer == content
    assert planned(report) == {"host": HALF, "direct": SIZE - HALF}
    assert report.resident_nbytes == HALF
    assert {str(o.route): o.nbytes for o in report.observed} == planned(report)


def test_report_of_a_whole_load_adds_up_and_is_plain_data(model: Path) -> None:
    with hr.trace() as trace:
        hn.load(model)
    (report,) = trace.reports
    record = json.loads(json.dumps(report.to_dict()))
    assert record["nbytes"] == 12_000 == sum(each["nbytes"] for each in record["observed"])
    assert record["nbytes"] == sum(each["nbytes"] for each in record["planned"])
    assert record["source"] == str(model)
    assert set(record["stages"]) >= {"open", "plan", "allocate", "transfer", "verify", "read"}
    assert sum(record["stages"][s] for s in ("plan", "allocate", "transfer")) <= record["seconds"]
    assert record["pinned_nbytes"] == 0
    assert record["gb_per_s"] == pytest.approx(record["nbytes"] / record["seconds"] / 1e9)


def test_every_route_is_taken_or_rejected_in_the_report(sample: tuple[Path, bytes]) -> None:
    for faults in ({}, {"resident": nothing}, {"resident": nothing, "refuse_direct": True}):
        with hr.Context(files=FaultyFiles(**faults)) as context:
            report = load(sample[0], context)
        taken = {str(each.route) for each in report.planned}
        rejected = {str(each.route) for each in report.rejected}
        assert taken | rejected == {str(route) for route in Route}
        assert all(each.why for each in report.rejected)


def test_resident_bytes_are_wanted_bytes_only(model: Path) -> None:
    with hr.trace() as trace:
        hn.load(model, names=["a", "c"])
    (report,) = trace.reports
    assert report.nbytes == 8000
    assert report.resident_nbytes <= 8000


def test_reason_claims_no_residency_that_is_unknown(sample: tuple[Path, bytes]) -> None:
    files = FaultyFiles(no_cachestat=True, no_mincore=True)
    with hr.Context(files=files) as context:
        report = load(sample[0], context)
    whys = [each.why for each in report.planned] + [each.why for each in report.rejected]
    claims = [why for why in whys if "the page cache holds these bytes" in why]
    assert not [why for why in claims if "cannot be known" not in why]


def test_wall_time_of_the_report_is_that_of_the_call(sample: tuple[Path, bytes]) -> None:
    class SlowToOpen(FaultyFiles):
        def open(self, path: str, *, direct: bool = False) -> int:
            time.sleep(0.2)
            return super().open(path, direct=direct)

    with hr.Context(files=SlowToOpen()) as context:
        began = time.perf_counter()
        report = load(sample[0], context)
        wall = time.perf_counter() - began
    assert report.seconds <= wall
    assert report.seconds > 0.35


def test_cpu_time_of_a_small_read_is_counted_once(sample: tuple[Path, bytes]) -> None:
    class Busy(FaultyFiles):
        def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                pass
            return super().preadv(fd, views, file_offset)

    with hr.Context(files=Busy()) as context:
        report = hr.read_into(bytearray(PAGE), sample[0], context=context)
    assert 0.1 <= report.cpu_seconds < 0.15


# Logging.


def test_each_transfer_logs_its_line_at_info(
    sample: tuple[Path, bytes], log: list[logging.LogRecord]
) -> None:
    with hr.Context() as context:
        reports = [load(sample[0], context) for _ in range(2)]
    assert [(r.levelname, r.name) for r in log] == [("INFO", "headrace")] * 2
    assert [r.getMessage() for r in log] == [str(report) for report in reports]


def test_downgrade_warns_once_per_cause_and_context(
    sample: tuple[Path, bytes], tmp_path: Path, log: list[logging.LogRecord]
) -> None:
    other = tmp_path / "other.bin"
    write_random(other, SIZE)
    files = FaultyFiles(resident=nothing, refuse_direct=True)
    for _ in range(2):
        with hr.Context(files=files) as context:
            for path in (sample[0], sample[0], other):
                report = load(path, context)
                assert planned(report) == {"host": SIZE}
    warnings = [r.getMessage() for r in log if r.levelname == "WARNING"]
    assert len(warnings) == 2
    assert str(sample[0]) in warnings[0]
    for word in ("downgrade", "direct", "refused", "Invalid argument"):
        assert word in warnings[0]


def test_downgrade_warns_once_though_threads_meet_it_together(
    sample: tuple[Path, bytes], log: list[logging.LogRecord]
) -> None:
    files = FaultyFiles(resident=nothing, refuse_direct=True)
    with hr.Context(files=files) as context, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: load(sample[0], context), range(8)))
    assert [r.levelname for r in log].count("WARNING") == 1


def test_resident_file_on_a_volume_without_o_direct_is_no_downgrade(
    sample: tuple[Path, bytes], log: list[logging.LogRecord]
) -> None:
    everything = pages_where(lambda _: True)
    with hr.Context(files=FaultyFiles(refuse_direct=True, resident=everything)) as context:
        load(sample[0], context)
    assert {r.levelname for r in log} == {"INFO"}


def test_memory_that_cannot_be_page_locked_warns_and_is_reported(
    sample: tuple[Path, bytes], log: list[logging.LogRecord]
) -> None:
    cuda = FakeCuda(pinned_limit_nbytes=0)
    array = FakeDeviceArray(cuda, SIZE)
    with hr.Context(cuda=cuda) as context:
        report = hr.read_into(array, sample[0], context=context)
    assert array.tobytes() == sample[1]
    assert report.pinned_nbytes == 0
    assert any("no page-locked memory" in each.why for each in report.rejected)
    warnings = [r.getMessage() for r in log if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "cudaErrorMemoryAllocation" in warnings[0]


# strict


def test_strict_context_refuses_a_downgrade_before_a_byte_is_read(
    sample: tuple[Path, bytes],
) -> None:
    files = FaultyFiles(resident=nothing, refuse_direct=True)
    with hr.Context(hr.Options(strict=True), files=files) as context:
        with pytest.raises(
            hr.RouteUnavailable, match="strict=True forbids host in place of direct"
        ):
            load(sample[0], context)
        assert planned(load(sample[0], context, route="host")) == {"host": SIZE}
    assert files.direct_nbytes == 0
    assert files.open_descriptors == ()


def test_strict_context_refuses_memory_that_cannot_be_page_locked(
    sample: tuple[Path, bytes],
) -> None:
    cuda, files = FakeCuda(pinned_limit_nbytes=0), FaultyFiles()
    array = FakeDeviceArray(cuda, SIZE)
    with (
        hr.Context(hr.Options(strict=True), files=files, cuda=cuda) as context,
        pytest.raises(hr.RouteUnavailable, match="no page-locked memory"),
    ):
        hr.read_into(array, sample[0], context=context)
    assert files.nbytes_read == 0


def test_strict_context_serves_what_is_no_downgrade(sample: tuple[Path, bytes]) -> None:
    for resident, route in ((nothing, "direct"), (pages_where(lambda _: True), "host")):
        files = FaultyFiles(resident=resident)
        with hr.Context(hr.Options(strict=True), files=files) as context:
            assert planned(load(sample[0], context)) == {route: SIZE}


# reuse


@pytest.mark.parametrize(
    ("reuse", "route"), [("auto", "direct"), ("once", "direct"), ("many", "host")]
)
def test_reuse_decides_where_missing_bytes_go(
    sample: tuple[Path, bytes], reuse: Any, route: str
) -> None:
    files = FaultyFiles(resident=nothing)
    with hr.Context(hr.Options(reuse=reuse), files=files) as context:
        assert planned(load(sample[0], context)) == {route: SIZE}
    assert files.forgotten_nbytes == 0


def test_buffered_read_of_missing_bytes_is_cleaned_up_after_one_use(
    sample: tuple[Path, bytes],
) -> None:
    files = FaultyFiles(resident=nothing, refuse_direct=True)
    with hr.Context(hr.Options(reuse="once"), files=files) as context:
        load(sample[0], context)
    assert files.forgotten_nbytes == SIZE


def test_resident_bytes_are_not_thrown_out_of_the_page_cache(sample: tuple[Path, bytes]) -> None:
    files = FaultyFiles(resident=pages_where(lambda _: True))
    with hr.Context(hr.Options(reuse="once"), files=files) as context:
        load(sample[0], context)
    assert files.forgotten_nbytes == 0


# explain


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {"resident": nothing},
        {"resident": first_half},
        {"resident": nothing, "refuse_direct": True},
        {"no_cachestat": True},
        {"no_cachestat": True, "no_mincore": True},
    ],
    ids=lambda faults: ",".join(faults) or "none",
)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_explain_plans_what_the_load_then_does_and_reads_no_payload(
    sample: tuple[Path, bytes], faults: dict[str, Any], device: str
) -> None:
    path, _ = sample
    files, cuda = FaultyFiles(**faults), FakeCuda()
    with hr.Context(files=files, cuda=cuda) as context:
        made = hr.explain(path, device=device, raw=True, context=context)
        assert (files.reads, files.nbytes_read, files.open_descriptors) == (0, 0, ())
        assert cuda.pinned_nbytes == 0
        into = bytearray(SIZE) if device == "cpu" else FakeDeviceArray(cuda, SIZE)
        report = hr.read_into(into, path, context=context)
    assert made.planned == report.planned
    assert made.rejected == report.rejected
    assert (made.source, made.device) == (report.source, report.device)


def test_explain_of_a_checkpoint_lists_its_tensors_and_facts(model: Path) -> None:
    with hr.Context(cuda=FakeCuda()) as context:
        record = hr.explain(model, device="cuda", context=context).to_dict()
    assert [each["name"] for each in record["tensors"]] == ["a", "b", "c"]
    assert {each["path"] for each in record["tensors"]} == {str(model)}
    content = model.read_bytes()
    for each in record["tensors"]:
        stored = content[each["file_offset"] : each["file_offset"] + each["nbytes"]]
        assert stored == np.arange(1000, dtype=np.float32).tobytes()
    assert {each["name"] for each in record["facts"]} >= {"CUDA device", "O_DIRECT", "resident"}


# Progress.


@pytest.mark.parametrize("route", ["auto", "host", "direct"])
@pytest.mark.parametrize("workers", [1, 2])
def test_progress_rises_to_the_total_in_the_callers_thread(
    sample: tuple[Path, bytes], route: str, workers: int
) -> None:
    files = SlowFiles(0.03, resident=first_half)
    options = hr.Options(workers=workers, block_nbytes=2 * MIB)
    told: list[tuple[int, int]] = []
    threads: set[threading.Thread] = set()

    def progress(done: hr.Progress) -> None:
        told.append((done.nbytes, done.total_nbytes))
        assert done.gb_per_s == pytest.approx(done.nbytes / done.seconds / 1e9)
        assert (done.seconds_left is None) is (done.nbytes == 0)
        threads.add(threading.current_thread())

    with hr.Context(options, files=files) as context:
        hn.load(as_checkpoint(sample[0]), route=route, progress=progress, context=context)
    assert threads == {threading.current_thread()}
    assert told == sorted(told)
    assert {total for _, total in told} == {SIZE}
    assert len({moved for moved, _ in told}) > 2
    assert told[-1] == (SIZE, SIZE)


def as_checkpoint(path: Path) -> Path:
    """The bytes of a file as one tensor."""
    made = path.with_suffix(".safetensors")
    if not made.exists():
        save_file({"all": np.fromfile(path, np.uint8)}, made)
    return made


def test_progress_of_a_small_load_reaches_the_total_too(model: Path) -> None:
    for _ in range(20):
        told: list[hr.Progress] = []
        hn.load(model, progress=told.append)
        assert (told[-1].nbytes, told[-1].total_nbytes) == (12_000, 12_000)
        assert told[-1].seconds_left == 0


def test_progress_that_raises_stops_the_load_and_the_next_one_works(
    sample: tuple[Path, bytes],
) -> None:
    files = SlowFiles(0.02)
    with hr.Context(hr.Options(workers=2, block_nbytes=MIB), files=files) as context:

        def progress(done: hr.Progress) -> None:
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            hn.load(as_checkpoint(sample[0]), progress=progress, context=context)
        assert not files.under_way
        assert files.open_descriptors == ()
        assert files.nbytes_read < SIZE
        assert load(sample[0], context).nbytes == SIZE


class SlowFiles(FaultyFiles):
    """Reads that take their time."""

    def __init__(self, delay_s: float, **faults: Any) -> None:
        super().__init__(**faults)
        self.delay_s = delay_s
        self.slow: threading.Thread | None = None
        """The one thread that takes eight times as long."""
        self.slow_reads = threading.Event()
        """That thread is reading."""
        self.under_way: set[object] = set()
        """Reads that have begun and not ended."""

    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        token = object()
        self.under_way.add(token)
        try:
            if threading.current_thread() is self.slow:
                self.slow_reads.set()
                time.sleep(7 * self.delay_s)
            time.sleep(self.delay_s)
            return super().preadv(fd, views, file_offset)
        finally:
            self.under_way.remove(token)


# Ctrl-C.


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads of engines, in the order in which they were started."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def noted_start(thread: threading.Thread) -> None:
        if thread.name == "headrace":
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted_start)
    return started


@contextlib.contextmanager
def ctrl_c_once_reading(files: SlowFiles, crew: list[threading.Thread]) -> Iterator[None]:
    """Ctrl-C, which the kernel gives to the main thread, while the first of three workers reads."""

    def interrupt() -> None:
        while len(crew) < 3:
            time.sleep(0.001)
        files.slow = crew[0]
        files.slow_reads.wait(TIMEOUT_S)
        time.sleep(files.delay_s)  # by now the caller waits for the workers
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        interrupter.join()


THREE = hr.Options(workers=3, block_nbytes=MIB, pinned_nbytes=8 * MIB)


@pytest.mark.parametrize("faults", [{}, {"resident": nothing}], ids=["host", "direct"])
def test_ctrl_c_stops_the_workers_and_nothing_writes_afterwards(
    sample: tuple[Path, bytes], crew: list[threading.Thread], faults: dict[str, Any]
) -> None:
    path, content = sample
    files = SlowFiles(0.03, **faults)
    buffer = bytearray(SIZE)
    with hr.Context(THREE, files=files) as context:
        try:
            with ctrl_c_once_reading(files, crew):
                hr.read_into(buffer, path, context=context)
            assert not files.under_way
        finally:
            wait_for_workers()
        assert files.open_descriptors == ()
        assert files.nbytes_read < SIZE
        files.delay_s = 0.0
        again = bytearray(SIZE)
        hr.read_into(again, path, context=context)
        assert again == content


def test_ctrl_c_during_a_load_to_the_gpu_leaves_no_copy_and_no_memory(
    sample: tuple[Path, bytes], crew: list[threading.Thread]
) -> None:
    files, cuda = SlowFiles(0.03), FakeCuda()
    array = FakeDeviceArray(cuda, SIZE)
    with hr.Context(THREE, files=files, cuda=cuda) as context:
        try:
            with ctrl_c_once_reading(files, crew):
                hr.read_into(array, sample[0], context=context)
            assert not files.under_way
        finally:
            wait_for_workers()
        assert (cuda.pending_copies, cuda.errors) == (0, [])
        files.delay_s = 0.0
        hr.read_into(array, sample[0], context=context)
        assert array.tobytes() == sample[1]
    assert (cuda.pinned_nbytes, cuda.live_streams, cuda.live_events) == (0, 0, 0)


def wait_for_workers() -> None:
    """Let no worker of a failed test write into memory of the next one."""
    until = time.monotonic() + TIMEOUT_S
    while not no_workers_left() and time.monotonic() < until:
        time.sleep(0.01)


def test_ctrl_c_while_a_worker_starts_waits_for_that_worker_too(
    sample: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []
    files = SlowFiles(0.03)

    def interrupted_start(thread: threading.Thread) -> None:
        if thread.name == "headrace":
            started.append(thread)
            files.slow = thread if len(started) == 2 else None
        start(thread)
        if files.slow is thread:
            files.slow_reads.wait(TIMEOUT_S)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with hr.Context(THREE, files=files) as context:
        try:
            with pytest.raises(KeyboardInterrupt):
                load(sample[0], context)
            assert not files.under_way
        finally:
            wait_for_workers()


# Life and death.


def test_closed_context_refuses_and_says_what_to_do(sample: tuple[Path, bytes]) -> None:
    context = hr.Context()
    with context as entered:
        assert entered is context
    context.close()
    for call in (
        lambda: load(sample[0], context),
        lambda: hr.explain(sample[0], device="cpu", raw=True, context=context),
        lambda: hn.load(as_checkpoint(sample[0]), context=context),
    ):
        with pytest.raises(ValueError, match="the context is closed; make a new one"):
            call()


def test_closing_waits_for_the_load_that_is_under_way(sample: tuple[Path, bytes]) -> None:
    files = SlowFiles(0.05)
    context = hr.Context(hr.Options(workers=1), files=files)
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(load, sample[0], context)
        while not files.opens:
            time.sleep(0.001)
        context.close()
        assert files.open_descriptors == ()
        assert under_way.result(TIMEOUT_S).nbytes == SIZE


def test_closing_inside_a_transfer_does_not_wait_for_itself(model: Path) -> None:
    context = hr.Context()

    def work() -> None:
        with contextlib.suppress(Exception):
            hn.load(model, context=context, progress=lambda *_: context.close())

    assert ends_in_time(work, 0.5)


def test_closing_releases_streams_and_page_locked_memory(sample: tuple[Path, bytes]) -> None:
    cuda = FakeCuda()
    array = FakeDeviceArray(cuda, SIZE)
    with hr.Context(cuda=cuda) as context:
        first = hr.read_into(array, sample[0], context=context)
        second = hr.read_into(array, sample[0], context=context)
        assert first.pinned_nbytes > 0
        assert cuda.pinned_nbytes == second.pinned_nbytes
        assert cuda.peak_pinned_nbytes <= context.options.pinned_nbytes
    assert (cuda.pinned_nbytes, cuda.live_streams, cuda.live_events, cuda.errors) == (0, 0, 0, [])


def test_nothing_is_made_before_it_is_needed(sample: tuple[Path, bytes]) -> None:
    cuda = FakeCuda()
    with hr.Context(cuda=cuda) as context:
        load(sample[0], context)
        hr.explain(sample[0], device="cuda", raw=True, context=context)
        assert (cuda.live_streams, cuda.peak_pinned_nbytes) == (0, 0)


def test_failed_allocation_closes_the_files_and_leaves_the_context_usable(
    sample: tuple[Path, bytes],
) -> None:
    files = FaultyFiles()
    path = as_checkpoint(sample[0])
    with hr.Context(files=files) as context:

        def no_memory(specs: object) -> Any:
            raise MemoryError("wanted more than there is")

        with pytest.raises(MemoryError, match="wanted more"):
            context.transfer(want_checkpoint(path), HOST, no_memory)
        assert (files.open_descriptors, files.nbytes_read) == ((), 0)
        assert load(sample[0], context).nbytes == SIZE


def test_two_contexts_work_at_once_with_pools_of_their_own(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    cuda = FakeCuda(devices=2)
    options = hr.Options(workers=3, block_nbytes=MIB, pinned_nbytes=3 * MIB)
    arrays = [FakeDeviceArray(cuda, SIZE, device) for device in (0, 1)]
    with (
        hr.Context(options, cuda=cuda) as first,
        hr.Context(options, cuda=cuda) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        reading = [
            threads.submit(hr.read_into, array, path, context=context)
            for array, context in zip(arrays, (first, second), strict=True)
        ]
        reports = [each.result(TIMEOUT_S) for each in reading]
    assert [array.tobytes() == content for array in arrays] == [True, True]
    assert {report.device for report in reports} == {"cuda:0", "cuda:1"}
    assert all(report.pinned_nbytes <= 3 * MIB for report in reports)
    assert cuda.peak_pinned_nbytes <= 6 * MIB
    assert (cuda.pinned_nbytes, cuda.errors) == (0, [])


def test_threads_share_one_context(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    files = FaultyFiles(resident=first_half)

    def read(number: int) -> bool:
        buffer = bytearray(1000 * PAGE)
        hr.read_into(buffer, path, file_offset=number * 777, context=context)
        return buffer == content[number * 777 : number * 777 + len(buffer)]

    with (
        hr.Context(hr.Options(workers=2), files=files) as context,
        ThreadPoolExecutor(4) as threads,
    ):
        assert all(threads.map(read, range(12)))
    assert files.open_descriptors == ()


def test_default_context_is_one_and_serves_the_module_functions(
    sample: tuple[Path, bytes],
) -> None:
    assert hr.default_context() is hr.default_context() is hr.Context.default()
    assert hr.default_context().options == hr.Options()


def test_default_context_is_made_once_though_threads_ask_together() -> None:
    code = """
import threading, time
import headrace.context as module
class Slow(module.Context):
    def __init__(self, **arguments):
        time.sleep(0.2)
        super().__init__(**arguments)
module.Context, found = Slow, []
threads = [
    threading.Thread(target=lambda: found.append(module.default_context())) for _ in range(3)
]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(set(map(id, found))))
"""
    assert run_python(code).strip() == "1"


def test_small_model_pins_little_however_slow_the_driver(tmp_path: Path) -> None:
    path, size = tmp_path / "25MB.bin", 25_000_000
    write_random(path, size)

    class SlowCuda(FakeCuda):
        """As on a crowded host; the first block is quick."""

        def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
            if self.pinned_nbytes:
                time.sleep(0.1)
            super().register_host(pointer, nbytes, read_only=read_only)

        def synchronize_stream(self, stream: int) -> None:
            time.sleep(0.1)
            super().synchronize_stream(stream)

    cuda = SlowCuda()
    array = FakeDeviceArray(cuda, size)
    with hr.Context(cuda=cuda, system=RecordedSystem(cpu_count=16)) as context:
        report = hr.read_into(array, path, context=context)
    assert array.tobytes() == path.read_bytes()
    assert report.pinned_nbytes == cuda.peak_pinned_nbytes <= 32 * MIB


# Routes.


def test_route_names_are_those_of_the_interface() -> None:
    assert parse_route("auto") is None
    assert [parse_route(str(route)) for route in Route] == list(Route)


@pytest.mark.parametrize("name", ["", "Auto", "HOST", "pinned", "Route.HOST", "auto "])
def test_unknown_route_is_a_value_error_that_lists_all(name: str) -> None:
    with pytest.raises(ValueError, match="does not exist") as caught:
        parse_route(name)
    for word in (repr(name), "auto, host, cached, mapped, direct, gds"):
        assert word in str(caught.value)


def test_forced_route_is_taken_whatever_is_resident(sample: tuple[Path, bytes]) -> None:
    for resident in (nothing, pages_where(lambda _: True)):
        files = FaultyFiles(resident=resident)
        with hr.Context(files=files) as context:
            assert planned(load(sample[0], context, route="host")) == {"host": SIZE}
            assert files.direct_nbytes == 0
            assert planned(load(sample[0], context, route="direct")) == {"direct": SIZE}
            assert files.buffered_nbytes == SIZE


def test_gpu_without_bindings_is_unavailable_with_what_to_install(
    sample: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with hr.Context() as context:
        assert context.gpu_fact().holds is False
        with pytest.raises(hr.RouteUnavailable, match=r"\[cuda13\]"):
            hr.explain(sample[0], device="cuda", raw=True, context=context)
        assert hr.explain(sample[0], raw=True, context=context).device == "cpu"


def test_file_on_a_file_system_in_memory_is_taken_as_resident(sample: tuple[Path, bytes]) -> None:
    texts = {MOUNTINFO: "36 1 0:1 / / rw - tmpfs tmpfs rw\n"}
    files = FaultyFiles(resident=nothing)
    with hr.Context(files=files, system=RecordedSystem(texts)) as context:
        report = load(sample[0], context)
    assert planned(report) == {"host": SIZE}
    assert report.resident_nbytes == SIZE


def test_changed_file_raises_though_every_byte_arrived(
    sample: tuple[Path, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    write_random(path, 100)
    with (
        hr.Context(files=FaultyFiles(rewrite_after=100), observers=Observers()) as context,
        pytest.raises(hr.SourceChanged, match="was written to"),
    ):
        load(path, context)

"""The parts of the benchmark of writing: peers, comparison, memory, stream order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.child import save_and_watch
from benchmarks.contestants import HeadraceParticipant
from benchmarks.memory import NumpyMemory
from benchmarks.needs import Need
from benchmarks.rounds import Clock
from benchmarks.save.comparison import find_file_difference
from benchmarks.save.host_memory import SaveOrder, measure_host_memory
from benchmarks.save.streams import StreamContest, StreamReader, run_streams, stream_readers
from benchmarks.save.watch import MemoryWatch
from benchmarks.save.writers import (
    HeadraceAsyncSaver,
    KvikioWriter,
    Writer,
    model_writers,
    raw_writers,
)

FOREVER = Clock(float("inf"))


class FakeKvikio(ModuleType):
    """As much of KvikIO as the writer uses; remembers its settings at each write."""

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.settings: dict[str, Any] = {}
        self.writes: list[tuple[dict[str, Any], int]] = []
        self.missing = 0
        self.defaults = ModuleType("kvikio.defaults")
        self.defaults.set = self._set  # type: ignore[attr-defined]

    @contextmanager
    def _set(self, settings: dict[str, Any]) -> Iterator[None]:
        before, self.settings = self.settings, settings
        yield
        self.settings = before

    @contextmanager
    def CuFile(self, path: Path, flags: str) -> Iterator[Any]:  # noqa: N802
        assert flags == "w"

        def write(array: Any) -> int:
            array.tofile(path)
            self.writes.append((self.settings, len(array)))
            return len(array) - self.missing

        handle = ModuleType("handle")
        handle.write = write  # type: ignore[attr-defined]
        yield handle


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> FakeKvikio:
    fake = FakeKvikio()
    monkeypatch.setitem(sys.modules, "kvikio", fake)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", fake.defaults)
    return fake


@pytest.mark.parametrize("threads", [1, 8, 16])
def test_kvikio_writes_with_its_threads_and_puts_its_settings_back(
    kvikio: FakeKvikio, tmp_path: Path, threads: int
) -> None:
    source = np.arange(100, dtype=np.uint8)
    writer = KvikioWriter(source, threads)
    with writer.session(tmp_path / "warm"):
        writer.write({"": source}, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == source.tobytes()
    settings, count = kvikio.writes[-1]
    assert settings == {"num_threads": threads, "task_size": 4 << 20}
    assert count == 100
    assert kvikio.settings == {}


def test_short_write_of_kvikio_is_an_error(kvikio: FakeKvikio, tmp_path: Path) -> None:
    kvikio.missing = 1
    source = np.zeros(100, np.uint8)
    with pytest.raises(OSError, match="99 of 100"):
        KvikioWriter(source, 8).write({"": source}, tmp_path / "file")


class Namespaces:
    """headrace's functions, replaced by ones that note how they are called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        patch.setattr("headrace.write_from", self._note("write_from"), raising=False)
        for name in ("save_file", "save_file_async"):
            patch.setattr(f"headrace.numpy.{name}", self._note(name), raising=False)

    def _note(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, align: bool = False, checksum: bool = False, **given: Any) -> Any:
            chosen = {k: True for k, v in (("align", align), ("checksum", checksum)) if v}
            self.calls.append((name, arguments, {**given, **chosen}))
            return self

        return call

    def result(self, timeout: float) -> Any:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"snapshot": "device"}


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch) -> Namespaces:
    return Namespaces(monkeypatch)


def write_all(writers: Any, arrays: Any, path: Path) -> None:
    for writer in writers:
        if isinstance(writer, HeadraceParticipant) and isinstance(writer, Writer):
            assert writer.why_absent() is None
            with writer.session(path):
                writer.write(arrays, path)
            writer.close()


def test_headrace_writes_raw_bytes_by_default_by_workers_and_by_route(
    headrace: Namespaces, tmp_path: Path
) -> None:
    source = np.zeros(4, np.uint8)
    write_all(raw_writers(NumpyMemory(), source), {"": source}, tmp_path / "file")
    assert all(c[:2] == ("write_from", (source, tmp_path / "file")) for c in headrace.calls)
    given = [c[2] for c in headrace.calls]
    assert given[0] == {}
    assert [options["context"].options.workers for options in given[1:4]] == [1, 8, 16]
    assert given[4:] == [{"route": "host"}]


def test_headrace_saves_a_model_by_default_aligned_and_with_checksums(
    headrace: Namespaces, tmp_path: Path
) -> None:
    arrays = {"a": np.zeros(4, np.uint8)}
    writers = model_writers(NumpyMemory())
    write_all(writers, arrays, tmp_path / "file")
    assert all(c[:2] == ("save_file", (arrays, tmp_path / "file")) for c in headrace.calls)
    assert [c[2] for c in headrace.calls] == [{}, {"align": True}, {"checksum": True}]
    assert [writer.is_exact for writer in writers] == [True, False, False, True]


def test_headrace_save_in_the_background_reports_its_snapshot(
    headrace: Namespaces, tmp_path: Path
) -> None:
    saver = HeadraceAsyncSaver(NumpyMemory())
    wait = saver.start({"a": np.zeros(4, np.uint8)}, tmp_path / "file")
    assert saver.take_reports() == ()
    wait(1.0)
    assert saver.take_reports() == ({"snapshot": "device"},)


@pytest.mark.parametrize(
    ("need", "why"),
    [
        (Need("json", "loads"), None),
        (Need("json", "loads", "cls"), None),
        (Need("json", "no_such"), "json has no no_such"),
        (Need("json", "JSONDecoder.decode", "stream"), "json.JSONDecoder.decode takes no stream="),
    ],
)
def test_what_is_missing_is_told(need: Need, why: str | None) -> None:
    assert need.why_missing() == why


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda data: data, None),
        (lambda data: data[:-1], "the file has"),
        (lambda data: data + b"x", "the file has"),
        (lambda data: data[:9] + b"xy" + data[11:], "the first at 9"),
        (lambda data: data[:-1] + b"x", f"the first at {(16 << 20) + 6}"),
    ],
)
def test_files_are_compared_to_the_last_byte(
    tmp_path: Path, change: Callable[[bytes], bytes], fault: str | None
) -> None:
    data = bytes((16 << 20) + 7)
    (tmp_path / "wanted").write_bytes(data + b"more")
    (tmp_path / "found").write_bytes(change(data))
    told = find_file_difference(tmp_path / "found", tmp_path / "wanted", len(data))
    assert told is None if fault is None else told is not None and fault in told


def test_memory_watch_sees_anonymous_memory_and_no_file(tmp_path: Path) -> None:
    with MemoryWatch() as watch:
        kept = np.ones(64 << 20, np.uint8)
    assert watch.growth_nbytes > 48 << 20
    del kept
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    mapped = np.memmap(tmp_path / "file", np.uint8, mode="r")
    with MemoryWatch() as watch:
        assert not mapped.any()
    assert watch.growth_nbytes < 32 << 20


def test_host_memory_of_a_save_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    save_file({"a": np.ones(1 << 20, np.uint8)}, tmp_path / "model" / "m.safetensors")
    order = SaveOrder(
        "cpu", "safetensors save_file", str(tmp_path / "model"), str(tmp_path / "out")
    )
    found = measure_host_memory(order)
    assert found.error is None
    assert (found.name, found.nbytes) == (order.name, 1 << 20)
    assert found.growth_nbytes is not None
    assert not (tmp_path / "out").exists()


def test_host_memory_of_an_unknown_contestant_is_an_error(tmp_path: Path) -> None:
    found = measure_host_memory(SaveOrder("cpu", "nobody", str(tmp_path), str(tmp_path / "out")))
    assert found.growth_nbytes is None
    assert "nobody" in str(found.error)
    with pytest.raises(ValueError, match="nobody"):
        save_and_watch('{"device": "cpu", "name": "nobody", "source": "", "path": ""}')


class QueueLane:
    """A stream that does nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.handle = self.queue
        self.delays = 0

    def delay(self) -> None:
        self.delays += 1

    def run(self, do: Callable[[], object]) -> None:
        self.queue.append(do)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Reader(StreamReader):
    """Reads in its turn, at once, or when it is too late."""

    def begin(self, target: Any, source: Path, stream: Any) -> Callable[[float], object]:
        def read() -> None:
            target[:] = np.fromfile(source, np.uint8)

        if self.name == "hasty":
            read()
        elif self.name == "ordered":
            stream.append(read)
        return lambda timeout_s: stream.append(read) if self.name == "future" else None


@pytest.mark.parametrize(
    ("name", "state", "right"),
    [
        ("ordered", "idle", True),
        ("ordered", "delayed", True),
        ("future", "delayed", True),
        ("hasty", "idle", True),
        ("hasty", "delayed", False),
        ("never", "idle", False),
    ],
)
def test_read_out_of_stream_order_is_caught(
    tmp_path: Path, name: str, state: str, right: bool
) -> None:
    data = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    data.tofile(tmp_path / "raw")
    lane = QueueLane()
    contest = StreamContest(
        state=state, source=tmp_path / "raw", memory=NumpyMemory(), lane=lane,
        reference={"": data}, target=np.empty(5000, np.uint8), seen=np.empty(5000, np.uint8),
        repeats=3, budget_s=60.0,
    )  # fmt: skip
    (row,) = run_streams(contest, [Reader(name, ())], FOREVER, lambda text: None)
    assert row.compared is right
    assert (row.error is None) is right
    assert (row.kind, row.place, row.nbytes) == ("stream", state, 5000)
    assert bool(lane.delays) is (state == "delayed")
    if right:
        assert len(row.readings) == 3
        assert row.free_s is not None


def test_headrace_reads_in_stream_order_into_and_by_a_future(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[str, Any]] = []

    def read_into(buffer: Any, path: Path, *, stream: Any = None, context: Any = None) -> None:
        calls.append((stream, context.options.mapped_nbytes))

    def submit_read(self: Any, buffer: Any, path: Path, *, route: str, stream: Any) -> Any:
        calls.append((stream, route))
        return Namespaces(monkeypatch)

    monkeypatch.setattr("headrace.read_into", read_into)
    monkeypatch.setattr("headrace.Context.submit_read", submit_read, raising=False)
    for reader in stream_readers(NumpyMemory(), 100):
        assert reader.why_absent() is None
        with reader.session(tmp_path):
            reader.begin(np.zeros(1), tmp_path, "a stream")(1.0)
        reader.close()
    assert calls == [("a stream", 200), ("a stream", "cached")]

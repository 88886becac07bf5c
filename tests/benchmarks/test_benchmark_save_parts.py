"""The parts of the benchmark of writing: peers, comparison, memory, stream order, targets."""

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
from benchmarks.result import Role, Target
from benchmarks.rounds import Clock
from benchmarks.save.comparison import find_file_difference
from benchmarks.save.host_memory import SaveOrder, measure_host_memory
from benchmarks.save.result import HostMemory, SaveRow, Timing
from benchmarks.save.streams import StreamContest, StreamReader, run_streams, stream_readers
from benchmarks.save.targets import SaveFindings, save_targets
from benchmarks.save.watch import MemoryWatch
from benchmarks.save.writers import (
    HeadraceAsyncSaver,
    KvikioWriter,
    Writer,
    model_writers,
    raw_writers,
)

FOREVER = Clock(float("inf"))
NBYTES = 10**9


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
    assert given[4:] == [{"route": "host"}, {"route": "direct"}]


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


def make_row(
    name: str, gb_per_s: float, synced: float | None = None, role: Role = Role.PEER, **given: Any
) -> SaveRow:
    until_fsync = None if synced is None else 1 / synced
    timing = Timing(1, 1 / gb_per_s, 0.2, 0, None, given.pop("free", 1.0), until_fsync)
    values: dict[str, Any] = {
        "kind": "raw", "place": "tmpfs", "package": "", "family": None, "nbytes": NBYTES,
        "first": None, "readings": (timing,), "compared": True, "absent": None, "error": None,
        "note": None, "reports": (),
    }  # fmt: skip
    return SaveRow(name=name, role=role, **{**values, **given})


def targets_of(*rows: SaveRow, host_memory: tuple[HostMemory, ...] = ()) -> list[Target]:
    return save_targets(SaveFindings(rows, host_memory))


def pick(targets: list[Target], name: str) -> Target:
    (target,) = (target for target in targets if target.name == name)
    return target


@pytest.mark.parametrize(("gb_per_s", "met"), [(3.0, True), (2.9, False)])
def test_tmpfs_is_compared_with_kvikio_of_as_many_threads(gb_per_s: float, met: bool) -> None:
    ours = make_row("headrace write_from, workers=8", gb_per_s, role=Role.OURS_EXTRA)
    more = make_row("headrace write_from, workers=16", 99.0, role=Role.OURS_EXTRA)
    peers = [make_row("KvikIO, 8 threads", 2.0), make_row("KvikIO, 16 threads", 9.0)]
    target = pick(targets_of(more, ours, *peers), "GPU to tmpfs, threads: 8")
    assert target.measured == pytest.approx(gb_per_s)
    assert target.wanted == pytest.approx(3.0)
    assert target.met is met


def test_one_worker_is_not_taken_for_sixteen() -> None:
    ours = make_row("headrace write_from, workers=16", 9.0, role=Role.OURS_EXTRA)
    peers = [make_row("KvikIO, 16 threads", 2.0), make_row("KvikIO, 1 thread (its default)", 1.0)]
    target = pick(targets_of(ours, *peers), "GPU to tmpfs, threads: 1")
    assert target.wanted == pytest.approx(1.5)
    assert (target.measured, target.met) == (None, None)
    assert "not measured" in target.evidence


def test_disk_is_compared_until_fsync_and_until_the_call_returned() -> None:
    rows = (
        make_row("headrace write_from", 2.0, 1.5, Role.OURS, place="disk"),
        make_row("KvikIO, 8 threads", 3.0, 1.0, place="disk"),
        make_row("KvikIO, 16 threads", 1.0, 1.4, place="disk"),
        make_row("numpy", 9.0, 9.0, place="disk"),
    )
    targets = targets_of(*rows)
    synced = pick(targets, "GPU to disk, until fsync returned")
    assert synced.wanted == pytest.approx(1.4)
    assert synced.met is True
    assert pick(targets, "GPU to disk, until the call returned").met is False


def test_wrong_bytes_leave_a_target_untold() -> None:
    ours = make_row("own", 9.0, None, Role.OURS, kind="model", compared=False, error="wrong bytes")
    peer = make_row("safetensors save_file", 1.0, kind="model")
    target = pick(targets_of(ours, peer), "model to tmpfs, one file")
    assert target.wanted == pytest.approx(3.0)
    assert target.met is None
    assert "wrong bytes" in target.evidence


@pytest.mark.parametrize(("growth", "met"), [(512 << 20, True), ((512 << 20) + 1, False)])
def test_host_memory_has_a_bound(growth: int, met: bool) -> None:
    found = (
        HostMemory("headrace.torch.save_file", NBYTES, growth, 1.0, None, ()),
        HostMemory("safetensors save_file", NBYTES, NBYTES, 1.0, None, ()),
    )
    target = pick(targets_of(host_memory=found), "peak host memory of saving the model")
    assert target.met is met
    assert "safetensors save_file 1 GB" in target.evidence


@pytest.mark.parametrize(
    ("kind", "place", "name", "bound"),
    [
        ("async", "tmpfs", "headrace.torch.save_file_async", 0.05),
        ("stream", "idle", "headrace read_into(stream=), registration kept", 0.001),
        ("stream", "delayed", "headrace submit_read(stream=), route", 0.001),
    ],
)
def test_caller_is_free_within_a_bound(kind: str, place: str, name: str, bound: float) -> None:
    for factor, met in ((1.0, True), (1.1, False)):
        row = make_row(name, 1.0, None, Role.OURS, kind=kind, place=place, free=bound * factor)
        told = [target for target in targets_of(row) if target.met is not None]
        assert [(target.measured, target.met) for target in told] == [(bound * factor, met)]


def test_nothing_measured_gives_no_verdict() -> None:
    targets = targets_of()
    assert len(targets) == 3 + 4 + 1 + 1 + 1 + 4
    assert all(target.met is None for target in targets)

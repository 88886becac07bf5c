from __future__ import annotations

import ctypes
import enum
import os
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bindings.cufile import CuFileLibrary
from headrace.bindings.cufile_errors import CuFileError, logged_reason
from headrace.bindings.cufile_values import (
    BatchEvent,
    BatchRequest,
    Counters,
    StreamCount,
    parse_nvidia_fs,
)
from headrace.errors import DeviceError
from tests.support import RecordedSystem

_OP = np.dtype([("ok", "<u8"), ("err", "<u8")])
_GPU = np.dtype(
    [(f"n_{way}_{kind}", "<u8") for way in ("p2p", "nvfs", "posix", "unaligned")
     for kind in ("reads", "writes")]
)  # fmt: skip
_LEVEL3 = np.dtype(
    [
        ("detailed", [("basic", [("read_bytes", "<u8"), ("write_bytes", "<u8")])]),
        ("num_gpus", "<u4"),
        ("per_gpu_stats", _GPU, (16,)),
    ]
)
_PLACE = [
    ("dev_ptr_base", "<i8"),
    ("file_offset", "<i8"),
    ("dev_ptr_offset", "<i8"),
    ("size_", "<u8"),
]
_LOG = """\
 29-11-2026 15:17:47:804 [pid=1 tid=1] NOTICE  cufio-drv:1257 running in compatible mode
 29-11-2026 15:17:47:926 [pid=1 tid=1] ERROR  cufio-udev:67 udev property not found: ID_FS_USAGE vda
 29-11-2026 15:17:47:926 [pid=1 tid=1] ERROR  cufio-obj:254 unable to get volume attributes for fd 4
"""


class Refusal(Exception):  # noqa: N818 (stands for cuFileError)
    def __init__(self, status: int, text: str = "TEXT; CUDA status: CUDA_SUCCESS (0)") -> None:
        super().__init__(text)
        self.status = status


class Status(enum.IntEnum):
    COMPLETE = 16
    FAILED = 64


class Handle:
    fd = 0
    handle = 0xDEAD


class Descr:
    """Memory as malloc gives it."""

    def __init__(self) -> None:
        self.type, self.fs_ops, self.handle = 99, 0xBAD, Handle()
        self.ptr = self


class Recorder:
    """Stands for ``cuda.bindings.cufile``: answers as told, and notes every call."""

    cuFileError = Refusal  # noqa: N815
    Status = Status
    Descr = Descr
    FileHandleType = types.SimpleNamespace(OPAQUE_FD=1)
    BatchMode = types.SimpleNamespace(BATCH=1)
    stats_level3_dtype = _LEVEL3
    io_events_dtype = np.dtype([("cookie", "<i8"), ("status", "<i4"), ("ret", "<u8")], align=True)
    io_params_dtype = np.dtype(
        [("mode", "<i4"), ("u", [("batch", _PLACE)]), ("fh", "<i8"), ("opcode", "<i4"),
         ("cookie", "<i8")], align=True
    )  # fmt: skip

    def __init__(self, missing: tuple[str, ...] = (), **answers: Any) -> None:
        self.answers, self.missing = answers, missing
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.missing or name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            answer = self.answers.get(name, 7)
            if callable(answer):
                answer = answer(*arguments)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


def records_at(address: int, dtype: np.dtype[Any], count: int = 1) -> np.ndarray[Any, Any]:
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


Make = Callable[..., tuple[CuFileLibrary, Recorder]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def build(*arguments: Any, **answers: Any) -> tuple[CuFileLibrary, Recorder]:
        recorder = Recorder(*arguments, **answers)
        bindings = types.ModuleType("cuda.bindings")
        bindings.cufile = recorder  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        return CuFileLibrary(RecordedSystem()), recorder

    return build


def test_without_the_bindings_the_class_is_an_import_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError):
        CuFileLibrary()


@pytest.mark.parametrize(
    ("code", "name", "remedy"),
    [
        (5001, "DRIVER_NOT_INITIALIZED", "modprobe nvidia-fs"),
        (5008, "IO_NOT_SUPPORTED", "route direct"),
        (5013, "CUDA_MEMORY_TYPE_INVALID", "memory of the GPU"),
        (5016, "INVALID_MAPPING_SIZE", "max_device_pinned_mem_size_kb"),
        (5020, "DIO_NOT_SET", "O_DIRECT"),
        (5023, "MEMORY_ALREADY_REGISTERED", "deregister"),
        (5027, "HANDLE_NOT_REGISTERED", "/run/udev"),
        (5033, "NVFS_SETUP_ERROR", "/dev/nvidia-fs"),
        (5036, "GPU_MEMORY_PINNING_FAILED", "BAR1"),
    ],
)
def test_code_becomes_an_error_with_call_name_number_and_remedy(
    code: int, name: str, remedy: str
) -> None:
    text = str(CuFileError("cuFileRead", code))
    assert text.startswith(f"cuFileRead failed: {name} ({code})")
    assert remedy in text


def test_error_of_the_binding_becomes_ours_with_its_code(make: Make) -> None:
    cufile, _ = make(buf_register=Refusal(5016))
    with pytest.raises(CuFileError, match=r"^cuFileBufRegister failed: TEXT \(") as caught:
        cufile.register_buffer(4096, 8192)
    assert caught.value.code == 5016
    assert isinstance(caught.value, DeviceError)


def test_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(CuFileError("cuFileRead", 5011, "TEXT")))
    assert (str(error), error.code) == ("cuFileRead failed: TEXT", 5011)


def test_number_of_the_operating_system_becomes_an_oserror(make: Make) -> None:
    cufile, _ = make(read=ValueError("5 is not a valid OpError"))
    with pytest.raises(OSError, match="cuFileRead: Input/output error") as caught:
        cufile.read(1, 2, 3, 4)
    assert caught.value.errno == 5
    assert not isinstance(caught.value, DeviceError)


def test_code_that_the_binding_does_not_know_is_still_told(make: Make) -> None:
    cufile, _ = make(driver_close=ValueError("5099 is not a valid OpError"))
    with pytest.raises(CuFileError, match=r"unknown code \(5099\)"):
        cufile.close_driver()


def test_library_that_is_not_there_is_a_device_error_with_a_remedy(make: Make) -> None:
    cufile, _ = make(get_version=RuntimeError("no libcufile.so"))
    with pytest.raises(DeviceError, match="install nvidia-cufile"):
        cufile.version()


@pytest.mark.parametrize("count", [0, 3, 4096])
def test_count_is_returned_as_it_is(make: Make, count: int) -> None:
    cufile, recorder = make(read=count, write=count)
    assert (cufile.read(1, 2, 4096, 4, 5), cufile.write(1, 2, 4096, 4)) == (count, count)
    assert recorder.calls == [("read", 1, 2, 4096, 4, 5), ("write", 1, 2, 4096, 4, 0)]


def test_negative_count_is_a_code(make: Make) -> None:
    cufile, _ = make(read=-5011)
    with pytest.raises(CuFileError, match="5011"):
        cufile.read(1, 2, 3, 4)


def test_every_field_of_a_descriptor_is_set(make: Make) -> None:
    cufile, recorder = make()
    assert cufile.register_handle(5) == 7
    record = recorder.calls[0][1]
    assert (record.fs_ops, record.type) == (0, 1)
    assert (record.handle.fd, record.handle.handle) == (5, 0)


def test_log_gives_the_reason_for_a_refused_handle(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "cufile.log"
    log.write_text("x ERROR  cufio:1 of an earlier call\n")

    def refuse(_: object) -> Exception:
        with open(log, "a") as file:
            file.write(_LOG)
        return Refusal(5027)

    cufile, _ = make(handle_register=refuse)
    cufile.open_driver(str(log))
    with pytest.raises(
        CuFileError, match="log: udev property not found: ID_FS_USAGE vda"
    ) as caught:
        cufile.register_handle(5)
    assert "/run/udev" in str(caught.value)


def test_log_without_errors_gives_no_reason() -> None:
    assert logged_reason(_LOG) == "udev property not found: ID_FS_USAGE vda"
    assert logged_reason(_LOG.splitlines()[0]) is None


@pytest.mark.parametrize("before", [None, "/elsewhere.log"])
def test_statistics_come_first_and_the_log_path_is_told_while_the_driver_opens(
    make: Make, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    seen: list[str | None] = []
    name = "CUFILE_LOGFILE_PATH"
    cufile, recorder = make(driver_open=lambda: seen.append(os.environ.get(name)))
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    cufile.open_driver("/nowhere/cufile.log")
    assert seen == ["/nowhere/cufile.log"]
    assert os.environ.get(name) == before
    assert recorder.names == ["set_stats_level", "driver_open", "stats_start"]
    assert recorder.calls[0] == ("set_stats_level", 3)


def test_driver_that_somebody_else_opened_is_used_and_left_open(make: Make) -> None:
    cufile, recorder = make(driver_open=Refusal(5026))
    cufile.open_driver("/nowhere/cufile.log")
    cufile.close_driver()
    assert "driver_close" not in recorder.names


def test_counters_add_up_the_gpus_and_their_difference_is_what_happened_between(
    make: Make,
) -> None:
    def fill(address: int) -> None:
        (record,) = records_at(address, _LEVEL3)
        record["num_gpus"] = 2
        gpus = record["per_gpu_stats"]
        gpus["n_posix_reads"][:3] = (step[0], 10, 500)
        gpus["n_unaligned_reads"][1] = 3
        record["detailed"]["basic"]["read_bytes"] = 4096 * step[0]

    step = [1]
    cufile, _ = make(get_stats_l3=fill)
    cufile.open_driver("/nowhere/cufile.log")
    before = cufile.read_counters()
    step[0] = 5
    after = cufile.read_counters()
    assert before is not None
    assert after is not None
    assert (before.posix_reads, before.unaligned_reads, before.p2p_reads) == (11, 3, 0)
    done = after - before
    assert (done.posix_reads, done.unaligned_reads, done.read_nbytes) == (4, 0, 4 * 4096)
    assert done.compatibility("reads") is True
    assert done.describe("reads").endswith(": 0 p2p, 0 nvfs, 4 posix, 0 unaligned reads")


@pytest.mark.parametrize("missing", ["set_stats_level", "stats_start"])
def test_without_the_statistics_api_nvidia_fs_is_asked(make: Make, missing: str) -> None:
    cufile, recorder = make((missing,))
    cufile.open_driver("/nowhere/cufile.log")
    assert cufile.read_counters() is None
    assert "get_stats_l3" not in recorder.names


def test_nvidia_fs_tells_its_own_reads_and_nothing_of_the_others() -> None:
    text = (
        "Reads\t\t\t\t: n=12 ok=12 err=0 readMiB=48 io_state_err=0\n"
        "Reads\t\t: Bandwidth(MiB/s)=0\n"
        "Sparse Reads\t\t\t: n=99 io=0 holes=0 pages=0\n"
        "Writes\t\t\t\t: n=3 ok=3 err=0 writeMiB=1 io_state_err=0\n"
    )
    counters = parse_nvidia_fs(text)
    assert counters is not None
    assert (counters.nvfs_reads, counters.nvfs_writes, counters.posix_reads) == (12, 3, None)
    assert counters.compatibility("reads") is None
    assert counters.describe("reads") == "nvidia-fs statistics of all processes: 12 nvfs reads"


def test_nvidia_fs_that_counts_nothing_is_none() -> None:
    assert [parse_nvidia_fs(text) for text in (None, "", "IO stats: Off\n")] == [None] * 3


def test_reads_by_two_ways_are_not_compatibility_mode() -> None:
    found = [Counters("x", p2p, nvfs, posix) for p2p, nvfs, posix in ((1, 0, 5), (0, 0, 0))]
    assert [each.compatibility("reads") for each in found] == [False, False]


def test_batch_says_where_each_request_goes(make: Make) -> None:
    records: list[np.ndarray[Any, Any]] = []

    def keep(batch: int, count: int, address: int, flags: int) -> None:
        records.append(records_at(address, Recorder.io_params_dtype, count).copy())

    def events(batch: int, minimum: int, count: int, address: int, timeout: int) -> None:
        ctypes.c_uint32.from_address(count).value = 2
        found = records_at(address, Recorder.io_events_dtype, 2)
        found["cookie"], found["status"] = (11, 12), (Status.COMPLETE, Status.FAILED)
        found["ret"] = (30, (1 << 64) - 5008)

    cufile, _ = make(batch_io_submit=keep, batch_io_get_status=events)
    batch = cufile.create_batch(2)
    requests = [
        BatchRequest(1, 0x1000, 30, 40, 50, cookie=11),
        BatchRequest(1, 2, 3, 4, write=True),
    ]
    cufile.submit_batch(batch, requests)
    first, second = records[0]
    assert first["u"]["batch"].tolist() == (0x1000, 40, 50, 30)
    assert (first["mode"], first["fh"], first["opcode"], first["cookie"]) == (1, 1, 0, 11)
    assert second["opcode"] == 1
    done = cufile.batch_events(batch, 2, 1.5)
    assert [event.cookie for event in done] == [11, 12]
    assert done[0].result() == 30
    with pytest.raises(CuFileError, match="5008"):
        done[1].result()
    cufile.destroy_batch(batch)


def test_request_that_failed_without_a_code_is_an_error_too() -> None:
    with pytest.raises(DeviceError):
        BatchEvent(1, False, 0).result()


def test_count_in_stream_order_is_known_once_the_stream_got_there(make: Make) -> None:
    def read(handle: int, pointer: int, *places: int) -> None:
        numbers = [ctypes.c_int64.from_address(place).value for place in places[:3]]
        assert numbers == [4096, 512, 0]
        assert places[4] == 77
        later.append(places[3])

    later: list[int] = []
    cufile, _ = make(read_async=read)
    counts = [cufile.read_async(1, 2, 4096, 512, 77) for _ in range(2)]
    with pytest.raises(DeviceError, match="synchronize its stream"):
        counts[0].result()
    ctypes.c_int64.from_address(later[0]).value = 4000
    ctypes.c_int64.from_address(later[1]).value = -5011
    assert counts[0].result() == 4000
    with pytest.raises(CuFileError, match="cuFileReadAsync failed"):
        counts[1].result()


def test_numbers_of_a_read_under_way_outlive_the_callers_interest(make: Make) -> None:
    addresses: list[int] = []
    cufile, _ = make(write_async=lambda *arguments: addresses.append(arguments[5]))
    cufile.write_async(1, 2, 4096, 512, 77)
    junk = [StreamCount("x", 1, 1) for _ in range(100)]
    assert all(addresses[0] not in each.addresses for each in junk)


def test_rest_of_the_calls_reach_the_binding(make: Make) -> None:
    cufile, recorder = make(get_version=1200)
    assert cufile.version() == 1200
    cufile.register_stream(5)
    cufile.deregister_stream(5)
    cufile.deregister_buffer(4096)
    cufile.deregister_handle(9)
    assert recorder.calls[1:3] == [("stream_register", 5, 0), ("stream_deregister", 5)]
    assert recorder.calls[3:] == [("buf_deregister", 4096), ("handle_deregister", 9)]

"""What an attacker found, each as a test of its whole kind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

import headrace as hr
import headrace.numpy as hn
from headrace.bindings.posix import PosixFiles
from headrace.bindings.pymemory import map_pages
from headrace.engines import base
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.faulty_files import pages_where
from tests.support import disk_folder, run_python

MIB = 1 << 20


class Slow(PosixFiles):
    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        time.sleep(0.01)
        return super().preadv(fd, views, file_offset)


class AlarmError(Exception):
    pass


@pytest.mark.parametrize("route", ["host", "direct"])
def test_any_number_of_signals_that_raise_leaves_nobody_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    path = disk_folder(tmp_path) / "file"
    path.write_bytes(b"\x01" * 8 * MIB)
    real, waits = base._Crew.wait, 0

    def interrupted(crew: Any, count: int, on_progress: Any) -> None:
        nonlocal waits
        waits += 1
        if waits < 5:  # the later ones hit while the first one is being dealt with
            raise AlarmError
        real(crew, count, on_progress)

    monkeypatch.setattr(base._Crew, "wait", interrupted)
    options = hr.Options(workers=4, block_nbytes=64 << 10, pinned_nbytes=MIB)
    with hr.Context(options, files=Slow()) as context:
        for _ in range(3):
            waits = 0
            buffer = np.zeros(8 * MIB, np.uint8)
            with pytest.raises(AlarmError):
                hr.read_into(buffer, path, route=route, context=context)
            buffer[:] = 0
            time.sleep(0.05)
            assert not buffer.any()


def test_header_and_payload_come_from_one_file_however_it_is_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"a": np.full(8, 1, np.uint8), "b": np.full(8, 2, np.uint8)}, path)
    text = path.read_bytes()
    other.write_bytes(text.replace(b'"a"', b'"t"').replace(b'"b"', b'"a"').replace(b'"t"', b'"b"'))
    real = safetensors.safe_open

    def swap() -> None:
        third = tmp_path / "c"
        path.rename(third)
        other.rename(path)
        third.rename(other)

    def swapped(*arguments: Any, **options: Any) -> object:
        swap()
        try:
            return real(*arguments, **options)
        finally:
            swap()

    monkeypatch.setattr(safetensors, "safe_open", swapped)
    try:
        found = hn.load(path)
    except hr.SourceChanged:
        return
    assert (set(found["a"]), set(found["b"])) == ({1}, {2})


def test_library_never_maps_the_file_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": np.zeros(8)}, path)
    opened, real = [], safetensors.safe_open

    def spy(name: str, **options: Any) -> object:
        opened.append(os.path.realpath(name))
        return real(name, **options)

    monkeypatch.setattr(safetensors, "safe_open", spy)
    hn.load(path)
    assert opened
    assert str(path) not in opened


@pytest.mark.parametrize("block", [4096, 8192])
@pytest.mark.parametrize("gap", [1, 4096, 9000, 20_000, 40_000, 65_536, 100_000])
@pytest.mark.parametrize("route", ["auto", "host", "direct"])
def test_gap_between_wanted_tensors_costs_no_route_its_bytes(
    tmp_path: Path, route: str, gap: int, block: int
) -> None:
    path = disk_folder(tmp_path) / "a.safetensors"
    tensors = {
        "a": np.full(5000, 1, np.uint8),
        "b": np.zeros(gap, np.uint8),
        "c": np.full(5000, 3, np.uint8),
    }
    save_file(tensors, path)
    with hr.Context(hr.Options(block_nbytes=block)) as context:
        found = hn.load(path, names=["a", "c"], route=route, context=context)
    assert (set(found["a"]), set(found["c"])) == ({1}, {3})


def test_forked_child_may_close_a_context_that_its_parent_was_using(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * MIB))
    code = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore")
import headrace as hr
from headrace.bindings.posix import PosixFiles
from headrace.bindings.pymemory import map_pages
class Slow(PosixFiles):
    def preadv(self, fd, views, offset):
        time.sleep(0.3)
        return super().preadv(fd, views, offset)
context = hr.Context(hr.Options(workers=1), files=Slow())
buffer = bytearray(4 << 20)
thread = threading.Thread(
    target=hr.read_into, args=(buffer, sys.argv[1]), kwargs={"context": context}
)
thread.start()
time.sleep(0.1)
child = os.fork()
if not child:
    context.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""
    assert run_python(code, str(path), timeout_s=20).strip() == "7"


def test_rewrite_that_puts_the_mtime_back_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    os.utime(path, ns=(1, 1))

    class Sneaky(PosixFiles):
        def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
            path.write_bytes(b"\x01" * MIB)
            os.utime(path, ns=(1, 1))
            return super().preadv(fd, views, file_offset)

    with hr.Context(files=Sneaky()) as context, pytest.raises(hr.SourceChanged):
        hr.read_into(bytearray(MIB), path, context=context)


@pytest.mark.parametrize("code", ["S0", "U0", "V0"])
def test_items_of_no_bytes_stay_so(tmp_path: Path, code: str) -> None:
    path = tmp_path / "empty.npy"
    with path.open("wb") as file:
        descr = {"S0": "|S0", "U0": "<U0", "V0": "|V0"}[code]
        header = {"descr": descr, "fortran_order": False, "shape": (20,)}
        np.lib.format.write_array_header_1_0(file, header)
    found = hn.read(path)
    assert (found.dtype, found.shape, found.nbytes) == (np.dtype(code), (20,), 0)


def test_reading_once_leaves_what_others_had_resident(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    path.write_bytes(bytes(8 * MIB))
    files = FaultyFiles(resident=pages_where(lambda page: page % 8 < 6))
    with hr.Context(hr.Options(reuse="once"), files=files) as context:
        hr.read_into(bytearray(8 * MIB), path, route="host", context=context)
    assert files.forgotten_nbytes == 0


def test_system_that_gives_no_more_threads_is_served_by_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    content = os.urandom(MIB)
    path.write_bytes(content)
    started: list[threading.Thread] = []
    start, limit = threading.Thread.start, 0

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "headrace":
            if len(started) == limit:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for limit in range(3):  # noqa: B007 (`refuse` looks at it)
        started.clear()
        with hr.Context(hr.Options(workers=8, block_nbytes=4096)) as context:
            buffer = bytearray(MIB)
            hr.read_into(buffer, path, context=context)
        assert buffer == content


def test_small_direct_read_does_not_claim_a_large_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = disk_folder(tmp_path) / "file"
    path.write_bytes(bytes(MIB))
    claimed: list[int] = []
    real = map_pages

    def count(nbytes: int) -> memoryview:
        claimed.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr("headrace.engines.direct.map_pages", count)
    options = hr.Options(block_nbytes=1 << 30, pinned_nbytes=1 << 30)
    with hr.Context(options) as context:
        hr.read_into(bytearray(10), path, file_offset=5, route="direct", context=context)
    assert sum(claimed) <= 64 << 10


def test_array_of_too_many_axes_is_a_format_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[' + b",".join([b"1"] * 65) + b'],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(hr.FormatError, match="65 axes"):
        hn.load(path)


def test_type_may_be_named_as_ml_dtypes_names_it(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(8))
    code = "import sys, headrace.numpy as hn; print(hn.read(sys.argv[1], dtype='bfloat16').dtype)"
    assert run_python(code, str(path)).strip() == "bfloat16"


def test_kept_registration_of_a_rewritten_file_is_dropped_though_its_mtime_is_put_back(
    tmp_path: Path,
) -> None:
    path, cuda = tmp_path / "file", FakeCuda()
    path.write_bytes(bytes(MIB))
    os.utime(path, ns=(1, 1))
    array = FakeDeviceArray(cuda, MIB)
    with hr.Context(hr.Options(mapped_nbytes=64 * MIB), cuda=cuda) as context:
        hr.read_into(array, path, route="mapped", context=context)
        path.write_bytes(b"\x01" * MIB)
        os.utime(path, ns=(1, 1))
        report = hr.read_into(array, path, route="mapped", context=context)
    assert "registered" in report.observed[0].evidence


def test_kept_windows_stay_within_the_budget_by_the_page_and_in_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.memory.mappings.MOST_WINDOWS", 5)
    cuda = FakeCuda()
    array = FakeDeviceArray(cuda, 100)
    for budget, most in ((10 * 4096 + 5, 5), (3 * 4096, 3)):
        with hr.Context(hr.Options(mapped_nbytes=budget), cuda=cuda) as context:
            for number in range(20):
                path = tmp_path / f"{budget}-{number}"
                path.write_bytes(bytes(100))
                report = hr.read_into(array, path, route="mapped", context=context)
                assert report.mapped_nbytes == cuda.mapped_nbytes <= most * 4096


def test_load_that_fails_keeps_nothing_of_the_file(tmp_path: Path) -> None:
    path, cuda = tmp_path / "file", FakeCuda()
    path.write_bytes(bytes(MIB))
    options = hr.Options(mapped_nbytes=64 * MIB)
    with hr.Context(options, cuda=cuda, files=FaultyFiles(rewrite_after=1)) as context:
        with pytest.raises(hr.SourceChanged):
            hr.read_into(FakeDeviceArray(cuda, MIB), path, route="mapped", context=context)
        assert cuda.mapped_nbytes == 0


def test_registration_that_fails_in_the_middle_leaves_the_load_to_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engines.mapped.WINDOW_NBYTES", 64 << 10)

    class Crowded(FakeCuda):
        asked = 0

        def register_host(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
            self.asked += read_only
            if read_only and self.asked > 3:
                raise hr.DeviceError("cudaHostRegister failed: no more")
            super().register_host(pointer, nbytes, read_only=read_only)

    path, cuda = tmp_path / "file", Crowded()
    path.write_bytes(os.urandom(MIB))
    array = FakeDeviceArray(cuda, MIB)
    with hr.Context(hr.Options(policy="cpu"), cuda=cuda) as context:
        report = hr.read_into(array, path, context=context)
    assert array.tobytes() == path.read_bytes()
    assert [str(each.route) for each in report.observed] == ["cached"]
    assert any("no more" in each.why for each in report.rejected)
    assert cuda.mapped_nbytes == 0


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_doctor_neither_waits_for_a_pipe_nor_reads_a_device_to_its_end(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "cufile.json"
    os.mkfifo(path)
    place = str(path) if kind == "pipe" else "/dev/zero"
    with hr.Context(cufile_environment={"CUFILE_ENV_PATH_JSON": place}) as context:
        assert hr.doctor(context=context).routes

"""What several test modules share: the page cache, recorded machines, and facts made up."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bindings.posix import DirectAlignment, Files, PosixFiles
from headrace.errors import RouteUnavailable
from headrace.planning.route import Facts
from headrace.probing.fact import Fact
from headrace.probing.machine import MachineFacts
from headrace.probing.volume import VolumeFacts
from headrace.storage.sink import Sink
from headrace.storage.source import Source
from headrace.testing import FaultyFiles
from headrace.types import Device

INDEX = "model.safetensors.index.json"
PAGE = mmap.PAGESIZE
CUDA = Device("cuda", 0)
TIMEOUT_S = 30.0


@dataclass(slots=True)
class RecordedSystem:
    """`headrace.bindings.sysfs.System` from recorded text."""

    texts: Mapping[str, str] = field(default_factory=dict)
    cpu_count: int = 4
    load: float = 0.0
    links: Mapping[str, str] = field(default_factory=dict)

    def read(self, path: str) -> str | None:
        return self.texts.get(path)

    def listdir(self, path: str) -> tuple[str, ...]:
        below = [known.removeprefix(path + "/") for known in (*self.texts, *self.links)]
        return tuple(sorted({rest.split("/")[0] for rest in below if not rest.startswith("/")}))

    def exists(self, path: str) -> bool:
        return path in self.texts or path in self.links or bool(self.listdir(path))

    def read_link(self, path: str) -> str | None:
        return self.links.get(path)

    def cpus(self) -> int:
        return self.cpu_count

    def load_average(self) -> float:
        return self.load


def on_host(pointer: int) -> int | None:
    """Say of every pointer that it is host memory."""
    return None


def never_asked(pointer: int) -> int | None:
    raise AssertionError(f"nobody needs to ask where {pointer:#x} is")


def write_random(path: Path, nbytes: int) -> bytes:
    """Write a file of bytes that no two blocks share, and give them back."""
    content = random.Random(nbytes).randbytes(nbytes)
    path.write_bytes(content)
    return content


def folder_with_fallocate(tmp_path: Path) -> Path:
    """Give `tmp_path`, once it is sure that space can be reserved there."""
    with (tmp_path / "probe").open("wb") as file:
        try:
            PosixFiles().allocate(file.fileno(), 0, PAGE)
        except OSError as error:
            pytest.skip(f"{tmp_path} has no fallocate: {error}")
    return tmp_path


class HeldFiles(FaultyFiles):
    """Files of which none is made before they are let go."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(**faults)
        self.reached = threading.Semaphore(0)
        self.let_go = threading.Event()

    def create(self, path: str, mode: int) -> int:
        self.reached.release()
        assert self.let_go.wait(TIMEOUT_S)
        return super().create(path, mode)

    def wait_for(self, saves: int) -> None:
        """Wait until so many saves are held here."""
        for _ in range(saves):
            assert self.reached.acquire(timeout=TIMEOUT_S)


def drop(path: Path) -> None:
    """Drop a file from the page cache; parts of it would not go where its folios are large.

    A page that a CPU is still putting on the kernel's lists stays at first: it is asked again.
    """
    size, files = os.stat(path).st_size, PosixFiles()
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        for _ in range(5):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not size or not files.mapped_pages(file.fileno(), 0, size):
                return
            time.sleep(0.005)


def warm(path: Path, start: int, nbytes: int) -> None:
    """Read part of a file through the page cache, without reading ahead."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert len(os.pread(file.fileno(), nbytes, start)) == nbytes


def disk_folder(tmp_path: Path) -> Path:
    """Give `tmp_path`, once it is sure that pages can be dropped there and cachestat sees it."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(4 * PAGE))
    with open_source(path) as source:
        try:
            before = source.files.cached_pages(source.fd, 0, 4 * PAGE)
            drop(path)
            after = source.files.cached_pages(source.fd, 0, 4 * PAGE)
        except OSError as error:
            pytest.skip(f"cachestat: {error}")
    if (before, after) != (4, 0):
        pytest.skip(f"pages of {tmp_path} do not leave the page cache ({before}, then {after})")
    return tmp_path


def folder_with_direct(tmp_path: Path) -> Path:
    """Give `tmp_path`, once it is sure that files open with O_DIRECT there."""
    path = tmp_path / "probe"
    path.write_bytes(b"x")
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{tmp_path} has no O_DIRECT: {error}")
    return tmp_path


@contextlib.contextmanager
def open_source(path: Path | str, files: Files | None = None) -> Iterator[Source]:
    source = Source(str(path), files or PosixFiles())
    try:
        yield source
    finally:
        source.close()


@contextlib.contextmanager
def open_sink(path: Path | str, files: Files | None = None) -> Iterator[Sink]:
    sink = Sink(str(path), files or PosixFiles())
    try:
        yield sink
    finally:
        sink.close()


def _make_machine(cpus: int, available: int | None, busy: bool) -> RecordedSystem:
    texts = {} if available is None else {"/proc/meminfo": f"MemAvailable: {available // 1024} kB"}
    return RecordedSystem(texts, cpus, load=2.0 * cpus if busy else 0.0)


def make_facts(
    *,
    gpu: bool | None = True,
    direct: bool | None = True,
    alignment: int = 512,
    available: int | None = 64 << 30,
    cpus: int = 16,
    busy: bool = False,
    mapping: bool | None = False,
    gds: bool | None = False,
    file_system: str = "ext4",
) -> Facts:
    """Make up what a choice rests on; every reason names itself, so that tests can find it."""
    return Facts(
        MachineFacts(_make_machine(cpus, available, busy)),
        VolumeFacts(
            file_system,
            Fact("O_DIRECT", direct, "DIRECT-FOUND", "DIRECT-WHY", "DIRECT-REMEDY"),
            DirectAlignment(alignment, alignment),
        ),
        Fact("CUDA device", gpu, "GPU-FOUND", "GPU-WHY", "GPU-REMEDY"),
        Fact("host registration", mapping, "MAPPING-FOUND", "MAPPING-WHY", "MAPPING-REMEDY"),
        Fact("GPUDirect Storage", gds, "GDS-FOUND", "GDS-WHY", "GDS-REMEDY"),
    )


def reason_of(call: Callable[[], object]) -> str:
    """Message of the RouteUnavailable that a call must raise."""
    with pytest.raises(RouteUnavailable) as caught:
        call()
    return str(caught.value)


def listing(folder: Path) -> set[str]:
    """Names in a folder."""
    return set(os.listdir(folder))


def shards_of(folder: Path, index: str = INDEX) -> set[str]:
    """Files that the index of a checkpoint names."""
    return set(json.loads((folder / index).read_text())["weight_map"].values())


def same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    """Whether two checkpoints have the same tensors."""
    return got.keys() == wanted.keys() and all(np.array_equal(got[n], wanted[n]) for n in wanted)


def run_python(code: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run code in a fresh interpreter, with warnings as errors, and give back what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ends_in_time(work: Callable[[], object], timeout_s: float = TIMEOUT_S) -> bool:
    """Whether work ends; it runs in a daemon, so that a deadlock fails one test alone."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def no_workers_left() -> bool:
    """Whether no thread of an engine is alive."""
    return not [thread for thread in threading.enumerate() if thread.name == "headrace"]


def open_descriptors() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def needs_mount(*arguments: str) -> None:
    """Mount something, or skip: even root may lack the right inside a container."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def refuse(code: int) -> OSError:
    """Make the error that the operating system would raise."""
    return OSError(code, f"{errno.errorcode[code]}: {os.strerror(code)}")


class _Tensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, written down anew so that a slip in ours shows."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """``DLManagedTensor``, before version 1."""

    _fields_ = (
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _ManagedVersioned(ctypes.Structure):
    """``DLManagedTensorVersioned``, since version 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class FakeProducer:
    """A DLPack producer on any device, without that device."""

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        *,
        strides: tuple[int, ...] | None = None,
        bits: int = 8,
        lanes: int = 1,
        byte_offset: int = 0,
        device: tuple[int, int] = (2, 0),
        readonly: bool = False,
        versioned: bool = True,
    ) -> None:
        self.streams: list[int | None] = []
        self._device = device
        self._extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._steps = (ctypes.c_int64 * max(len(shape), 1))(*(strides or ()))
        tensor = _Tensor(
            pointer, *device, len(shape), 1, bits, lanes, self._extents, None, byte_offset
        )
        if strides is not None:
            tensor.strides = ctypes.cast(self._steps, ctypes.POINTER(ctypes.c_int64))
        self._record: ctypes.Structure
        if versioned:
            self._name = b"dltensor_versioned"
            self._record = _ManagedVersioned(1, 0, None, None, int(readonly), tensor)
        else:
            self._name = b"dltensor"
            self._record = _Managed(tensor, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None
    ) -> Any:
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._record), self._name, None)


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """Write a safetensors file of any types: name to (dtype, shape, bytes)."""
    header, offset = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        stop = offset + len(content)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    body = b"".join(content for _, _, content in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def shard(
    path: Path, tensors: Mapping[str, Any], save: Callable[[dict[str, Any], Path], object]
) -> Path:
    """Write tensors into a directory of two shards with an index, and give back the index."""
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save({name: tensors[name] for name in part}, path / file)
        weight_map.update(dict.fromkeys(part, file))
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index

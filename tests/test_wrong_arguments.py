"""Mistakes in what is asked for: each is an error at once, which says what to pass instead."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

import headrace as hr
import headrace.numpy as hn
from headrace.testing import FakeCuda
from tests.support import run_python


class OnGpu:
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "shape": (4,), "typestr": "|u1", "data": (4096, False), "version": 3
    }  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="cuda.bindings is there")
def test_buffer_on_a_gpu_without_bindings_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    for call in (hr.read_into, hr.write_from):
        with pytest.raises(hr.RouteUnavailable, match=r"on a GPU.*extra \[cuda13\]"):
            call(OnGpu(), tmp_path / "file")


def test_buffer_on_a_gpu_without_a_driver_says_what_to_do(tmp_path: Path) -> None:
    class NoDriver(FakeCuda):
        def device_count(self) -> int:
            raise hr.DeviceError("cudaGetDeviceCount failed: cudaErrorInsufficientDriver (35)")

        def pointer_device(self, pointer: int) -> int | None:
            raise hr.DeviceError("cudaPointerGetAttributes failed")

    class Lost(FakeCuda):
        def pointer_device(self, pointer: int) -> int | None:
            raise hr.DeviceError("cudaPointerGetAttributes failed")

    (tmp_path / "file").write_bytes(b"12345")
    with hr.Context(cuda=NoDriver()) as context, pytest.raises(hr.RouteUnavailable, match="driver"):
        hr.read_into(OnGpu(), tmp_path / "file", context=context)
    with hr.Context(cuda=Lost()) as context, pytest.raises(hr.DeviceError, match="Attributes"):
        hr.read_into(OnGpu(), tmp_path / "file", context=context)


@pytest.mark.parametrize("context", [hr.Options(), {"workers": 1}, "auto"], ids=repr)
def test_context_that_is_none_is_a_type_error(tmp_path: Path, context: Any) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    np.save(tmp_path / "a.npy", np.zeros(3))
    calls: list[Callable[[], object]] = [
        lambda: hr.read_into(bytearray(5), tmp_path / "file", context=context),
        lambda: hr.write_from(bytearray(5), tmp_path / "file", context=context),
        lambda: hr.explain(tmp_path / "file", raw=True, context=context),
        lambda: hr.doctor(context=context),
        lambda: hn.read(tmp_path / "a.npy", context=context),
        lambda: hn.save({"a": np.zeros(3)}, tmp_path / "model", context=context),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"context is .*pass a headrace\.Context"):
            call()
    with pytest.raises(TypeError, match=r"options is 'fast'; pass a headrace\.Options"):
        hr.Context("fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [b"model.safetensors", None, 3, [b"a"], [None]], ids=repr)
def test_source_that_is_no_path_is_a_type_error(source: Any) -> None:
    for call in (hn.load, hr.explain):
        with pytest.raises(TypeError, match="path"):
            call(source)


def test_several_files_as_raw_bytes_are_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="pass a str or a"):
        hr.explain([tmp_path / "a", tmp_path / "b"], raw=True)


@pytest.mark.parametrize("names", ["a", [1], [b"a"], [None, "a"]], ids=repr)
def test_names_that_are_no_names_are_a_type_error(tmp_path: Path, names: Any) -> None:
    save_file({"a": np.zeros(3)}, tmp_path / "model.safetensors")
    for call in (hn.load, hr.explain):
        with pytest.raises(TypeError, match="pass a list of tensor names"):
            call(tmp_path / "model.safetensors", names=names)
    assert list(hn.load(tmp_path / "model.safetensors", names=(n for n in "a"))) == ["a"]  # type: ignore[arg-type]


def test_file_of_the_kernel_whose_size_says_nothing_is_no_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert hn.read(tmp_path / "empty").nbytes == 0
    with pytest.raises(OSError, match="size is unknown until it is read") as caught:
        hn.read("/proc/self/status")
    assert caught.value.filename == "/proc/self/status"
    with pytest.raises(OSError, match="size is unknown"):
        hr.read_into(bytearray(5), "/proc/self/status")


def test_progress_is_told_once_where_there_is_nothing_to_move(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    told: list[hr.Progress] = []
    hn.read(tmp_path / "empty", progress=told.append)
    assert [(each.nbytes, each.total_nbytes) for each in told] == [(0, 0)]
    save_file({"a": np.zeros((0, 3))}, tmp_path / "model.safetensors")
    hn.load(tmp_path / "model.safetensors", progress=told.append)
    assert len(told) == 2


FEW_DESCRIPTORS = """
import os, resource, sys
import headrace.numpy as hn
path = sys.argv[1]
hn.load(path)
free = max(map(int, os.listdir("/proc/self/fd")))
for limit in range(free, free + 12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096))
    try:
        hn.load(path)
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
        assert error.errno == 24, error
        assert str(error.filename).startswith(path), error
        print("refused")
    else:
        print("loaded")
"""


def test_too_few_descriptors_are_said_with_the_file(tmp_path: Path) -> None:
    hn.save({str(n): np.zeros(100) for n in range(4)}, tmp_path / "model", max_shard_nbytes=800)
    told = run_python(FEW_DESCRIPTORS, str(tmp_path / "model")).split()
    assert set(told) == {"refused", "loaded"}

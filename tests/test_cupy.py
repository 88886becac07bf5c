"""CuPy arrays, on a stand-in for CuPy; tests/gpu has the real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import headrace as hr
import headrace.numpy as hn
from headrace.testing import FakeCuda, FaultyFiles
from tests.fake_cupy import installed
from tests.support import PAGE

TENSORS = {
    "matrix": np.arange(70_000, dtype=np.float32).reshape(100, 700),
    "half": np.arange(17).astype(ml_dtypes.bfloat16),
    "number": np.array(3.5),
    "nothing": np.zeros((0, 4), np.int16),
}


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(devices=2)


@pytest.fixture
def namespaces(cuda: FakeCuda) -> Iterator[tuple[Any, Any]]:
    """CuPy and ``headrace.cupy``."""
    with installed(cuda) as both:
        yield both


@pytest.fixture
def context(cuda: FakeCuda) -> Iterator[hr.Context]:
    options = hr.Options(workers=3, block_nbytes=4 * PAGE, pinned_nbytes=8 * 4 * PAGE)
    with hr.Context(options, cuda=cuda, files=FaultyFiles()) as made:
        yield made
    assert cuda.errors == []


def on_devices(cupy: Any, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    held = {}
    for number, (name, array) in enumerate(tensors.items()):
        with cupy.cuda.Device(number % 2):
            held[name] = cupy.array(array)
    return held


def test_file_is_the_official_one_and_comes_back(
    tmp_path: Path, namespaces: tuple[Any, Any], context: hr.Context
) -> None:
    cupy, hc = namespaces
    report = hc.save_file(on_devices(cupy, TENSORS), tmp_path / "a", {"k": "v"}, context=context)
    save_file(TENSORS, tmp_path / "official", {"k": "v"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "official").read_bytes()
    assert set(report.device.split(", ")) == {"cuda:0", "cuda:1"}
    loaded = hc.load(tmp_path / "a", device=1, context=context)
    assert {name: array.get().tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in TENSORS.items()
    }
    assert {int(array.device) for array in loaded.values()} == {1}


def test_checkpoint_comes_back(
    tmp_path: Path, namespaces: tuple[Any, Any], context: hr.Context
) -> None:
    cupy, hc = namespaces
    hc.save(on_devices(cupy, TENSORS), tmp_path, max_shard_nbytes=100, context=context)
    loaded = hc.load(tmp_path, context=context)
    assert all(np.array_equal(loaded[name].get(), array) for name, array in TENSORS.items())


@pytest.mark.parametrize("limit", [100, 10**9])
def test_model_whose_registration_is_kept_comes_back_each_time_whole_or_in_part(
    tmp_path: Path, namespaces: tuple[Any, Any], cuda: FakeCuda, limit: int
) -> None:
    """Its plan is kept too, for the same tensors of the same files on the same device."""
    _, hc = namespaces

    def check(context: hr.Context, wanted: dict[str, np.ndarray], **given: Any) -> None:
        with hr.trace() as traced:
            loaded = hc.load(tmp_path / "m", context=context, **given)
        got = {name: array.get().tobytes() for name, array in loaded.items()}
        assert got == {name: array.tobytes() for name, array in wanted.items()}
        assert {int(array.device) for array in loaded.values()} == {given.get("device", 0)}
        (report,) = traced.reports
        assert report.nbytes == sum(array.nbytes for array in wanted.values())

    other = {name: np.array(np.flip(array)) for name, array in TENSORS.items()}
    with hr.Context(hr.Options(mapped_nbytes=1 << 20), cuda=cuda) as context:
        for tensors in (TENSORS, other):
            hn.save(tensors, tmp_path / "m", max_shard_nbytes=limit)
            for _ in range(3):
                check(context, tensors)
                check(context, {"half": tensors["half"]}, names=["half"])
                check(context, tensors, device=1)
    assert (cuda.mapped_nbytes, cuda.live_events, cuda.errors) == (0, 0, [])


@pytest.mark.parametrize("give", [False, True])
def test_array_that_is_not_contiguous_is_copied_in_the_order_of_its_stream(
    tmp_path: Path, namespaces: tuple[Any, Any], context: hr.Context, cuda: FakeCuda, give: bool
) -> None:
    cupy, hc = namespaces
    stream = cuda.create_stream()
    whole = cupy.array(np.zeros((60, 40), np.int32))
    cuda.enqueue_on(stream, lambda: whole.put(np.arange(2400).reshape(60, 40)))
    part = whole.view((slice(None), slice(None, None, 2)))
    if give:
        hc.save_file({"a": part}, tmp_path / "a", stream=stream, context=context)
    else:
        with cupy.cuda.Stream.from_external(cupy.Handle(stream)):
            hc.save_file({"a": part}, tmp_path / "a", context=context)
    assert np.array_equal(load_file(tmp_path / "a")["a"], np.arange(2400).reshape(60, 40)[:, ::2])


def test_given_stream_orders_a_save_a_write_and_a_load(
    tmp_path: Path, namespaces: tuple[Any, Any], context: hr.Context, cuda: FakeCuda
) -> None:
    cupy, hc = namespaces
    cuda.set_device(1)
    stream = cuda.create_stream()
    array = cupy.array(np.zeros(5000, np.int32))
    cuda.set_device(0)
    cuda.enqueue_on(stream, lambda: array.put(np.arange(5000)))
    hc.write(array, tmp_path / "raw", file_offset=3, stream=stream, context=context)
    assert (tmp_path / "raw").read_bytes()[3:] == np.arange(5000, dtype=np.int32).tobytes()
    cuda.enqueue_on(stream, lambda: array.put(7))
    hc.save_file({"a": array}, tmp_path / "a", stream=stream, context=context)
    assert set(load_file(tmp_path / "a")["a"]) == {7}
    for given in (stream, 0, 1, 2, None):
        read = hc.load(tmp_path / "a", device=1, stream=given, context=context)["a"]
        assert np.array_equal(read.get(), np.full(5000, 7))
        with cupy.cuda.Device(1):
            assert cupy.cuda.get_current_stream().ptr == 0
    with pytest.raises(ValueError, match="belongs to cuda:1"):
        hc.load(tmp_path / "a", device=0, stream=stream, context=context)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([1], "tensors is list; pass a dict of names to"),
        ({"a": np.zeros(3)}, r"tensor 'a' is numpy\.ndarray; pass"),
    ],
    ids=str,
)
def test_what_is_no_dict_of_arrays_is_a_value_error(
    tmp_path: Path, namespaces: tuple[Any, Any], tensors: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        namespaces[1].save_file(tensors, tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_type_that_safetensors_lacks_is_a_format_error(
    tmp_path: Path, namespaces: tuple[Any, Any], context: hr.Context
) -> None:
    cupy, hc = namespaces
    with pytest.raises(hr.FormatError, match="tensor 'a' has dtype '<c16'"):
        hc.save_file({"a": cupy.array(np.zeros(3, np.complex128))}, tmp_path / "a", context=context)


def test_what_cannot_be_written_is_refused(
    tmp_path: Path, namespaces: tuple[Any, Any], context: hr.Context
) -> None:
    cupy, hc = namespaces
    part = cupy.array(np.zeros((6, 4))).view((slice(None), slice(2)))
    with pytest.raises(hr.BufferMismatch, match=r"not contiguous.*ascontiguousarray"):
        hc.write(part, tmp_path / "raw", context=context)
    with pytest.raises(hr.BufferMismatch, match=r"ndarray; pass a cupy\.ndarray"):
        hc.write(np.zeros(3), tmp_path / "raw", context=context)
    assert os.listdir(tmp_path) == []

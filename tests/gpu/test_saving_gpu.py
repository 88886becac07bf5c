"""Saving from a real GPU: bytes, streams, devices."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import safetensors.torch as safetensors_torch
import torch

import headrace
import headrace.torch

pytestmark = pytest.mark.gpu
_MIB = 1 << 20
_SLEEP_CYCLES = 200_000_000  # about 0.1 s, after which a write that does not wait would be done


def _tensors(device: str = "cuda") -> dict[str, torch.Tensor]:
    dtypes = (torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64)
    tensors = {
        f"layer.{index}": torch.randint(0, 255, ((index * 500_003 + 24) // 8 * 8,)).to(torch.uint8)
        for index in range(len(dtypes))
    }
    made = {
        name: tensor.view(dtype).to(device)
        for (name, tensor), dtype in zip(tensors.items(), dtypes, strict=True)
    }
    made["empty"] = torch.empty((0, 3), device=device)
    made["one"] = torch.ones((), device=device)
    return made


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("route", ["auto", "cached", "direct"])
def test_file_is_the_official_one(tmp_path: Path, route: str) -> None:
    tensors = _tensors()
    report = headrace.torch.save_file(tensors, tmp_path / "ours", {"a": "b"}, route=route)
    safetensors_torch.save_file(tensors, tmp_path / "official", {"a": "b"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "official").read_bytes()
    assert report.device == "cuda:0"


def test_aligned_file_and_checkpoint_come_back(tmp_path: Path) -> None:
    tensors = _tensors()
    headrace.torch.save_file(tensors, tmp_path / "a", align=True)
    headrace.torch.save(tensors, tmp_path / "model", max_shard_nbytes=_MIB, align=True)
    for source in ("a", "model"):
        loaded = headrace.torch.load(tmp_path / source, device="cuda")
        assert set(loaded) == set(tensors)
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert _bytes(loaded[name]) == _bytes(tensor), name


def test_tensors_of_the_host_and_the_gpu_go_into_one_file(tmp_path: Path) -> None:
    tensors = {"host": torch.arange(3 * _MIB), "gpu": torch.arange(3 * _MIB, device="cuda") * 3}
    headrace.torch.save_file(tensors, tmp_path / "a")
    loaded = safetensors_torch.load_file(tmp_path / "a")
    assert all(torch.equal(loaded[name], tensor.cpu()) for name, tensor in tensors.items())


def test_save_comes_after_work_on_the_current_stream(tmp_path: Path) -> None:
    tensor = torch.zeros(8 * _MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(_SLEEP_CYCLES)
        tensor.fill_(7)
        headrace.torch.save_file({"a": tensor}, tmp_path / "a")
    assert bool((safetensors_torch.load_file(tmp_path / "a")["a"] == 7).all())


def test_save_and_write_come_after_work_on_the_given_stream(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    tensor = torch.zeros(8 * _MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
        tensor.fill_(7)
    headrace.torch.save_file({"a": tensor}, tmp_path / "a", stream=stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
        tensor.fill_(8)
    headrace.torch.write(tensor, tmp_path / "raw", stream=stream.cuda_stream)
    assert bool((safetensors_torch.load_file(tmp_path / "a")["a"] == 7).all())
    assert (tmp_path / "raw").read_bytes() == bytes([8]) * (8 * _MIB)


def test_conjugate_view_is_resolved_on_the_given_stream(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    tensor = torch.zeros(_MIB, dtype=torch.complex64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
        tensor.fill_(1 + 2j)
    headrace.torch.save_file({"a": tensor.conj()}, tmp_path / "a", stream=stream)
    assert bool((safetensors_torch.load_file(tmp_path / "a")["a"] == 1 - 2j).all())


def test_load_takes_memory_in_the_order_of_the_given_stream(tmp_path: Path) -> None:
    content = torch.randint(0, 255, (32 * _MIB,), dtype=torch.uint8)
    headrace.torch.write(content, tmp_path / "raw")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        old = torch.full((32 * _MIB,), 9, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(_SLEEP_CYCLES)
        copy = old.clone()
        pointer = old.data_ptr()
        del old
    new = headrace.torch.read(tmp_path / "raw", device="cuda", stream=stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.synchronize()
    assert new.data_ptr() == pointer, "the allocator did not reuse the block: nothing was tested"
    assert bool((copy == 9).all())
    assert torch.equal(new.cpu(), content)


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_order_a_load_and_a_save(tmp_path: Path, stream: int) -> None:
    tensors = _tensors()
    headrace.torch.save_file(tensors, tmp_path / "a", stream=stream)
    loaded = headrace.torch.load(tmp_path / "a", device="cuda", stream=stream)
    for name, tensor in tensors.items():
        assert _bytes(loaded[name]) == _bytes(tensor), name


@pytest.mark.gpu2
def test_tensors_of_two_gpus_go_into_one_file(tmp_path: Path) -> None:
    tensors = {
        f"{name}.{device}": tensor
        for device in ("cuda:0", "cuda:1")
        for name, tensor in _tensors(device).items()
    }
    report = headrace.torch.save_file(tensors, tmp_path / "ours")
    safetensors_torch.save_file(tensors, tmp_path / "official")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "official").read_bytes()
    assert set(report.device.split(", ")) == {"cuda:0", "cuda:1"}
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
    with pytest.raises(ValueError, match="belongs to cuda:1"):
        headrace.torch.save_file(tensors, tmp_path / "ours", stream=stream)


def test_cupy_arrays_become_the_official_file(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    numpy_writer = pytest.importorskip("safetensors.numpy")
    import headrace.cupy

    arrays = {
        "floats": cupy.arange(500_003, dtype=cupy.float32),
        "strided": cupy.arange(600_000).reshape(600, 1000)[:, ::3],
        "one": cupy.array(3.5),
        "empty": cupy.zeros((0, 3)),
    }
    headrace.cupy.save_file(arrays, tmp_path / "ours")
    packed = {name: array.get() for name, array in arrays.items()}
    numpy_writer.save_file({n: a.copy(order="C") for n, a in packed.items()}, tmp_path / "official")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "official").read_bytes()


def test_cupy_arrays_are_copied_and_loaded_on_the_given_stream(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    import headrace.cupy

    array = cupy.zeros((1000, 1000), cupy.int32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(300):
            array += 1
    headrace.cupy.save_file({"a": array[:, ::2]}, tmp_path / "a", stream=stream)
    loaded = headrace.cupy.load(tmp_path / "a", stream=stream)["a"]
    assert bool((loaded == 300).all())
    assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null

"""torch on a real GPU: bytes, memory, streams."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import safetensors.torch as safetensors_torch
import torch

import headrace
import headrace.torch

pytestmark = pytest.mark.gpu
_MIB = 1 << 20


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model file with every type that torch can write, odd sizes and an empty tensor."""
    tensors = {
        f"layer.{index}.{str(dtype).removeprefix('torch.')}": torch.randint(
            0, 255, (index * 1_000_003 + 24,), dtype=torch.uint8
        )[: (index * 1_000_003 + 24) // 8 * 8].view(dtype)
        for index, dtype in enumerate(
            (
                torch.uint8,
                torch.bfloat16,
                torch.float8_e4m3fn,
                torch.float8_e5m2,
                torch.float16,
                torch.float32,
                torch.float64,
                torch.int16,
                torch.int64,
            )
        )
    }
    tensors["empty"] = torch.empty((0, 3))
    tensors["scalar"] = torch.tensor(3.5)
    tensors["matrix"] = torch.randn(1000, 777)
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(tensors, path)
    return path, tensors


@pytest.mark.parametrize("route", ["auto", "cached", "direct"])
def test_every_type_arrives_as_the_official_loader_gives_it(
    model: tuple[Path, dict[str, torch.Tensor]], route: str
) -> None:
    path, _ = model
    expected = safetensors_torch.load_file(path)
    found = headrace.torch.load(path, device="cuda", route=route)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].device.type == "cuda"
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert _bytes(found[name]) == _bytes(tensor)


def test_loading_never_holds_a_second_copy_on_the_gpu(
    model: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """A second copy would double the peak; the allocator's own rounding is up to 1 MiB a tensor."""
    path, tensors = model
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = headrace.torch.load_file(path, device="cuda:0")
    rounding = _MIB * len(tensors)
    assert rounding < sum(tensor.nbytes for tensor in tensors.values()) / 2
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    assert torch.cuda.max_memory_allocated() - before <= wanted + rounding
    del found
    assert torch.cuda.memory_allocated() == before


def test_each_tensor_owns_its_memory(model: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = model
    found = headrace.torch.load_file(path, device="cuda")
    before = torch.cuda.memory_allocated()
    nbytes = found.pop("matrix").nbytes
    assert before - torch.cuda.memory_allocated() >= nbytes


def test_half_resident_file_takes_two_routes_and_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "half"
    content = os.urandom(96 * _MIB + 12345)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 48 * _MIB, os.POSIX_FADV_DONTNEED)
    buffer = torch.zeros(len(content), dtype=torch.uint8, device="cuda")
    report = headrace.read_into(buffer, path)
    assert _bytes(buffer) == content
    assert {str(each.route) for each in report.observed} == {"cached", "direct"}


def test_read_is_ordered_after_work_queued_on_the_current_stream(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    content = os.urandom(4 * _MIB)
    path.write_bytes(content)
    stream = torch.cuda.Stream()
    buffer = torch.empty(len(content), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s, after which the fill would win a race
        buffer.fill_(7)
        headrace.read_into(buffer, path)
    assert _bytes(buffer) == content


def test_load_may_reuse_memory_that_a_queued_kernel_still_reads(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(os.urandom(32 * _MIB))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        old = torch.full((32 * _MIB,), 9, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(200_000_000)
        copy = old.clone()
        pointer = old.data_ptr()
        del old
        new = headrace.torch.read(path, device="cuda")
    torch.cuda.synchronize()
    assert new.data_ptr() == pointer, "the allocator did not reuse the block: nothing was tested"
    assert bool((copy == 9).all())
    assert _bytes(new) == path.read_bytes()


def test_bytes_are_visible_to_every_stream_on_return(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    content = os.urandom(64 * _MIB)
    path.write_bytes(content)
    for _ in range(5):
        tensor = headrace.torch.read(path, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            copy = tensor.clone()
        torch.cuda.synchronize()
        assert _bytes(copy) == content
        del tensor, copy


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn])
def test_read_into_takes_tensors_of_any_type_at_odd_places(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    path = tmp_path / "bytes"
    content = os.urandom(3 * _MIB + 7)
    path.write_bytes(content)
    whole = torch.full((4 * _MIB,), 0xA5, dtype=torch.uint8, device="cuda")
    part = whole[2 : 2 + 2 * _MIB].view(dtype)
    headrace.read_into(part, path, file_offset=13)
    found = _bytes(whole)
    assert found[2 : 2 + 2 * _MIB] == content[13 : 13 + 2 * _MIB]
    assert set(found[:2]) | set(found[2 + 2 * _MIB :]) == {0xA5}


def test_pinned_memory_is_sized_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(os.urandom(25_000_000))
    buffer = torch.zeros(25_000_000, dtype=torch.uint8, device="cuda")
    with headrace.Context() as context:
        report = headrace.read_into(buffer, path, context=context)
    assert 0 < report.pinned_nbytes <= 32 * _MIB


def test_many_small_tensors_arrive_whole(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    tensors = {f"t{i:05}": torch.randint(0, 255, (i % 97 * 50 + 1,)) for i in range(5000)}
    safetensors_torch.save_file(tensors, path)
    found = headrace.torch.load_file(path, device="cuda")
    for name, tensor in tensors.items():
        assert torch.equal(found[name].cpu(), tensor)


def test_callers_current_device_and_stream_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(os.urandom(_MIB))
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    headrace.torch.read(path, device="cuda:0")
    assert torch.cuda.current_device() == device
    assert torch.cuda.current_stream() == stream


def test_device_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(os.urandom(_MIB))
    absent = torch.cuda.device_count()
    with pytest.raises(RuntimeError):
        headrace.torch.read(path, device=f"cuda:{absent}")


def test_fortran_order_npy_arrives_with_the_right_elements(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "f.npy"
    array = numpy.asfortranarray(numpy.arange(1000 * 7, dtype="<f4").reshape(1000, 7))
    numpy.save(path, array)
    found = headrace.torch.read(path, device="cuda")
    assert numpy.array_equal(found.cpu().numpy(), array)

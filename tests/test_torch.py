from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.testing import FaultyFiles
from headrace.testing.faulty_files import pages_where
from tests.support import PAGE, folder_with_direct, shard, write_random, write_safetensors

torch = pytest.importorskip("torch")
official = pytest.importorskip("safetensors.torch")

import headrace.torch as ht  # (needs torch, which the lines above make sure of)

TYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 4, 5))


def raw(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def same(first: Any, second: Any) -> bool:
    """Same type, shape, device and bytes; NaNs included."""
    return (first.dtype, first.shape, first.device, raw(first)) == (
        second.dtype,
        second.shape,
        second.device,
        raw(second),
    )


def noise(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Bytes that are 0 or 1, so that they mean something in every type."""
    made = torch.empty(shape, dtype=dtype)
    content = np.random.default_rng(made.nbytes).integers(0, 2, made.nbytes, np.uint8)
    if made.nbytes:
        made = torch.from_numpy(content).view(dtype).reshape(shape).clone()
    return made


@pytest.mark.parametrize("name", TYPES)
def test_load_file_equals_the_official_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    official.save_file({str(s): noise(getattr(torch, name), s) for s in SHAPES}, path)
    ours, theirs = ht.load_file(path), official.load_file(path)
    assert set(ours) == set(theirs) == {str(shape) for shape in SHAPES}
    for each, tensor in theirs.items():
        assert same(ours[each], tensor)


def test_type_that_only_newer_official_loaders_know_is_torchs_own(tmp_path: Path) -> None:
    path, content = tmp_path / "model.safetensors", bytes(range(12))
    write_safetensors(path, {"a": ("F8_E8M0", (3, 4), content)})
    (tensor,) = ht.load_file(path).values()
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float8_e8m0fnu, (3, 4))
    assert raw(tensor) == content


def test_packed_types_are_documented_raw_bytes(tmp_path: Path) -> None:
    path, content = tmp_path / "model.safetensors", bytes(range(12))
    write_safetensors(path, {"a": ("F4", (4, 6), content)})
    (tensor,) = ht.load_file(path).values()
    assert (tensor.dtype, tuple(tensor.shape), raw(tensor)) == (torch.uint8, (12,), content)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return {f"layer.{n}": noise(torch.bfloat16, (31 + n, 257)) for n in range(9)}


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, Any]) -> Path:
    path = tmp_path / "model.safetensors"
    official.save_file(tensors, path)
    return path


def test_directory_index_and_list_of_shards_load_the_same(
    tmp_path: Path, tensors: dict[str, Any]
) -> None:
    index = shard(tmp_path, tensors, official.save_file)
    for source in (tmp_path, index, sorted(tmp_path.glob("*.safetensors"))):
        loaded = ht.load(source)
        assert set(loaded) == set(tensors)
        assert all(same(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("route", ["host", "direct"])
def test_every_route_gives_the_same_tensors(
    model: Path, tensors: dict[str, Any], route: str
) -> None:
    folder_with_direct(model.parent)
    held = pages_where(lambda page: page % 3 == 0)
    with hr.Context(hr.Options(block_nbytes=PAGE), files=FaultyFiles(resident=held)) as context:
        loaded = ht.load(model, route=route, context=context)
    assert all(same(loaded[name], tensors[name]) for name in tensors)


def test_each_tensor_owns_memory_of_its_own(model: Path, tensors: dict[str, Any]) -> None:
    loaded = ht.load_file(model)
    for tensor in loaded.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == len(loaded)
    alive = weakref.ref(loaded["layer.0"])
    del loaded["layer.0"], tensor
    gc.collect()
    assert alive() is None
    for tensor in loaded.values():
        tensor.zero_()
    assert same(ht.load_file(model)["layer.1"], tensors["layer.1"])


def test_default_device_is_that_of_torch(model: Path, tensors: dict[str, Any]) -> None:
    assert ht.load(model)["layer.0"].device == torch.get_default_device()
    with torch.device("cpu"):
        assert ht.load(model)["layer.0"].device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"], ids=str)
def test_host_is_named_in_torchs_ways(model: Path, device: Any) -> None:
    assert ht.load_file(model, device=device)["layer.0"].device.type == "cpu"
    assert ht.load_file(model, device)["layer.0"].device.type == "cpu"


@pytest.mark.parametrize("device", ["meta", "xpu", torch.device("mps")], ids=str)
def test_device_of_another_kind_is_a_value_error(model: Path, device: Any) -> None:
    with pytest.raises(ValueError, match="neither 'cpu' nor a CUDA device"):
        ht.load(model, device=device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 1)], ids=str)
def test_gpu_that_torch_does_not_see_is_unavailable_with_what_to_do(
    model: Path, device: Any
) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    with pytest.raises(hr.RouteUnavailable) as caught:
        ht.load(model, device=device)
    for word in ("sees no CUDA device", "install a CUDA build", "device='cpu'"):
        assert word in str(caught.value)


def test_loading_changes_neither_the_random_state_nor_the_default_type(model: Path) -> None:
    before = torch.get_rng_state().clone(), torch.get_default_dtype()
    ht.load_file(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_default_dtype() == before[1]


def test_loading_works_where_gradients_are_off(model: Path, tensors: dict[str, Any]) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loaded = ht.load_file(model)
        assert all(same(loaded[name], tensors[name]) for name in tensors)


# read


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
        np.array(7.5),
        np.zeros((0, 3)),
        np.arange(6, dtype=np.complex128),
        np.arange(6, dtype=np.uint64),
        np.array([True, False]),
        np.arange(3, dtype=np.float16),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_npy_equals_what_torch_makes_of_numpys(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    tensor = ht.read(tmp_path / "a.npy")
    expected = torch.from_numpy(np.load(tmp_path / "a.npy"))
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    assert torch.equal(tensor, expected)
    assert tensor.stride() == expected.stride()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("code", [">f4", "<U3", "S2", "M8[s]", "g", [("a", "<f4")]], ids=str)
def test_npy_of_a_type_that_torch_lacks_is_a_format_error_that_says_what_to_do(
    tmp_path: Path, code: Any
) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3, code))
    with pytest.raises(hr.FormatError, match=r"load it with headrace\.numpy"):
        ht.read(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        ("BF16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.complex128, "complex128"),
        (None, "uint8"),
    ],
    ids=str,
)
def test_raw_bytes_are_read_as_any_type_of_torch(tmp_path: Path, dtype: Any, expected: str) -> None:
    content = write_random(tmp_path / "file.bin", 160)
    tensor = ht.read(tmp_path / "file.bin", dtype=dtype, file_offset=32, nbytes=64)
    assert tensor.dtype == getattr(torch, expected)
    assert raw(tensor) == content[32:96]


def test_raw_bytes_have_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    content = write_random(tmp_path / "file.bin", 160)
    tensor = ht.read(
        tmp_path / "file.bin", dtype=torch.int16, shape=torch.Size((3, 5)), file_offset=7
    )
    assert tuple(tensor.shape) == (3, 5)
    assert raw(tensor) == content[7:37]


@pytest.mark.parametrize("dtype", ["nonsense", torch.qint8, "float", 3, object()], ids=str)
def test_type_that_torch_lacks_is_a_value_error(tmp_path: Path, dtype: Any) -> None:
    write_random(tmp_path / "file.bin", 160)
    with pytest.raises(ValueError, match="is no type that safetensors has"):
        ht.read(tmp_path / "file.bin", dtype=dtype)


def test_npy_that_is_not_what_was_expected_is_a_format_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4), np.float32))
    with pytest.raises(hr.FormatError, match="but F64"):
        ht.read(tmp_path / "a.npy", dtype=torch.float64)
    assert ht.read(tmp_path / "a.npy", dtype=torch.float32, shape=(3, 4)).shape == (3, 4)


def test_read_into_fills_a_tensor_in_place(tmp_path: Path) -> None:
    content = write_random(tmp_path / "file.bin", 100)
    tensor = torch.zeros(30, dtype=torch.bfloat16)
    report = hr.read_into(tensor[5:25], tmp_path / "file.bin", file_offset=9)
    assert report.nbytes == 40
    assert raw(tensor) == bytes(10) + content[9:49] + bytes(10)

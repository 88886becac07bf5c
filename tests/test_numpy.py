from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.numpy import load_file, save_file

import headrace as hr
import headrace.numpy as hn
from headrace.testing import FaultyFiles
from headrace.testing.faulty_files import pages_where
from tests.support import PAGE, folder_with_direct, shard, write_random, write_safetensors

OFFICIAL = (
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
    *("F16", "F32", "F64", "C64"),
)
BY_ML_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 4, 5))


def same(first: np.ndarray, second: np.ndarray) -> bool:
    """Same type, shape and bytes; NaNs included."""
    return (first.dtype, first.shape, first.tobytes()) == (
        second.dtype,
        second.shape,
        second.tobytes(),
    )


def noise(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    made = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * made.itemsize
    content = np.random.default_rng(nbytes).integers(0, 2, nbytes, np.uint8)
    made_of: np.ndarray = content.view(made).reshape(shape)
    return made_of


# load_file, load


@pytest.mark.parametrize("name", OFFICIAL)
def test_load_file_equals_the_official_one(tmp_path: Path, name: str) -> None:
    codes = {"BOOL": "?", "C64": "c8"}
    code = codes.get(name, name.lower()[0] + str(int(name.lstrip("BOLUIFC") or 8) // 8))
    path = tmp_path / "model.safetensors"
    save_file({str(shape): noise(code, shape) for shape in SHAPES}, path)
    ours, official = hn.load_file(path), load_file(path)
    assert set(ours) == set(official) == {str(shape) for shape in SHAPES}
    for each, array in official.items():
        assert same(ours[each], array)


@pytest.mark.parametrize("name", BY_ML_DTYPES)
def test_types_that_numpy_lacks_are_those_of_ml_dtypes(tmp_path: Path, name: str) -> None:
    path, dtype = tmp_path / "model.safetensors", np.dtype(BY_ML_DTYPES[name])
    content = bytes(range(24 * dtype.itemsize))
    write_safetensors(
        path, {"a": (name, (4, 6), content), "b": (name, (), content[: dtype.itemsize])}
    )
    loaded = hn.load_file(path)
    assert (loaded["a"].dtype, loaded["a"].shape) == (dtype, (4, 6))
    assert (loaded["a"].tobytes(), loaded["b"].tobytes()) == (content, content[: dtype.itemsize])
    assert loaded["b"].shape == ()


@pytest.mark.parametrize(("name", "shape", "nbytes"), [("F4", (4, 6), 12), ("F6_E2M3", (8,), 6)])
def test_packed_types_are_documented_raw_bytes(
    tmp_path: Path, name: str, shape: tuple[int, ...], nbytes: int
) -> None:
    path, content = tmp_path / "model.safetensors", bytes(range(nbytes))
    write_safetensors(path, {"a": (name, shape, content)})
    (array,) = hn.load_file(path).values()
    assert (array.dtype.str, array.shape, array.tobytes()) == ("|u1", (nbytes,), content)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return {f"layer.{n}": noise(np.float32, (31 + n, 257)) for n in range(9)}


def test_directory_index_and_list_of_shards_load_the_same(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    index = shard(tmp_path, tensors, save_file)
    files = sorted(tmp_path.glob("*.safetensors"))
    for source in (
        tmp_path,
        str(tmp_path),
        index,
        files,
        [str(file) for file in files],
        files[::-1],
    ):
        loaded = hn.load(source)
        assert set(loaded) == set(tensors)
        assert all(same(loaded[name], tensors[name]) for name in tensors)


def test_wanted_names_come_from_any_shard_in_file_order(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    shard(tmp_path, tensors, save_file)
    loaded = hn.load(tmp_path, names=["layer.5", "layer.2", "layer.8"])
    assert list(loaded) == ["layer.2", "layer.8", "layer.5"]
    assert all(same(array, tensors[name]) for name, array in loaded.items())


@pytest.mark.parametrize("route", ["host", "direct"])
def test_every_route_gives_the_same_arrays(
    tmp_path: Path, tensors: dict[str, np.ndarray], route: str
) -> None:
    path = folder_with_direct(tmp_path) / "model.safetensors"
    save_file(tensors, path)
    with hr.Context(hr.Options(workers=3, block_nbytes=8 * PAGE)) as context:
        loaded = hn.load(path, route=route, context=context)
    assert all(same(loaded[name], tensors[name]) for name in tensors)


@settings(deadline=None, max_examples=30)
@given(
    arrays=st.dictionaries(
        st.text("abc.", min_size=1, max_size=4),
        npst.arrays(
            npst.integer_dtypes(endianness="<")
            | npst.floating_dtypes(endianness="<", sizes=(32, 64)),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
        ),
        max_size=6,
    ),
    held=st.sets(st.integers(0, 20)),
    block=st.sampled_from([PAGE, 3 * PAGE]),
)
def test_any_model_equals_the_official_loader_whatever_is_resident(
    tmp_path_factory: pytest.TempPathFactory,
    arrays: dict[str, np.ndarray],
    held: set[int],
    block: int,
) -> None:
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    save_file(arrays, path)
    files = FaultyFiles(resident=pages_where(lambda page: page in held), short_reads=5000)
    with hr.Context(hr.Options(workers=2, block_nbytes=block), files=files) as context:
        loaded = hn.load(path, context=context)
    official = load_file(path)
    assert set(loaded) == set(official)
    assert all(same(loaded[name], official[name]) for name in official)


def test_each_array_owns_writable_memory_of_its_own(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    loaded = hn.load_file(path)
    for array in loaded.values():
        assert array.base is None
        assert array.flags.owndata
        assert array.flags.writeable
        assert array.flags.c_contiguous
    alive = weakref.ref(loaded["layer.0"])
    del loaded["layer.0"], array
    gc.collect()
    assert alive() is None
    for array in loaded.values():
        array[...] = 0
    assert same(hn.load_file(path)["layer.1"], tensors["layer.1"])


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "gpu", 0, 3])
def test_device_other_than_the_host_is_a_value_error(tmp_path: Path, device: Any) -> None:
    with pytest.raises(ValueError, match=r"host memory|is not 'cpu'"):
        hn.load(tmp_path / "model.safetensors", device=device)


@pytest.mark.parametrize("device", [None, "cpu", "host"])
def test_device_of_numpy_is_the_host(
    tmp_path: Path, tensors: dict[str, np.ndarray], device: Any
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(hn.load(tmp_path, device=device)) == set(tensors)
    assert set(hn.load_file(tmp_path / "model.safetensors", device)) == set(tensors)


def test_missing_file_stays_a_file_not_found_error(tmp_path: Path) -> None:
    for call in (hn.load_file, hn.load, hn.read):
        with pytest.raises(FileNotFoundError, match="missing"):
            call(tmp_path / "missing.safetensors")
    with pytest.raises(FileNotFoundError):
        hn.load(tmp_path)


def test_empty_model_is_no_arrays(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert hn.load_file(tmp_path / "model.safetensors") == {}


# read


@settings(deadline=None, max_examples=60)
@given(
    array=npst.arrays(
        npst.scalar_dtypes()
        | npst.byte_string_dtypes(min_len=1)
        | npst.unicode_string_dtypes(min_len=1)
        | npst.array_dtypes(npst.integer_dtypes(), max_size=3),
        npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
    ),
    order=st.sampled_from("CF"),
)
def test_npy_equals_what_numpy_reads(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, order: Any
) -> None:
    path = tmp_path_factory.mktemp("npy") / "array.npy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of field names that need a newer version of the format
        np.save(path, np.array(array, order=order))
    ours, official = hn.read(path), np.load(path)
    assert same(ours, official)
    assert ours.strides == official.strides or ours.size <= 1 or 1 in ours.shape
    assert ours.flags.f_contiguous == official.flags.f_contiguous
    assert ours.flags.owndata


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4)),
        np.array(7.5),
        np.zeros((0, 3)),
        np.arange(5, dtype=">f8"),
        np.array([(1, 2.5), (3, 4.5)], [("a", "<i2"), ("b", ">f8")]),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(["2026-11-29"], "M8[D]"),
        np.arange(3, dtype=np.longdouble),
        np.arange(3) + 1j,
        np.zeros(2, [("a", "<f4", (2, 3)), ("b", "S3")]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_npy_of_every_kind_comes_back_as_it_was(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    read = hn.read(tmp_path / "a.npy")
    assert same(read, array)
    assert (read.flags.c_contiguous, read.flags.f_contiguous) == (
        array.flags.c_contiguous,
        array.flags.f_contiguous,
    )


def test_npy_of_objects_is_a_format_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, "x"], object), allow_pickle=True)
    with pytest.raises(hr.FormatError, match="Python objects"):
        hn.read(tmp_path / "a.npy")


def test_npy_with_offset_or_length_is_raw_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100, dtype=np.int16))
    content = path.read_bytes()
    assert hn.read(path, nbytes=6).tobytes() == content[:6] == b"\x93NUMPY"
    assert same(hn.read(path, file_offset=128, dtype="I16"), np.arange(100, dtype=np.int16))


@pytest.mark.parametrize("code", ["<f4", "|u1", "<i8", "|b1"])
def test_npy_may_be_expected_by_the_name_that_numpy_gives_its_type(
    tmp_path: Path, code: str
) -> None:
    array = np.zeros(4, code)
    assert array.dtype.str == code
    np.save(tmp_path / "a.npy", array)
    assert same(hn.read(tmp_path / "a.npy", dtype=array.dtype.str), array)


@settings(deadline=None, max_examples=40)
@given(
    file_offset=st.integers(0, 5 * PAGE),
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from(["u1", "<i2", ">f4", "<c16", "F8_E4M3", "BF16"]),
    give=st.sampled_from(["shape", "nbytes"]),
)
def test_raw_bytes_equal_what_numpy_makes_of_them(
    raw: tuple[Path, bytes], file_offset: int, shape: list[int], dtype: str, give: str
) -> None:
    path, content = raw
    known = np.dtype(BY_ML_DTYPES.get(dtype, dtype))
    count = int(np.prod(shape))
    expected = np.frombuffer(content, known, count, file_offset) if count else np.empty(0, known)
    if give == "shape":
        read = hn.read(path, dtype=dtype, shape=shape, file_offset=file_offset)
        assert same(read, expected.reshape(shape))
    else:
        nbytes = count * known.itemsize
        read = hn.read(path, dtype=dtype, nbytes=nbytes, file_offset=file_offset)
        assert same(read, expected)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("raw") / "noise.bin"
    return path, write_random(path, 10 * PAGE)


def test_raw_bytes_without_a_type_are_uint8_to_the_end(raw: tuple[Path, bytes]) -> None:
    path, content = raw
    assert same(hn.read(path), np.frombuffer(content, np.uint8))
    assert same(hn.read(str(path), file_offset=77), np.frombuffer(content[77:], np.uint8))
    assert hn.read(path, file_offset=len(content)).shape == (0,)


def test_raw_bytes_need_no_alignment_on_the_direct_route(raw: tuple[Path, bytes]) -> None:
    path, content = raw
    folder_with_direct(path.parent)
    read = hn.read(path, file_offset=4095, nbytes=4098, route="direct")
    assert read.tobytes() == content[4095 : 4095 + 4098]


def test_numbers_of_numpy_are_numbers(raw: tuple[Path, bytes]) -> None:
    path, content = raw
    read = hn.read(path, shape=np.array([2, 3]), file_offset=np.int64(5))  # type: ignore[arg-type]
    assert read.tobytes() == content[5:11]


def test_read_memory_is_its_own(raw: tuple[Path, bytes]) -> None:
    first, second = hn.read(raw[0]), hn.read(raw[0])
    first[:] = 0
    assert second.tobytes() == raw[1]
    assert first.base is None


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000])
def test_aligned_empty_is_aligned_whatever_its_length(nbytes: int) -> None:
    array = hn.aligned_empty(nbytes)
    assert (array.nbytes, array.ctypes.data % 4096) == (nbytes, 0)

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import headrace as hr
from headrace import framework
from headrace.formats.catalog import TensorSpec
from headrace.formats.dtypes import dtype_name, numpy_dtype
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.faulty_files import pages_where
from headrace.types import Device
from tests.library import Library
from tests.support import PAGE, folder_with_direct, write_random

MIB = 1 << 20


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(devices=2)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """A model of odd sizes: small, large, empty and single numbers."""
    noise = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (701, 503),
        "bias": (17,),
        "scale": (),
        "nothing": (0, 4),
        **{f"layer.{n}.weight": (300 + n, 77) for n in range(12)},
    }
    return {
        name: np.frombuffer(noise.bytes(int(np.prod(shape)) * 4), np.float32).reshape(shape)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray]) -> Path:
    path = folder_with_direct(tmp_path_factory.mktemp("framework")) / "model.safetensors"
    save_file(tensors, path)
    return path


@contextlib.contextmanager
def small_context(cuda: FakeCuda, **faults: Any) -> Iterator[hr.Context]:
    options = hr.Options(workers=3, block_nbytes=16 * PAGE, pinned_nbytes=8 * 16 * PAGE)
    with hr.Context(options, cuda=cuda, files=FaultyFiles(**faults)) as context:
        yield context
    assert cuda.errors == []


@pytest.mark.parametrize(
    ("route", "faults"),
    [
        ("auto", {}),
        ("auto", {"resident": pages_where(lambda page: page % 32 < 16)}),
        ("cached", {"short_reads": 5000}),
        ("direct", {}),
        ("direct", {"short_reads": 5000, "no_dioalign": True}),
    ],
    ids=str,
)
def test_every_tensor_arrives_whole_on_the_device(
    model: Path,
    tensors: dict[str, np.ndarray],
    cuda: FakeCuda,
    route: str,
    faults: dict[str, Any],
) -> None:
    with small_context(cuda, **faults) as context:
        loaded = framework.load(Library(cuda), model, device=1, route=route, context=context)
        assert set(loaded) == set(tensors)
        for name, array in loaded.items():
            assert array.tobytes() == tensors[name].tobytes()
            assert array.nbytes == 0 or cuda.pointer_device(array.pointer) == 1


def test_tensors_come_in_file_order_each_with_memory_of_its_own(
    model: Path, tensors: dict[str, np.ndarray], cuda: FakeCuda
) -> None:
    library = Library(cuda)
    with small_context(cuda) as context:
        loaded = framework.load(library, model, context=context)
    offsets = [spec.file_range.start for spec in library.made]
    assert offsets == sorted(offsets)
    assert list(loaded) == [spec.name for spec in library.made]
    pointers = [array.pointer for array in loaded.values() if array.nbytes]
    assert len(set(pointers)) == len(pointers) == len(tensors) - 1


def test_load_waits_for_work_that_the_framework_has_queued(model: Path, cuda: FakeCuda) -> None:
    stream = cuda.create_stream()
    library, order = Library(cuda, stream), []
    cuda.enqueue_on(stream, lambda: order.append(cuda.copies))
    with small_context(cuda) as context:
        framework.load(library, model, context=context)
    assert order == [0]
    cuda.destroy_stream(stream)


def test_arrays_are_made_and_filled_in_the_order_of_the_given_stream(
    model: Path, tmp_path: Path, cuda: FakeCuda
) -> None:
    write_random(tmp_path / "file.bin", 10 * PAGE)
    cuda.set_device(1)
    current, given = cuda.create_stream(), cuda.create_stream()
    order: list[int] = []
    with small_context(cuda) as context:
        options: Any = {"device": 1, "stream": given, "context": context}
        for call in (
            lambda library: framework.load(library, model, **options),
            lambda library: framework.read(library, tmp_path / "file.bin", **options),
        ):
            cuda.enqueue_on(current, lambda: order.append(-1))
            cuda.enqueue_on(given, lambda: order.append(cuda.copies))
            library, before = Library(cuda, current), cuda.copies
            call(library)
            assert order == [before] != [cuda.copies]
            assert library.entered == [(given, Device("cuda", 1))]
            order.clear()


def test_stream_of_another_device_is_a_value_error_before_anything_is_allocated(
    model: Path, cuda: FakeCuda
) -> None:
    library, stream = Library(cuda), cuda.create_stream()
    with small_context(cuda) as context:
        with pytest.raises(ValueError, match=r"belongs to cuda:0, but the memory is on cuda:1"):
            framework.load(library, model, device=1, stream=stream, context=context)
        with pytest.raises(TypeError, match=r"pass a torch\.cuda\.Stream"):
            framework.load(library, model, device=1, stream=1.5, context=context)
        assert library.made == []
        for default in (0, 1, 2):
            framework.load(library, model, device=1, stream=default, context=context)


def test_wanted_tensors_alone_are_allocated(
    model: Path, tensors: dict[str, np.ndarray], cuda: FakeCuda
) -> None:
    library = Library(cuda)
    with small_context(cuda) as context:
        loaded = framework.load(library, model, names=["bias", "nothing"], context=context)
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        "bias": tensors["bias"].tobytes(),
        "nothing": b"",
    }
    assert len(library.made) == 2


def test_missing_tensor_is_a_key_error_before_anything_is_allocated(
    model: Path, cuda: FakeCuda
) -> None:
    library = Library(cuda)
    with small_context(cuda) as context, pytest.raises(KeyError, match="no tensor named absent"):
        framework.load(library, model, names=["bias", "absent"], context=context)
    assert library.made == []


def test_names_as_one_string_are_a_type_error(model: Path, cuda: FakeCuda) -> None:
    with pytest.raises(TypeError, match="names is 'bias'; pass a list"):
        framework.load(Library(cuda), model, names="bias")


def test_allocation_that_fails_reads_nothing_and_the_next_load_works(
    model: Path, tensors: dict[str, np.ndarray], cuda: FakeCuda
) -> None:
    library = Library(cuda)
    library.fails_at = 3
    with small_context(cuda) as context:
        with pytest.raises(MemoryError, match="no room"):
            framework.load(library, model, context=context)
        assert cuda.copies == 0
        library.fails_at = -1
        assert set(framework.load(library, model, context=context)) == set(tensors)


def test_malformed_file_is_a_format_error_before_anything_is_allocated(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    path, library = tmp_path / "broken.safetensors", Library(cuda)
    path.write_bytes(b"\xff" * 100)
    with (
        small_context(cuda) as context,
        pytest.raises(hr.FormatError, match=r"broken\.safetensors"),
    ):
        framework.load(library, path, context=context)
    assert (library.made, cuda.pinned_nbytes) == ([], 0)


@pytest.mark.parametrize("change", ["truncate_after", "rewrite_after", "replace_after"])
def test_file_that_changes_during_the_load_is_told(
    tmp_path: Path, tensors: dict[str, np.ndarray], cuda: FakeCuda, change: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    with (
        small_context(cuda, **{change: 100_000}) as context,
        pytest.raises(hr.SourceChanged, match=r"model\.safetensors"),
    ):
        framework.load(Library(cuda), path, context=context)
    assert cuda.pending_copies == 0


def test_progress_bar_leaves_no_line_behind(
    model: Path, tensors: dict[str, np.ndarray], cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_context(cuda) as context:
        loaded = framework.load(Library(cuda), model, progress=True, context=context)
    assert set(loaded) == set(tensors)
    assert "".join(capsys.readouterr()).strip() == ""


def test_quiet_load_prints_nothing(
    model: Path, cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_context(cuda) as context:
        framework.load(Library(cuda), model, context=context)
    assert tuple(capsys.readouterr()) == ("", "")


# read


def test_raw_bytes_are_read_at_any_offset(tmp_path: Path, cuda: FakeCuda) -> None:
    content = write_random(tmp_path / "file.bin", 10 * PAGE)
    with small_context(cuda) as context:
        for arguments, part in (
            ({}, content),
            ({"file_offset": 5}, content[5:]),
            ({"nbytes": 100}, content[:100]),
            ({"dtype": "<f4", "shape": (3, 7), "file_offset": 11}, content[11 : 11 + 84]),
            ({"dtype": np.int16, "file_offset": 2, "nbytes": 50}, content[2:52]),
            ({"shape": (0, 9)}, b""),
        ):
            array = framework.read(
                Library(cuda), tmp_path / "file.bin", context=context, **arguments
            )
            assert array.tobytes() == part


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("F32", "F32"),
        ("BF16", "BF16"),
        ("U8", "U8"),
        (np.float32, "F32"),
        (float, "F64"),
        (bool, "BOOL"),
        ("float32", "F32"),
        ("f4", "F32"),
        ("=f4", "F32"),
        (">f4", ">f4"),
        (np.dtype(">i2"), ">i2"),
        ("complex64", "C64"),
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        ([("a", "<f4"), ("b", "<i2")], "[('a', '<f4'), ('b', '<i2')]"),
        ("<f4", "F32"),
        ("|u1", "U8"),
    ],
    ids=str,
)
def test_type_has_one_name_however_it_is_given(dtype: Any, name: str) -> None:
    assert framework.numpy_dtype_name(dtype) == name


def test_every_numpy_type_keeps_its_name_both_ways() -> None:
    for code in "?bBhHiIlLqQefdgFD":
        dtype = np.dtype(code)
        assert numpy_dtype(framework.numpy_dtype_name(dtype)) == dtype
        assert framework.numpy_dtype_name(dtype_name(dtype)) == dtype_name(dtype)


def test_type_that_does_not_exist_is_an_error_of_numpy() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        framework.numpy_dtype_name("nonsense")


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": np.float64}, {"shape": (4, 3)}, {"dtype": "I32", "shape": (3, 4)}, {"shape": (12,)}],
    ids=str,
)
def test_npy_that_is_not_what_was_expected_is_a_format_error_with_both(
    tmp_path: Path, cuda: FakeCuda, arguments: dict[str, Any]
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4), np.float32))
    library = Library(cuda)
    with small_context(cuda) as context, pytest.raises(hr.FormatError) as caught:
        framework.read(library, tmp_path / "a.npy", context=context, **arguments)
    assert "the file holds F32 (3, 4), but " in str(caught.value)
    assert library.made == []


def test_npy_that_is_what_was_expected_is_read(tmp_path: Path, cuda: FakeCuda) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "a.npy", array)
    with small_context(cuda) as context:
        for arguments in ({}, {"dtype": np.float32}, {"shape": [3, 4]}, {"dtype": "F32"}):
            read = framework.read(Library(cuda), tmp_path / "a.npy", context=context, **arguments)
            assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"file_offset": -1}, ValueError),
        ({"nbytes": -1}, ValueError),
        ({"dtype": "F32", "nbytes": 7}, ValueError),
        ({"dtype": "F32", "shape": (2,), "nbytes": 7}, ValueError),
        ({"shape": (-1, 4)}, ValueError),
        ({"shape": (1 << 40,)}, hr.ShortRead),
        ({"shape": (1 << 62, 1 << 62)}, ValueError),
        ({"file_offset": 101}, hr.ShortRead),
        ({"nbytes": 101}, hr.ShortRead),
        ({"dtype": object}, hr.FormatError),
        ({"dtype": "U8", "route": "nowhere"}, ValueError),
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_are_told_before_anything_is_allocated(
    tmp_path: Path, cuda: FakeCuda, arguments: dict[str, Any], error: type[Exception]
) -> None:
    write_random(tmp_path / "file.bin", 100)
    library = Library(cuda)
    with small_context(cuda) as context, pytest.raises(error):
        framework.read(library, tmp_path / "file.bin", context=context, **arguments)
    assert library.made == []


def test_failed_load_frees_what_it_allocated(model: Path, cuda: FakeCuda) -> None:
    class Counted(FakeDeviceArray):
        alive = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            Counted.alive += 1

        def __del__(self) -> None:
            Counted.alive -= 1

    class Counting(Library):
        def empty(self, spec: TensorSpec, device: Device) -> FakeDeviceArray:
            return Counted(self.cuda, spec.file_range.nbytes, device.index)

    gc.disable()
    try:
        with small_context(cuda, eio_at=100_000) as context:
            with contextlib.suppress(OSError):
                framework.load(Counting(cuda), model, context=context)
            alive = Counted.alive
    finally:
        gc.enable()
    assert alive == 0

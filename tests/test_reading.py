from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headrace as hr
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from tests.support import PAGE, no_workers_left, write_random


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("reading") / "sample.bin"
    return path, write_random(path, 3 * PAGE + 11)


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda nbytes: np.zeros(nbytes, np.uint8),
        lambda nbytes: np.zeros(nbytes // 8, "<f8"),
        lambda nbytes: mmap.mmap(-1, nbytes),
        lambda nbytes: memoryview(bytearray(nbytes + 10))[7:-3],
        lambda nbytes: pytest.importorskip("torch").zeros(nbytes, dtype=int),
        lambda nbytes: pytest.importorskip("torch").zeros(
            nbytes // 2, dtype=pytest.importorskip("torch").bfloat16
        ),
    ],
    ids=["bytearray", "uint8", "float64", "mmap", "memoryview", "torch int64", "torch bfloat16"],
)
@pytest.mark.parametrize("file_offset", [0, 5, PAGE])
def test_memory_of_any_kind_is_filled_from_the_offset(
    sample: tuple[Path, bytes], make: Callable[[int], Any], file_offset: int
) -> None:
    path, content = sample
    buffer = make(1024)
    report = hr.read_into(buffer, path, file_offset=file_offset)
    raw = buffer if isinstance(buffer, (bytearray, mmap.mmap, memoryview)) else None
    got = bytes(raw) if raw is not None else bytes(memoryview_of(buffer))
    assert got == content[file_offset : file_offset + len(got)]
    assert report.nbytes == len(got)
    assert (report.source, report.device) == (str(path), "cpu")


def memoryview_of(made: Any) -> memoryview:
    """Bytes of a NumPy array or a torch tensor."""
    if not isinstance(made, np.ndarray):
        import torch

        made = made.view(torch.uint8).numpy()
    return memoryview(made).cast("B")


def test_device_memory_is_filled_and_told_by_the_report(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    cuda = FakeCuda(devices=2)
    array = FakeDeviceArray(cuda, 2 * PAGE, device=1)
    with hr.Context(cuda=cuda) as context:
        report = hr.read_into(array, path, file_offset=3, context=context)
    assert array.tobytes() == content[3 : 3 + 2 * PAGE]
    assert report.device == "cuda:1"
    assert 0 < report.pinned_nbytes <= context.options.pinned_nbytes
    assert cuda.errors == []


@pytest.mark.parametrize("argument", ["file_offset", "nbytes", "both"])
def test_numbers_out_of_a_numpy_array_are_numbers(
    sample: tuple[Path, bytes], argument: str
) -> None:
    path, content = sample
    buffer = bytearray(100)
    index = np.array([40, 60])
    arguments: dict[str, Any] = {"file_offset": index[0], "nbytes": index[1]}
    if argument != "both":
        arguments = {"file_offset": 40, "nbytes": 60} | {argument: arguments[argument]}
    report = hr.read_into(buffer, path, **arguments)
    assert buffer == content[40:100] + bytes(40)
    assert json.loads(json.dumps(report.to_dict()))["nbytes"] == 60


def test_part_of_the_buffer_is_filled_and_the_rest_left_alone(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    buffer = bytearray(b"\xa5" * 100)
    assert hr.read_into(buffer, path, file_offset=7, nbytes=30).nbytes == 30
    assert buffer == content[7:37] + b"\xa5" * 70


def test_nothing_wanted_moves_nothing_and_has_a_report(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    buffer = bytearray(b"\xa5" * 10)
    for file_offset in (0, 17, len(content)):
        report = hr.read_into(buffer, path, file_offset=file_offset, nbytes=0)
        assert (report.nbytes, report.observed, report.planned) == (0, (), ())
        assert "nothing to move" in str(report)
    assert buffer == b"\xa5" * 10


def test_buffer_is_free_again_after_the_read(sample: tuple[Path, bytes]) -> None:
    buffer = bytearray(100)
    hr.read_into(buffer, sample[0])
    buffer.append(1)
    mapping = mmap.mmap(-1, PAGE)
    hr.read_into(mapping, sample[0])
    mapping.close()


def test_buffer_is_free_again_after_a_failed_read(sample: tuple[Path, bytes]) -> None:
    buffer = bytearray(100)
    gc.disable()
    try:
        with contextlib.suppress(OSError), hr.Context(files=FaultyFiles(eio_at=5)) as context:
            hr.read_into(buffer, sample[0], context=context)
        buffer.append(1)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({"nbytes": 101}, hr.BufferMismatch, "101 bytes were asked for, but bytearray holds 100"),
        ({"nbytes": 1 << 70}, hr.BufferMismatch, "pass a larger buffer or a smaller nbytes"),
        ({"nbytes": -1}, ValueError, "nbytes is -1"),
        ({"file_offset": -1}, ValueError, "file_offset is -1"),
        ({"file_offset": 1 << 40}, hr.ShortRead, "ask for less"),
        ({"route": "teleport"}, ValueError, "'teleport' does not exist; choose one of auto, host"),
        ({"route": ""}, ValueError, "does not exist"),
        ({"route": None}, ValueError, "does not exist"),
        ({"route": "HOST"}, ValueError, "does not exist"),
        ({"route": "cached"}, hr.RouteUnavailable, "destination is host memory"),
        ({"route": "mapped"}, hr.RouteUnavailable, "mapped"),
        ({"route": "gds"}, hr.RouteUnavailable, "gds"),
    ],
    ids=str,
)
def test_wrong_argument_says_so_and_nothing_is_written(
    sample: tuple[Path, bytes], arguments: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    buffer = bytearray(b"\xa5" * 100)
    with pytest.raises(error) as caught:
        hr.read_into(buffer, sample[0], **arguments)
    assert complaint in str(caught.value)
    assert buffer == b"\xa5" * 100


def test_wrong_buffer_is_a_mismatch_before_the_file_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(hr.BufferMismatch):
        hr.read_into(b"read-only", tmp_path / "missing")


def test_routes_of_the_same_bytes_agree(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    for route in ("auto", "host", "direct"):
        buffer = bytearray(2 * PAGE)
        try:
            report = hr.read_into(buffer, path, file_offset=9, route=route)
        except hr.RouteUnavailable as error:
            if "O_DIRECT" not in str(error):
                raise
            continue
        assert buffer == content[9 : 9 + 2 * PAGE]
        assert route in ("auto", str(report.observed[0].route))


def test_missing_file_directory_and_pipe_are_errors_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hr.read_into(bytearray(3), tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        hr.read_into(bytearray(3), tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        hr.read_into(bytearray(3), tmp_path / "pipe")
    assert no_workers_left()


def test_file_without_a_name_is_read_through_its_descriptor(sample: tuple[Path, bytes]) -> None:
    path, content = sample
    with path.open("rb") as file:
        buffer = bytearray(50)
        hr.read_into(buffer, f"/proc/self/fd/{file.fileno()}", file_offset=1)
    assert buffer == content[1:51]


# explain


@pytest.mark.parametrize("device", ["cpu", "host"])
def test_explain_takes_the_host_by_name(sample: tuple[Path, bytes], device: str) -> None:
    made = hr.explain(sample[0], raw=True, device=device)
    assert made.device == "cpu"
    assert [str(each.route) for each in made.planned] == ["host"]


@pytest.mark.parametrize(
    ("device", "name"), [(None, "cuda:0"), (1, "cuda:1"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_explain_takes_a_gpu_by_name_or_number_or_because_it_is_there(
    sample: tuple[Path, bytes], device: Any, name: str
) -> None:
    with hr.Context(cuda=FakeCuda(devices=2)) as context:
        assert hr.explain(sample[0], raw=True, device=device, context=context).device == name


def test_explain_without_a_gpu_takes_the_host(sample: tuple[Path, bytes]) -> None:
    with hr.Context(cuda=FakeCuda(devices=0)) as context:
        assert hr.explain(sample[0], raw=True, context=context).device == "cpu"


def test_explain_for_a_gpu_that_is_not_there_is_unavailable_with_what_to_do(
    sample: tuple[Path, bytes],
) -> None:
    with (
        hr.Context(cuda=FakeCuda(devices=0)) as context,
        pytest.raises(hr.RouteUnavailable, match="CUDA_VISIBLE_DEVICES"),
    ):
        hr.explain(sample[0], raw=True, device="cuda", context=context)


@pytest.mark.parametrize("device", [7, "cuda:7"])
def test_explain_for_an_ordinal_that_is_not_there_fails_as_the_load_would(
    sample: tuple[Path, bytes], device: Any
) -> None:
    with (
        hr.Context(cuda=FakeCuda(devices=1)) as context,
        pytest.raises((hr.RouteUnavailable, hr.DeviceError)),
    ):
        hr.explain(sample[0], raw=True, device=device, context=context)


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x", -1, 1.5])
def test_explain_for_what_names_no_device_is_a_value_error(
    sample: tuple[Path, bytes], device: Any
) -> None:
    with hr.Context(cuda=FakeCuda()) as context, pytest.raises(ValueError, match="device"):
        hr.explain(sample[0], raw=True, device=device, context=context)


def test_explain_takes_a_torch_device(sample: tuple[Path, bytes]) -> None:
    torch = pytest.importorskip("torch")
    with hr.Context(cuda=FakeCuda(devices=2)) as context:
        for device in ("cpu", "cuda:1"):
            made = hr.explain(sample[0], raw=True, device=torch.device(device), context=context)
            assert made.device == device


def test_explain_of_a_forced_route_that_cannot_serve_raises_as_the_load_would(
    sample: tuple[Path, bytes],
) -> None:
    with pytest.raises(hr.RouteUnavailable, match="route 'gds' cannot serve"):
        hr.explain(sample[0], raw=True, device="cpu", route="gds")
    with pytest.raises(ValueError, match="does not exist"):
        hr.explain(sample[0], raw=True, device="cpu", route="teleport")


# The package itself.


def test_public_names_are_there_and_others_are_not() -> None:
    for name in hr.__all__:
        assert getattr(hr, name) is not None
    assert dir(hr) == sorted(hr.__all__)
    assert not hasattr(hr, "nonsense")
    with pytest.raises(AttributeError, match="module 'headrace' has no attribute 'nonsense'"):
        hr.nonsense  # noqa: B018


def test_explain_of_some_names_is_the_plan_of_their_load(tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    save_file({"a": np.zeros(4, np.float32), "b": np.ones(9, np.float32)}, path)
    told = hr.explain(path, device="cpu", names=["b"])
    assert [tensor["name"] for tensor in told.tensors] == ["b"]
    assert sum(each.nbytes for each in told.planned) == 36
    with pytest.raises(KeyError, match="z"):
        hr.explain(path, device="cpu", names=["z"])
    with pytest.raises(ValueError, match="safetensors sources only"):
        hr.explain(path, device="cpu", names=["a"], raw=True)


def test_stream_without_cuda_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    if importlib.util.find_spec("cuda") is not None:
        pytest.skip("cuda.bindings is installed")
    for call in (hr.read_into, hr.write_from):
        with pytest.raises(ValueError, match=r"no CUDA bindings to follow it .*leave stream out"):
            call(bytearray(5), path, stream=5)
    assert path.read_bytes() == b"12345"

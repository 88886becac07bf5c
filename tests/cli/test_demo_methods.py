from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.cli.demo_methods import HostMemory, Method, TorchMemory, find_memory, find_methods
from headrace.cli.demo_model import SMALLEST_NBYTES, Model, make_model
from headrace.cli.target import Target

HOST = Target("cpu", "numpy", "")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(SMALLEST_NBYTES, tmp_path)


@pytest.fixture
def methods(model: Model) -> tuple[Method, ...]:
    return find_methods(model, HOST, headrace.Context(), find_memory(HOST))


def test_the_host_has_its_routes_and_two_of_todays_ways(methods: tuple[Method, ...]) -> None:
    assert [method.name for method in methods] == [
        "headrace auto", "headrace host", "headrace direct", "safetensors load_file",
        "np.fromfile",
    ]  # fmt: skip


def test_every_method_gives_the_reference(methods: tuple[Method, ...]) -> None:
    for method in methods:
        try:
            assert method.matches(method.load()), method.name
        except headrace.RouteUnavailable:
            assert method.route == "direct"


def test_one_wrong_byte_is_found_in_every_method(methods: tuple[Method, ...]) -> None:
    tensors = dict(methods[0].load())
    wrong = tensors["model.layers.3.mlp.up_proj.weight"].copy()
    wrong.view(np.uint8)[-1, -1] ^= 1
    assert not methods[0].matches({**tensors, "model.layers.3.mlp.up_proj.weight": wrong})
    whole = methods[-1].load()
    whole[-1] ^= 1
    assert not methods[-1].matches(whole)


def test_a_missing_or_an_extra_tensor_is_found(methods: tuple[Method, ...]) -> None:
    tensors = dict(methods[0].load())
    assert not methods[0].matches({**tensors, "extra": np.zeros(1)})
    tensors.popitem()
    assert not methods[0].matches(tensors)


def test_torch_tensors_give_their_bytes() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    expected = tensor.view(torch.int16).numpy().tobytes()
    assert TorchMemory("cuda").download(tensor).tobytes() == expected


def test_host_arrays_give_their_bytes() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert HostMemory().download(array).tobytes() == array.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_every_method_gives_the_reference_on_a_gpu(framework: str, model: Model) -> None:
    pytest.importorskip(framework)
    target = Target("cuda:0", framework, "")
    with headrace.Context() as context:
        served = []
        for method in find_methods(model, target, context, find_memory(target)):
            try:
                assert method.matches(method.load()), method.name
            except headrace.RouteUnavailable:
                continue
            served.append(method.route)
    assert {"auto", "cached", ""} <= set(served)

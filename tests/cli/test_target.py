from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.cli.target import Target, choose_target, gpu_obstacle
from headrace.errors import DeviceError
from headrace.probing.fact import Fact

ONE_GPU = Fact("CUDA device", True, "1 device", "cudaGetDeviceCount")
NO_GPU = Fact("CUDA device", False, "no CUDA bindings", "import failed", "install cuda-bindings")


def obstacles(**why: str) -> Callable[[str], str]:
    return lambda framework: why.get(framework, "")


def choose(
    device: str | None, framework: str | None, gpu: Fact = ONE_GPU, **why: str
) -> tuple[str, str]:
    target = choose_target(device, framework, gpu, obstacles(**why))
    return target.device, target.framework


def test_a_usable_gpu_is_the_default_with_torch_before_cupy() -> None:
    assert choose(None, None) == ("cuda", "torch")
    assert choose(None, None, torch="torch is not installed") == ("cuda", "cupy")


def test_without_a_gpu_the_default_is_the_host_with_numpy() -> None:
    assert choose(None, None, NO_GPU) == ("cpu", "numpy")


def test_without_a_framework_that_reaches_the_gpu_the_default_is_the_host() -> None:
    target = choose_target(None, None, ONE_GPU, lambda name: f"{name} is not installed")
    assert target.is_host
    assert target.why == "torch is not installed; cupy is not installed"


def test_the_reason_for_the_host_has_the_remedy() -> None:
    target = choose_target(None, None, NO_GPU, obstacles())
    assert target == Target("cpu", "numpy", "import failed (install cuda-bindings)")


def test_what_is_asked_for_is_taken() -> None:
    assert choose("cuda:1", "cupy") == ("cuda:1", "cupy")
    assert choose("cuda:1", None) == ("cuda:1", "torch")
    assert choose("cpu", "torch") == ("cpu", "torch")
    assert choose("cpu", None) == ("cpu", "numpy")
    assert choose(None, "numpy") == ("cpu", "numpy")


def test_torch_without_a_gpu_loads_to_the_host() -> None:
    assert choose(None, "torch", NO_GPU) == ("cpu", "torch")
    assert choose(None, "torch", torch="torch 2 sees no CUDA device") == ("cpu", "torch")


def test_a_gpu_that_is_asked_for_and_missing_is_an_error_with_its_remedy() -> None:
    with pytest.raises(DeviceError, match=r"cuda: no GPU .* import failed \(install cuda-bind"):
        choose("cuda", None, NO_GPU)
    with pytest.raises(DeviceError, match="cupy: no GPU can be used"):
        choose(None, "cupy", NO_GPU)


def test_a_gpu_that_no_framework_reaches_is_an_error_with_every_reason() -> None:
    with pytest.raises(DeviceError, match="torch is a CPU build; cupy is not installed"):
        choose("cuda", None, torch="torch is a CPU build", cupy="cupy is not installed")


def test_a_framework_that_cannot_hold_the_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="numpy cannot hold arrays on cuda:0"):
        choose("cuda:0", "numpy")
    with pytest.raises(ValueError, match="cupy holds arrays on a GPU only"):
        choose("cpu", "cupy")


def test_a_framework_that_is_not_installed_is_an_obstacle() -> None:
    assert gpu_obstacle("no_such_framework") == "no_such_framework is not installed"

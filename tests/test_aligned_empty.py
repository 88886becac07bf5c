from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
import headrace.numpy


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 1 << 20])
def test_numpy_bytes_start_at_a_page_and_can_be_written(nbytes: int) -> None:
    made = headrace.numpy.aligned_empty(nbytes)
    assert made.dtype == np.uint8
    assert made.shape == (nbytes,)
    assert made.__array_interface__["data"][0] % 4096 == 0 or not nbytes
    made[:] = 7


def test_torch_bytes_start_at_a_page() -> None:
    pytest.importorskip("torch")
    import headrace.torch

    made = headrace.torch.aligned_empty(10_000, "cpu")
    assert (made.data_ptr() % 4096, made.numel()) == (0, 10_000)


@pytest.mark.parametrize("nbytes", [-1, 1.5, None])
def test_length_that_is_no_natural_number_is_refused(nbytes: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        headrace.numpy.aligned_empty(nbytes)


def test_direct_read_into_aligned_memory_bounces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(1).bytes(3 << 20))
    if not hr.explain(path, device="cpu", raw=True).planned:
        pytest.skip("nothing to read")
    try:
        report = hr.read_into(headrace.numpy.aligned_empty(3 << 20), path, route="direct")
    except hr.RouteUnavailable:
        pytest.skip("no O_DIRECT here")
    (observed,) = report.observed
    assert (observed.unaligned_nbytes, observed.bounce) == (0, "")
    odd = headrace.numpy.aligned_empty((3 << 20) + 1)[1:]
    (observed,) = hr.read_into(odd, path, route="direct").observed
    assert observed.unaligned_nbytes == 3 << 20
    assert observed.bounce

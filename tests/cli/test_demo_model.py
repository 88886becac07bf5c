from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file

from headrace.cli.demo_model import SMALLEST_NBYTES, make_model, model_layout


@pytest.mark.parametrize("nbytes", [SMALLEST_NBYTES, 8 << 20, 10_000_001, 256 << 20, 20 << 30])
def test_the_layout_fills_the_size_with_at_least_four_layers(nbytes: int) -> None:
    layout = list(model_layout(nbytes))
    total = sum(int(np.prod(shape)) * dtype.itemsize for _, dtype, shape in layout)
    width = layout[0][2][0]
    assert nbytes - 2 * width < total <= nbytes
    assert sum(name.endswith("q_proj.weight") for name, _, _ in layout) >= 4
    assert len({name for name, _, _ in layout}) == len(layout)
    assert {dtype for _, dtype, _ in layout} == {np.dtype(bfloat16), np.dtype(np.float32)}


def test_the_file_holds_the_reference(tmp_path: Path) -> None:
    model = make_model(SMALLEST_NBYTES, tmp_path)
    loaded = load_file(model.path)
    assert loaded.keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].tobytes() == tensor.tobytes()
    assert 0 <= os.path.getsize(model.path) - model.nbytes < 1 << 20


def test_the_bytes_do_not_compress(tmp_path: Path) -> None:
    tensors = make_model(SMALLEST_NBYTES, tmp_path).tensors.values()
    payload = np.concatenate([tensor.reshape(-1).view(np.uint8) for tensor in tensors])
    counts = np.bincount(payload, minlength=256)
    assert counts.min() > 0.8 * payload.size / 256


def test_a_folder_that_is_gone_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="could not be written"):
        make_model(SMALLEST_NBYTES, tmp_path / "gone")

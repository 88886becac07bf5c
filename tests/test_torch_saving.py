"""torch tensors become the files that the official writer makes of them, or are refused alike."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import headrace as hr
from headrace.saving import Manner, write_file
from tests.support import TIMEOUT_S, HeldFiles

torch = pytest.importorskip("torch")
official = pytest.importorskip("safetensors.torch")

import headrace.torch as ht  # (needs torch, which the lines above make sure of)

TYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter("__metadata__".__ne__)
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)


def noise(dtype: str, shape: tuple[int, ...]) -> Any:
    """Bytes that are 0 or 1, so that they mean something in every type."""
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    content = np.random.default_rng(made.nbytes).integers(0, 2, made.nbytes, np.uint8)
    if made.nbytes:
        made = torch.from_numpy(content).view(made.dtype).reshape(shape).clone()
    return made


def float4(shape: tuple[int, ...]) -> Any:
    return noise("uint8", shape).view(torch.float4_e2m1fn_x2)


TENSORS = st.builds(noise, st.sampled_from(TYPES), SHAPES) | st.builds(
    float4, SHAPES.filter(lambda shape: shape != ())
)


@settings(deadline=None, max_examples=80)
@given(
    tensors=st.dictionaries(NAMES, TENSORS, min_size=1, max_size=5),
    metadata=st.none() | st.dictionaries(NAMES, NAMES, max_size=1),
    positional=st.booleans(),
)
def test_file_is_the_official_one_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, Any],
    metadata: dict[str, str] | None,
    positional: bool,
) -> None:
    folder = tmp_path_factory.mktemp("torch")
    if positional:
        ht.save_file(tensors, folder / "ours", metadata)
    else:
        ht.save_file(tensors, str(folder / "ours"), metadata=metadata)
    official.save_file(tensors, folder / "official", metadata)
    assert (folder / "ours").read_bytes() == (folder / "official").read_bytes()


@settings(deadline=None, max_examples=150)
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=5
    )
)
def test_tensors_that_share_memory_are_refused_where_the_official_writer_refuses_them(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, int, int]]
) -> None:
    storages = (torch.arange(18.0), torch.arange(18, dtype=torch.int16))
    tensors = {
        f"{number}": storages[which][start : start + length]
        for number, (which, start, length) in enumerate(parts)
    }
    folder = tmp_path_factory.mktemp("torch")
    try:
        official.save_file(tensors, folder / "official")
    except RuntimeError:
        with pytest.raises(RuntimeError, match="share memory"):
            ht.save_file(tensors, folder / "ours")
        assert os.listdir(folder) == []
        return
    ht.save_file(tensors, folder / "ours")
    assert (folder / "ours").read_bytes() == (folder / "official").read_bytes()


def test_error_of_shared_memory_names_the_groups(tmp_path: Path) -> None:
    first, second = torch.zeros(9), torch.zeros(4, 4)
    tensors = {
        "a": first,
        "alone": torch.zeros(9),
        "b": first[2:5],
        "square": second,
        "turned": second.t(),
        "after": first[5:],
    }
    with pytest.raises(RuntimeError) as caught:
        ht.save_file(tensors, tmp_path / "a")
    assert "[['a', 'b', 'after'], ['square', 'turned']]" in str(caught.value)
    assert "save one of each group and tie the others" in str(caught.value)


def test_gradients_and_parameters_are_saved_as_plain_tensors(tmp_path: Path) -> None:
    tensors = {
        "leaf": torch.arange(5.0).requires_grad_(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "result": torch.arange(5.0).requires_grad_() * 2,
    }
    ht.save_file(tensors, tmp_path / "ours")
    official.save_file(tensors, tmp_path / "official")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "official").read_bytes()
    assert tensors["leaf"].requires_grad


def test_state_dict_of_a_module_is_saved(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    assert isinstance(module.state_dict(), collections.OrderedDict)
    ht.save_file(module.state_dict(), tmp_path / "ours")
    official.save_file(module.state_dict(), tmp_path / "official")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "official").read_bytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag.contiguous(),
        torch._neg_view(torch.tensor([1.0, -2.0])),
    ],
    ids=["conjugate", "imaginary", "negative"],
)
def test_lazy_views_are_saved_with_the_values_that_they_show(tmp_path: Path, tensor: Any) -> None:
    ht.save_file({"a": tensor}, tmp_path / "a")
    assert torch.equal(ht.load_file(tmp_path / "a")["a"], tensor)
    ht.write(tensor, tmp_path / "raw")
    assert torch.equal(ht.read(tmp_path / "raw", dtype=tensor.dtype), tensor)


def test_what_was_taken_stays_when_the_caller_swaps_the_memory(tmp_path: Path) -> None:
    from headrace.torch.library import Torch

    tensor = torch.full((1000,), 7.0)
    taken = Torch().take({"a": tensor}, lambda device: None)
    tensor.data = torch.zeros(1000)
    with hr.Context() as context:
        write_file(taken, tmp_path / "a", None, Manner(), progress=False, context=context)
    assert torch.equal(ht.load_file(tmp_path / "a")["a"], torch.full((1000,), 7.0))


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([torch.zeros(2)], ValueError, "tensors is list; pass a dict of names to torch.Tensor"),
        ({"a": np.zeros(2)}, ValueError, r"tensor 'a' is numpy\.ndarray; pass torch\.Tensor"),
        ({"a": None}, ValueError, "tensor 'a' is builtins.NoneType"),
        ({"a": torch.eye(2).to_sparse()}, hr.BufferMismatch, r"\['a'\] are sparse.*to_dense"),
        ({"a": torch.zeros(2, 3).t()}, hr.BufferMismatch, r"'a' is not contiguous.*contiguous\(\)"),
        ({"a": torch.zeros(1).expand(3)}, hr.BufferMismatch, "'a' is not contiguous"),
        (
            {"a": torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last)},
            hr.BufferMismatch,
            "'a' is not contiguous",
        ),
        (
            {"a": torch.zeros(2, device="meta")},
            hr.BufferMismatch,
            r"\(Tensor on meta\) has no",
        ),
        ({"a": torch._efficientzerotensor(3)}, hr.BufferMismatch, "'a'.* has no memory of its own"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, hr.FormatError, "'a' is of .*complex128"),
        (
            {"a": torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
            hr.FormatError,
            r"'a' is a single.*reshape\(1\)",
        ),
        ({1: torch.zeros(2)}, TypeError, "the name of a tensor"),
        ({"__metadata__": torch.zeros(2)}, hr.FormatError, "__metadata__"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_what_to_do(
    tmp_path: Path, tensors: Any, error: type[Exception], message: str
) -> None:
    for save in (ht.save_file, ht.save):
        with pytest.raises(error, match=message):
            save(tensors, tmp_path / "a")
    assert os.listdir(tmp_path) == []


class Wrapper(torch.Tensor):  # type: ignore[misc, name-defined]
    """Stands for a tensor that is elsewhere, as DTensor does."""

    @staticmethod
    def __new__(cls, size: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, size)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def fake(size: tuple[int, ...]) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(size)


@pytest.mark.parametrize("make", [Wrapper, fake])
def test_tensor_that_stands_for_another_is_refused(tmp_path: Path, make: Any) -> None:
    tensors = {"a": make((3,)), "b": make((3,))}
    with pytest.raises(hr.BufferMismatch, match=r"'a'.* has no memory of its own.*to_local"):
        ht.save_file(tensors, tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3),
        torch.zeros(2, 3).t(),
        torch.eye(2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["numpy", "transposed", "sparse", "meta"],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, array: Any) -> None:
    with pytest.raises(hr.BufferMismatch, match="the array"):
        ht.write(array, tmp_path / "raw")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", [*TYPES, "complex128"])
def test_tensor_of_any_type_is_written_and_read_again(tmp_path: Path, name: str) -> None:
    tensor = noise(name, (5, 3))
    ht.write(tensor, tmp_path / "raw", file_offset=7)
    read = ht.read(tmp_path / "raw", dtype=tensor.dtype, shape=(5, 3), file_offset=7)
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_checkpoint_comes_back(tmp_path: Path) -> None:
    tensors = {f"layer.{n}": noise("bfloat16", (31 + n, 57)) for n in range(9)}
    report = ht.save(tensors, tmp_path / "model", {"format": "pt"}, max_shard_nbytes=9000)
    loaded = ht.load(tmp_path / "model")
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert report.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_streams_mean_nothing_to_tensors_in_host_memory(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(9.0)}
    ht.save_file(tensors, tmp_path / "a.safetensors", stream=12345)
    assert torch.equal(ht.load(tmp_path, device="cpu", stream=12345)["a"], tensors["a"])
    with pytest.raises(TypeError, match="pass a torch"):
        ht.load(tmp_path, device="cpu", stream="nonsense")


def test_tensors_may_be_changed_once_a_save_in_the_background_has_begun(
    tmp_path: Path,
) -> None:
    tensors = {
        "big": torch.arange(50_001, dtype=torch.bfloat16),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "one": torch.tensor(3.5),
        "none": torch.zeros(0, 3),
    }
    wanted = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    files = HeldFiles()
    with hr.Context(files=files) as context:
        future = ht.save_file_async(tensors, tmp_path / "a", stream=12345, context=context)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()
        files.let_go.set()
        future.result(TIMEOUT_S)
    found = official.load_file(tmp_path / "a")
    assert {name: torch.equal(found[name], wanted[name]) for name in wanted} == dict.fromkeys(
        wanted, True
    )


def test_shared_tensors_are_refused_before_a_save_in_the_background(tmp_path: Path) -> None:
    shared = torch.zeros(9)
    with pytest.raises(RuntimeError, match="share memory"):
        ht.save_file_async({"a": shared, "b": shared[2:]}, tmp_path / "a")
    assert os.listdir(tmp_path) == []

"""Saves in the background from a real GPU: snapshots, their order, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import safetensors.torch as safetensors_torch
import torch

import headrace as hr
import headrace.torch as ht
from tests.support import TIMEOUT_S

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE = 24 * MIB + 4099
BIG = 384 * MIB
DELAY = 200_000_000
"""Clock cycles of a GPU: a tenth of a second."""
BEFORE, AFTER = 7, 9
MOST_S = 0.2
"""Longest that a call may take whose snapshot is on the device."""

each_place = pytest.mark.parametrize("place", ["cuda:0", "cpu"])
each_checksum = pytest.mark.parametrize("checksum", [False, True])


@pytest.fixture(scope="module", autouse=True)
def loaded_kernels() -> None:
    """Load every kernel that the tests need, which waits for the GPU."""
    torch.cuda._sleep(1)
    torch.zeros(9, dtype=torch.uint8, device="cuda").fill_(1).clone()
    torch.cuda.synchronize()


@pytest.fixture
def context(place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[hr.Context]:
    """A context whose snapshots are in that place."""
    if place == "cpu":
        monkeypatch.setattr("headrace.snapshots._MOST_OF_FREE", 0.0)
    with hr.Context(hr.Options(pinned_nbytes=64 * MIB)) as made:
        yield made


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def fill_later(stream: torch.cuda.Stream, tensors: dict[str, torch.Tensor], value: int) -> None:
    """Queue a delay, and then work that overwrites tensors."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        for tensor in tensors.values():
            tensor.fill_(value)
    assert not stream.query()


def zeros(sizes: tuple[int, ...] = (SIZE, 5, 0, 4096, 70_001)) -> dict[str, torch.Tensor]:
    made = {
        f"t{number}": torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        for number, nbytes in enumerate(sizes)
    }
    torch.cuda.synchronize()
    return made


def check(path: Path, tensors: dict[str, torch.Tensor], value: int) -> None:
    found = safetensors_torch.load_file(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert bool((found[name] == value).all()), name


@each_place
@each_checksum
def test_file_has_what_is_queued_before_and_nothing_of_what_is_queued_after(
    tmp_path: Path, context: hr.Context, side: torch.cuda.Stream, place: str, checksum: bool
) -> None:
    tensors = zeros()
    warm = ht.save_file_async(tensors, tmp_path / "warm", stream=side, context=context)
    warm.result(TIMEOUT_S)  # what is loaded and allocated at first waits for the GPU
    fill_later(side, tensors, BEFORE)
    future = ht.save_file_async(
        tensors, tmp_path / "a", stream=side, checksum=checksum, context=context
    )
    if place != "cpu":
        assert not side.query(), "the call waited for the stream"
    fill_later(side, tensors, AFTER)
    report = future.result(TIMEOUT_S)
    check(tmp_path / "a", tensors, BEFORE)
    assert report.snapshot is not None
    assert report.snapshot.device == report.device == place
    if checksum:
        ht.load_file(tmp_path / "a", verify=True)
    torch.cuda.synchronize()
    assert all(bool((tensor == AFTER).all()) for tensor in tensors.values())


@each_place
def test_without_a_stream_any_stream_may_change_the_tensors(
    tmp_path: Path, context: hr.Context, side: torch.cuda.Stream, place: str
) -> None:
    tensors = zeros()
    with torch.cuda.stream(side):
        fill_later(side, tensors, BEFORE)
        future = ht.save_file_async(tensors, tmp_path / "a", context=context)
    with torch.cuda.stream(torch.cuda.Stream()):
        for tensor in tensors.values():
            tensor.fill_(AFTER)
    report = future.result(TIMEOUT_S)
    check(tmp_path / "a", tensors, BEFORE)
    assert report.snapshot is not None
    assert report.snapshot.device == place


@pytest.mark.parametrize("place", ["cuda:0"])
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_order_a_snapshot(
    tmp_path: Path, context: hr.Context, place: str, stream: int
) -> None:
    tensors = zeros()
    ht.save_file_async(tensors, tmp_path / "a", stream=stream, context=context).result(TIMEOUT_S)
    check(tmp_path / "a", tensors, 0)


@each_place
def test_thousands_of_tensors_become_the_official_file(
    tmp_path: Path, context: hr.Context, side: torch.cuda.Stream, place: str
) -> None:
    whole = torch.randint(0, 255, (3000, 1031), dtype=torch.uint8, device="cuda")
    tensors = {f"t{number}": row.clone() for number, row in enumerate(whole)}
    tensors |= {"one": torch.ones((), device="cuda"), "host": torch.arange(70_000)}
    torch.cuda.synchronize()
    future = ht.save_file_async(
        tensors, tmp_path / "ours", {"a": "b"}, stream=side, context=context
    )
    future.result(TIMEOUT_S)
    safetensors_torch.save_file(tensors, tmp_path / "official", {"a": "b"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "official").read_bytes()


@pytest.mark.parametrize("place", ["cuda:0"])
def test_caller_is_soon_free_again_and_the_memory_serves_the_next_snapshot(
    tmp_path: Path, context: hr.Context, place: str
) -> None:
    tensors = {"a": torch.full((BIG,), BEFORE, dtype=torch.uint8, device="cuda")}
    ht.save_file_async(tensors, tmp_path / "a", fsync=False, context=context).result(TIMEOUT_S)
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    began = time.perf_counter()
    future = ht.save_file_async(tensors, tmp_path / "b", fsync=False, context=context)
    seconds = time.perf_counter() - began
    tensors["a"].fill_(AFTER)
    report = future.result(TIMEOUT_S)
    assert report.snapshot is not None
    assert (report.snapshot.device, report.snapshot.nbytes) == (place, BIG)
    assert seconds < MOST_S
    check(tmp_path / "b", tensors, BEFORE)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= BIG


def test_memory_that_torch_keeps_for_itself_counts_as_free() -> None:
    from headrace.torch.library import Torch
    from headrace.types import Device

    block = torch.empty(BIG, dtype=torch.uint8, device="cuda")
    before = Torch().idle_nbytes(Device("cuda", 0))
    del block
    assert Torch().idle_nbytes(Device("cuda", 0)) == before + BIG


def take_all(nbytes: int) -> list[torch.Tensor]:
    """Take memory in blocks of that size until torch has no more."""
    taken: list[torch.Tensor] = []
    try:
        while True:
            taken.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return taken


@pytest.mark.parametrize("place", ["cuda:0"])
def test_torch_without_memory_sends_the_snapshot_to_the_host(
    tmp_path: Path, context: hr.Context, place: str
) -> None:
    tensors = zeros()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MIB) / total)
    try:
        hoard = take_all(64 * MIB) + take_all(2 * MIB)  # larger than torch pools apart
        report = ht.save_file_async(tensors, tmp_path / "a", context=context).result(TIMEOUT_S)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del hoard
    assert report.snapshot is not None
    assert report.snapshot.device == "cpu"
    check(tmp_path / "a", tensors, 0)


@pytest.mark.gpu2
def test_snapshots_of_two_gpus_go_into_one_file(tmp_path: Path) -> None:
    tensors = {
        f"{device}.{number}": torch.full(
            (SIZE + number,), number, dtype=torch.uint8, device=f"cuda:{device}"
        )
        for device in range(2)
        for number in range(3)
    }
    wanted = {name: tensor.cpu() for name, tensor in tensors.items()}
    future = ht.save_file_async(tensors, tmp_path / "a")
    for tensor in tensors.values():
        tensor.fill_(AFTER)
    report = future.result(TIMEOUT_S)
    found = safetensors_torch.load_file(tmp_path / "a")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert report.snapshot is not None
    assert report.snapshot.device == "cuda:0, cuda:1"


def test_arrays_of_cupy_are_copied_into_memory_of_its_pool(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    import headrace.cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros((1000, 3000), cupy.int32)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(300):
            array += 1
    tensors = {"whole": array, "strided": array[:, ::3]}
    future = headrace.cupy.save_file_async(tensors, tmp_path / "a", stream=stream)
    with stream:
        array.fill(0)
    report = future.result(TIMEOUT_S)
    loaded = headrace.cupy.load(tmp_path / "a")
    assert all(bool((each == 300).all()) for each in loaded.values())
    assert report.snapshot is not None
    assert report.snapshot.device == "cuda:0"

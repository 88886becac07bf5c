"""Checksums of memory of a real GPU: streams, sizes, and damage that is found there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from xxhash import xxh3_64_hexdigest

import headrace
from headrace.formats.catalog import TensorSpec
from headrace.formats.checksums import store_checksums
from headrace.formats.safetensors_layout import Described, lay_out
from headrace.memory.buffer import Buffer
from headrace.survey import want_checkpoint
from headrace.types import Device

_MIB = 1 << 20
NBYTES = {"big": 37 * _MIB + 11, "block": 4 * _MIB, "small": 1000, "byte": 1, "empty": 0}


def buffer_of(tensor: torch.Tensor, stream: int | None = None) -> Buffer:
    device = Device("cuda", tensor.device.index) if tensor.is_cuda else Device("cpu", 0)
    return Buffer(tensor.data_ptr(), tensor.nbytes, device, tensor, stream)


def digest_of(tensor: torch.Tensor) -> str:
    return xxh3_64_hexdigest(tensor.cpu().numpy())


def random_bytes(nbytes: int, device: str) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


@pytest.mark.gpu
def test_digests_of_gpu_and_host_tensors_are_those_of_the_library() -> None:
    tensors = [
        random_bytes(nbytes, where) for nbytes in NBYTES.values() for where in ("cuda:0", "cpu")
    ]
    tensors += [tensors[0][3:], tensors[1][5:]]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with headrace.Context() as context:
        found = context.digest([buffer_of(tensor) for tensor in tensors])
    assert found == tuple(map(digest_of, tensors))
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu2
def test_digests_of_two_gpus_are_those_of_the_library() -> None:
    tensors = [random_bytes(nbytes, f"cuda:{i}") for nbytes in NBYTES.values() for i in (0, 1)]
    for index in (0, 1):
        torch.cuda.synchronize(index)
    with headrace.Context() as context:
        found = context.digest([buffer_of(tensor) for tensor in tensors])
    assert found == tuple(map(digest_of, tensors))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_digest_comes_after_work_queued_on_the_stream() -> None:
    tensor = torch.zeros(16 * _MIB, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        tensor.fill_(7)
    with headrace.Context() as context:
        found = context.digest([buffer_of(tensor, stream.cuda_stream)])
    assert found == (xxh3_64_hexdigest(bytes([7]) * tensor.nbytes),)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["auto", "cached", "direct"])
@pytest.mark.parametrize("offset", [None, 0, 4 * _MIB - 1, 4 * _MIB, -1])
def test_damaged_byte_is_found_in_gpu_memory(
    tmp_path: Path, route: str, offset: int | None
) -> None:
    path = tmp_path / "model.safetensors"
    contents = {name: bytes(random_bytes(n, "cpu").numpy()) for name, n in NBYTES.items()}
    digests = {name: xxh3_64_hexdigest(content) for name, content in contents.items()}
    described = [Described(name, "U8", (nbytes,)) for name, nbytes in NBYTES.items()]
    layout = lay_out(described, store_checksums(None, described, digests))
    whole = bytearray(layout.header + b"".join(contents[spec.name] for spec in layout.tensors))
    if offset is not None:
        (place,) = (spec.file_range for spec in layout.tensors if spec.name == "big")
        whole[place.start + offset % place.nbytes] ^= 1
    path.write_bytes(whole)

    def allocate(specs: tuple[TensorSpec, ...]) -> list[Buffer]:
        return [
            buffer_of(torch.empty(spec.file_range.nbytes, dtype=torch.uint8, device="cuda:0"))
            for spec in specs
        ]

    want = want_checkpoint(path, verify=True)
    with headrace.Context() as context:
        if offset is None:
            report = context.transfer(want, Device("cuda", 0), allocate, route=route)
            assert report.verified_nbytes == sum(NBYTES.values())
            return
        with pytest.raises(headrace.FormatError, match=r"1 of 5 tensors .*: tensor 'big'"):
            context.transfer(want, Device("cuda", 0), allocate, route=route)

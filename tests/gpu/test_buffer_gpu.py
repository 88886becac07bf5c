"""buffer_from over real GPU arrays: to read only, and with a stream that the caller vouches for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from headrace.bindings.cuda import CudaRuntime
from headrace.memory.buffer import buffer_from
from headrace.types import Device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_parameter_of_torch_on_the_gpu_is_read_where_it_is(dtype: torch.dtype) -> None:
    made = torch.zeros(100, device="cuda").to(dtype).requires_grad_(dtype != torch.float8_e4m3fn)
    buffer = buffer_from(made, CudaRuntime().pointer_device, writable=False)
    assert (buffer.pointer, buffer.device) == (made.data_ptr(), Device("cuda", 0))
    assert (buffer.nbytes, buffer.stream) == (100 * made.element_size(), 1)


def test_tensor_with_a_stream_of_the_caller_waits_for_nothing() -> None:
    made, other = torch.zeros(100, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    buffer = buffer_from(made, CudaRuntime().pointer_device, stream=other.cuda_stream)
    assert buffer.stream == other.cuda_stream
    assert other.query()  # nothing was put on it
    torch.cuda.synchronize()


def test_array_of_cupy_takes_a_stream_of_the_caller_and_may_be_read_only() -> None:
    cupy = pytest.importorskip("cupy")
    made, stream = cupy.zeros(100, "f4"), cupy.cuda.Stream(non_blocking=True)
    for writable in (True, False):
        buffer = buffer_from(
            made, CudaRuntime().pointer_device, writable=writable, stream=stream.ptr
        )
        assert (buffer.pointer, buffer.nbytes) == (made.data.ptr, 400)
        assert buffer.stream == stream.ptr

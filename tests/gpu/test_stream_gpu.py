"""Real streams of torch, CuPy and cuda.core as handles."""

from __future__ import annotations

import pytest

from headrace.bindings.cuda import LEGACY_STREAM, PER_THREAD_STREAM, CudaRuntime
from headrace.memory.stream import parse_stream

pytestmark = pytest.mark.gpu


def test_streams_of_torch() -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    assert parse_stream(stream) == stream.cuda_stream
    assert parse_stream(torch.cuda.default_stream()) == LEGACY_STREAM
    external = torch.cuda.ExternalStream(stream.cuda_stream)
    assert parse_stream(external) == stream.cuda_stream


def test_streams_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    assert parse_stream(stream) == stream.ptr
    assert parse_stream(cupy.cuda.Stream.null) == LEGACY_STREAM
    assert parse_stream(cupy.cuda.Stream.ptds) == PER_THREAD_STREAM
    with pytest.raises(TypeError):
        parse_stream(cupy.cuda.Event())
    with pytest.raises(TypeError):
        parse_stream(cupy.zeros(3).data)


def test_streams_of_cuda_core() -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    assert parse_stream(stream) == int(stream.handle)
    assert parse_stream(device.default_stream) in (LEGACY_STREAM, PER_THREAD_STREAM)


def test_handle_of_a_stream_made_here_is_itself() -> None:
    cuda = CudaRuntime()
    cuda.set_device(0)
    handle = cuda.create_stream()
    assert parse_stream(handle) == handle
    cuda.destroy_stream(handle)

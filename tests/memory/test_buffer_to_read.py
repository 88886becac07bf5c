"""buffer_from for memory that is only read, and with a stream that the caller vouches for."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BufferMismatch
from headrace.memory.buffer import Buffer, buffer_from
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.types import HOST, Device
from tests.support import FakeProducer, never_asked, on_host

STREAM = 0x5500


def describe(obj: Any, stream: int | None = None) -> Buffer:
    return buffer_from(obj, never_asked, writable=False, stream=stream)


def content(buffer: Buffer) -> bytes:
    return ctypes.string_at(buffer.pointer, buffer.nbytes)


def interface(data: Any = (0x7000, False), **more: Any) -> SimpleNamespace:
    """An array on a GPU that has nothing but ``__cuda_array_interface__``."""
    fields = {"shape": (3, 4), "typestr": "<f4", "data": data, "version": 3, **more}
    return SimpleNamespace(__cuda_array_interface__=fields)


# The buffer protocol.


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"abcdefghijkl",
        lambda: bytearray(b"abcdefghijkl"),
        lambda: memoryview(b"abcdefghijkl"),
        lambda: memoryview(b"__abcdefghijkl__")[2:-2],
        lambda: memoryview(b"abcdefghijkl").cast("i", (3, 1)),
        lambda: array.array("B", b"abcdefghijkl"),
    ],
    ids=["bytes", "bytearray", "memoryview", "slice", "memoryview of ints", "array"],
)
def test_memory_to_read_is_described_by_its_bytes(make: Callable[[], Any]) -> None:
    buffer = describe(make())
    gc.collect()
    assert (buffer.nbytes, buffer.device, buffer.stream) == (12, HOST, None)
    assert content(buffer) == b"abcdefghijkl"


def test_single_number_of_ctypes_is_its_bytes() -> None:
    assert content(describe(ctypes.c_uint32(0x64636261))) == b"abcd"


@pytest.mark.parametrize("access", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
def test_mapping_of_a_file_is_described_and_cannot_be_closed_meanwhile(
    tmp_path: Path, access: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcd" * 100)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 400, prot=access) as mapping:
        buffer = describe(mapping)
        assert content(buffer) == b"abcd" * 100
        with pytest.raises(BufferError):
            mapping.close()
        del buffer


@pytest.mark.parametrize("step", [2, -1])
def test_memoryview_with_steps_is_a_mismatch_even_to_read(step: int) -> None:
    with pytest.raises(BufferMismatch, match="not contiguous"):
        describe(memoryview(b"0123456789")[::step])


@pytest.mark.parametrize("obj", [b"", bytearray(), memoryview(b"12")[1:1], np.empty((0, 4))])
def test_empty_memory_to_read_is_a_buffer_of_no_bytes(obj: Any) -> None:
    assert describe(obj).nbytes == 0


@pytest.mark.parametrize("obj", [None, 17, "text", [1, 2], object(), {}])
def test_object_with_neither_protocol_is_a_mismatch_to_read_too(obj: Any) -> None:
    with pytest.raises(BufferMismatch, match="pass an array"):
        describe(obj)


# NumPy.


@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    dtype=st.sampled_from(["u1", "<f4", ">i8", "<c16", "?", "V3", "S5", "e", "<M8[s]", "<U4"]),
)
def test_array_that_may_not_be_written_is_read_where_it_is(
    shape: tuple[int, ...], dtype: str
) -> None:
    made = np.zeros(shape, dtype)
    made.flags.writeable = False
    buffer = describe(made)
    assert (buffer.nbytes, buffer.device) == (made.nbytes, HOST)
    if made.nbytes:
        assert buffer.pointer == made.ctypes.data


@pytest.mark.parametrize(
    "scalar",
    [np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64(7, "s"), np.bytes_(b"abc")],
    ids=repr,
)
def test_numpy_scalar_is_its_value_for_as_long_as_the_buffer_is(scalar: Any) -> None:
    buffer = describe(scalar)
    gc.collect()
    churn = [np.full((), 9, "u8") for _ in range(100)]
    assert content(buffer) == scalar.tobytes()
    del churn


def test_zero_dimensional_array_is_read_where_it_is() -> None:
    made = np.array(2.5)
    made.flags.writeable = False
    assert (describe(made).pointer, describe(made).nbytes) == (made.ctypes.data, 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((4, 6))[:, ::2],
        lambda: np.zeros((4, 6)).T,
        lambda: np.broadcast_to(np.zeros(1), (3,)),
        lambda: np.zeros(6)[::-1],
    ],
    ids=["strided", "transposed", "broadcast", "backwards"],
)
def test_array_with_holes_is_a_mismatch_even_to_read(make: Callable[[], Any]) -> None:
    with pytest.raises(BufferMismatch, match="not contiguous"):
        describe(make())


def test_python_objects_are_a_mismatch_to_read_too() -> None:
    with pytest.raises(BufferMismatch, match="which no file can hold"):
        describe(np.array([object()]))


# GPUs.


@pytest.mark.parametrize("readonly", [True, False])
def test_cuda_array_that_may_not_be_written_is_read(readonly: bool) -> None:
    made = interface(data=(0x7000, readonly), stream=7)
    buffer = buffer_from(made, lambda _: 2, writable=False)
    assert (buffer.pointer, buffer.nbytes) == (0x7000, 48)
    assert (buffer.device, buffer.stream) == (Device("cuda", 2), 7)


@pytest.mark.parametrize("device", [(2, 5), (1, 0)])
def test_dlpack_export_that_may_not_be_written_is_read(device: tuple[int, int]) -> None:
    producer = FakeProducer(0x7000, (12,), readonly=True, device=device)
    buffer = describe(producer)
    assert (buffer.pointer, buffer.nbytes) == (0x7000, 12)
    assert buffer.device == (HOST if device[0] == 1 else Device("cuda", 5))


def test_holes_and_host_pointers_are_a_mismatch_on_a_gpu_even_to_read() -> None:
    with pytest.raises(BufferMismatch, match="not contiguous"):
        describe(FakeProducer(0x7000, (4, 4), strides=(1, 4), readonly=True))
    with pytest.raises(BufferMismatch, match="not contiguous"):
        describe(interface(data=(0x7000, True), strides=(4, 12)))
    with pytest.raises(BufferMismatch, match="points at host memory"):
        buffer_from(interface(), on_host, writable=False)


# The caller's stream.


@pytest.mark.parametrize("writable", [True, False])
def test_dlpack_producer_is_asked_for_no_synchronisation_where_the_caller_has_a_stream(
    writable: bool,
) -> None:
    producer = FakeProducer(0x7000, (12,), device=(2, 5))
    buffer = buffer_from(producer, never_asked, writable=writable, stream=STREAM)
    assert producer.streams == [-1]
    assert (buffer.pointer, buffer.device) == (0x7000, Device("cuda", 5))
    assert buffer.stream == STREAM


@pytest.mark.parametrize("stated", [None, 1, 0x6600])
def test_stream_of_the_caller_stands_in_for_that_of_a_cuda_array(stated: int | None) -> None:
    buffer = buffer_from(interface(stream=stated), lambda _: 0, stream=STREAM)
    assert buffer.stream == STREAM


def test_type_that_dlpack_lacks_has_the_stream_of_the_caller_too() -> None:
    class Half(FakeProducer):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("no such type in DLPack")

        @property
        def __cuda_array_interface__(self) -> Any:
            return interface(stream=0x6600).__cuda_array_interface__

    assert buffer_from(Half(0x7000, (12,)), lambda _: 0, stream=STREAM).stream == STREAM


def test_fake_device_array_has_the_stream_of_the_caller() -> None:
    cuda = FakeCuda()
    made = FakeDeviceArray(cuda, 100, stream=cuda.create_stream())
    assert buffer_from(made, cuda.pointer_device, stream=STREAM).stream == STREAM


def test_host_memory_has_no_stream() -> None:
    producer = FakeProducer(0x7000, (4,), device=(1, 0))
    for obj in (b"abc", np.zeros(3), producer):
        assert describe(obj, stream=STREAM).stream is None
    assert producer.streams == [None]


# torch, without a GPU.


def test_torch_tensor_that_requires_a_gradient_is_read_where_it_is() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(6, dtype=torch.float32).requires_grad_()
    for made in (whole, whole[1:4], torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))):
        buffer = describe(made)
        assert (buffer.pointer, buffer.device) == (made.data_ptr(), HOST)
        assert buffer.nbytes == made.numel() * made.element_size()
    assert content(describe(whole)) == whole.detach().numpy().tobytes()


def test_torch_result_of_a_computation_lives_as_long_as_the_buffer() -> None:
    torch = pytest.importorskip("torch")
    buffer = describe(torch.ones(1000, requires_grad=True) * 2)
    gc.collect()
    churn = [torch.zeros(1000) for _ in range(10)]
    assert content(buffer) == np.full(1000, 2, "<f4").tobytes()
    del churn


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda torch: torch.zeros(3, 5, requires_grad=True).T, "not contiguous"),
        (lambda torch: torch.zeros(3, 5)[:, ::2], "not contiguous"),
        (lambda torch: torch.zeros(1).expand(5), "not contiguous"),
        (lambda torch: torch.zeros(3, dtype=torch.complex64).conj(), "conjugate"),
        (lambda torch: torch.eye(3).requires_grad_().to_sparse(), "DLPack"),
        (lambda torch: torch.empty(3, device="meta", requires_grad=True), "meta"),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "sparse", "meta"],
)
def test_torch_tensor_that_is_no_stretch_of_bytes_is_a_mismatch_even_to_read(
    make: Callable[[Any], Any], complaint: str
) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(BufferMismatch, match=complaint):
        describe(make(torch))


def test_torch_single_numbers_and_empty_tensors_are_read() -> None:
    torch = pytest.importorskip("torch")
    assert content(describe(torch.tensor(1.5, requires_grad=True))) == np.float32(1.5).tobytes()
    assert describe(torch.empty((0, 7), requires_grad=True)).nbytes == 0

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bindings.pymemory import view_memory
from headrace.errors import BufferMismatch
from headrace.memory.buffer import Buffer, buffer_from
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.types import HOST, Device
from tests.support import FakeProducer, never_asked, on_host


def describe(obj: Any) -> Buffer:
    return buffer_from(obj, never_asked)


def put(buffer: Buffer, content: bytes) -> None:
    view_memory(buffer.pointer, buffer.nbytes)[:] = content


def interface(data: Any = (0x7000, False), **more: Any) -> SimpleNamespace:
    """An array on a GPU that has nothing but ``__cuda_array_interface__``."""
    fields = {"shape": (3, 4), "typestr": "<f4", "data": data, "version": 3, **more}
    return SimpleNamespace(__cuda_array_interface__=fields)


# The buffer protocol.


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(12),
        lambda: memoryview(bytearray(12)),
        lambda: array.array("i", [0, 0, 0]),
        lambda: (ctypes.c_float * 3)(),
        lambda: mmap.mmap(-1, 12),
        lambda: memoryview((ctypes.c_int * 3)()),
    ],
    ids=["bytearray", "memoryview", "array", "ctypes", "mmap", "memoryview of ints"],
)
def test_writable_buffer_is_described_by_its_bytes(make: Callable[[], Any]) -> None:
    obj = make()
    buffer = describe(obj)
    assert (buffer.nbytes, buffer.device, buffer.stream) == (12, HOST, None)
    put(buffer, b"abcdefghijkl")
    assert bytes(memoryview(obj).cast("B")) == b"abcdefghijkl"


def test_slice_of_a_memoryview_is_that_part_of_the_memory() -> None:
    memory = bytearray(b"0123456789")
    buffer = describe(memoryview(memory)[3:7])
    assert buffer.nbytes == 4
    put(buffer, b"abcd")
    assert memory == b"012abcd789"


@pytest.mark.parametrize(
    "obj", [b"bytes", memoryview(b"bytes"), memoryview(bytearray(3)).toreadonly()]
)
def test_memory_that_may_not_be_written_is_a_mismatch(obj: Any) -> None:
    with pytest.raises(BufferMismatch, match="read-only; pass memory that may be written"):
        describe(obj)


def test_mapping_of_a_file_for_reading_is_a_mismatch(tmp_path: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 100, prot=mmap.PROT_READ) as mapping,
        pytest.raises(BufferMismatch, match=r"mmap\.mmap is read-only"),
    ):
        describe(mapping)


@pytest.mark.parametrize("step", [2, -1])
def test_memoryview_with_steps_is_a_mismatch(step: int) -> None:
    with pytest.raises(BufferMismatch, match="not contiguous"):
        describe(memoryview(bytearray(10))[::step])


@pytest.mark.parametrize("obj", [bytearray(), memoryview(bytearray(5))[3:3], np.empty((0, 4))])
def test_empty_memory_is_a_buffer_of_no_bytes(obj: Any) -> None:
    assert describe(obj).nbytes == 0


def test_memory_is_held_while_the_buffer_is_and_no_longer() -> None:
    memory = bytearray(10)
    buffer = describe(memory)
    with pytest.raises(BufferError):
        memory.append(1)
    del buffer
    gc.collect()
    memory.append(1)


@pytest.mark.parametrize("obj", [None, 17, "text", [1, 2], object(), {}])
def test_object_with_neither_protocol_is_a_mismatch_that_names_all_three(obj: Any) -> None:
    with pytest.raises(BufferMismatch) as caught:
        describe(obj)
    for word in ("buffer protocol", "__cuda_array_interface__", "__dlpack__", "pass an array"):
        assert word in str(caught.value)
    assert type(obj).__qualname__ in str(caught.value)


# NumPy.


@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    dtype=st.sampled_from(["u1", "<f4", ">i8", "<c16", "?", "V3", "S5", "e"]),
)
def test_numpy_array_is_described_by_its_own_address_and_length(
    shape: tuple[int, ...], dtype: str
) -> None:
    made = np.zeros(shape, dtype)
    buffer = describe(made)
    assert (buffer.nbytes, buffer.device) == (made.nbytes, HOST)
    if made.nbytes:
        assert buffer.pointer == made.ctypes.data


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(ml_dtypes.bfloat16),
        np.dtype(ml_dtypes.float8_e4m3fn),
        np.dtype([("a", "<f4"), ("b", "u1", 3)]),
        np.dtype(
            {"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [0, 8], "itemsize": 24}
        ),
        np.dtype(np.longdouble),
    ],
    ids=str,
)
def test_numpy_types_that_others_lack_are_bytes_like_any(dtype: np.dtype[Any]) -> None:
    made = np.zeros((2, 3), dtype)
    buffer = describe(made)
    assert (buffer.nbytes, buffer.pointer) == (made.nbytes, made.ctypes.data)


def test_numpy_text_is_four_bytes_a_character() -> None:
    made = np.zeros(5, "<U4")
    assert describe(made).nbytes == made.nbytes == 80


@pytest.mark.parametrize("dtype", ["<M8[s]", "<m8[ns]"])
def test_numpy_times_are_eight_bytes_each(dtype: str) -> None:
    assert describe(np.zeros(5, dtype)).nbytes == 40


@pytest.mark.parametrize("dtype", [object, [("name", object), ("value", "<i8")]], ids=str)
def test_python_objects_are_a_mismatch(dtype: Any) -> None:
    with pytest.raises(BufferMismatch, match="object"):
        describe(np.empty(3, dtype))


@pytest.mark.parametrize("scalar", [np.float32(1), np.int64(3), np.bool_(True)], ids=repr)
def test_numpy_scalar_is_a_mismatch(scalar: Any) -> None:
    with pytest.raises(BufferMismatch):
        describe(scalar)


def test_zero_dimensional_array_is_one_element() -> None:
    made = np.zeros((), "<f8")
    put(describe(made), np.float64(2.5).tobytes())
    assert made == 2.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((4, 6))[:, ::2],
        lambda: np.zeros((4, 6))[:, :3],
        lambda: np.zeros(6)[::-1],
        lambda: np.zeros((4, 6)).T,
        lambda: np.broadcast_to(np.zeros(1), (3,)).copy()[::2],
        lambda: np.zeros(3, [("a", "u1"), ("b", "u1")])["b"],
    ],
    ids=["strided", "part of rows", "backwards", "transposed", "step", "field"],
)
def test_numpy_array_with_holes_is_a_mismatch(make: Callable[[], Any]) -> None:
    with pytest.raises(BufferMismatch, match="not contiguous"):
        describe(make())


def test_fortran_array_is_a_mismatch_that_says_which_order_is_wanted() -> None:
    with pytest.raises(BufferMismatch, match="not contiguous in C order"):
        describe(np.zeros((3, 4), order="F"))
    assert describe(np.zeros((3, 1), order="F")).nbytes == 24
    assert describe(np.zeros((3, 4), order="F").T).nbytes == 96


def test_numpy_array_that_may_not_be_written_is_a_mismatch() -> None:
    made = np.zeros(3)
    made.flags.writeable = False
    for each in (made, np.frombuffer(b"12345678"), np.broadcast_to(np.zeros(1), (3,))):
        with pytest.raises(BufferMismatch):
            describe(each)


def test_numpy_array_stays_alive_with_the_buffer() -> None:
    made = np.zeros(3)
    before = sys.getrefcount(made)
    buffer = describe(made)
    assert sys.getrefcount(made) == before + 1
    del buffer
    assert sys.getrefcount(made) == before


def bare(**fields: Any) -> Any:
    return SimpleNamespace(
        __array_interface__={"shape": (3,), "typestr": "|u1", "version": 3, **fields}
    )


@pytest.mark.parametrize(
    "obj", [bare(data=b"abc"), bare(), bare(data=None)], ids=["bytes", "none", "None"]
)
def test_array_interface_without_an_address_is_a_mismatch(obj: Any) -> None:
    with pytest.raises(BufferMismatch):
        describe(obj)


# GPUs.


def test_cuda_array_is_on_the_device_that_owns_its_pointer() -> None:
    asked: list[int] = []

    def third(pointer: int) -> int:
        asked.append(pointer)
        return 3

    obj = interface()
    buffer = buffer_from(obj, third)
    assert (buffer.pointer, buffer.nbytes, buffer.device) == (0x7000, 48, Device("cuda", 3))
    assert asked == [0x7000]
    assert buffer.owner is obj


@pytest.mark.parametrize(("stated", "stream"), [(None, 1), (1, 1), (0x5500, 0x5500)])
def test_cuda_array_is_ordered_after_the_stream_it_names(stated: Any, stream: int) -> None:
    assert buffer_from(interface(stream=stated), lambda _: 0).stream == stream


def test_cuda_array_without_a_stream_is_ordered_after_the_legacy_one() -> None:
    assert buffer_from(interface(), lambda _: 0).stream == 1


def test_fake_device_array_is_taken_as_any_cuda_array() -> None:
    cuda = FakeCuda(devices=2)
    made = FakeDeviceArray(cuda, 100, device=1)
    buffer = buffer_from(made, cuda.pointer_device)
    assert (buffer.nbytes, buffer.device) == (100, Device("cuda", 1))
    assert buffer.pointer == made.pointer


def test_cuda_array_that_may_not_be_written_is_a_mismatch() -> None:
    with pytest.raises(BufferMismatch, match="read-only"):
        buffer_from(interface(data=(0x7000, True)), lambda _: 0)


@pytest.mark.parametrize(
    ("strides", "fits"),
    [(None, True), ((16, 4), True), ((4, 12), False), ((32, 4), False), ((-16, 4), False)],
)
def test_cuda_array_with_holes_is_a_mismatch(strides: Any, fits: bool) -> None:
    obj = interface(strides=strides)
    if fits:
        assert buffer_from(obj, lambda _: 0).nbytes == 48
    else:
        with pytest.raises(BufferMismatch, match="not contiguous"):
            buffer_from(obj, lambda _: 0)


def test_cuda_array_that_points_at_host_memory_is_a_mismatch() -> None:
    with pytest.raises(BufferMismatch, match="points at host memory"):
        buffer_from(interface(), on_host)


@pytest.mark.parametrize("data", [(0, False), (None, False)])
def test_empty_cuda_array_needs_no_pointer(data: Any) -> None:
    buffer = buffer_from(interface(data=data, shape=(0, 4)), never_asked)
    assert (buffer.nbytes, buffer.pointer, buffer.device.is_host) == (0, 0, False)


def test_array_that_refuses_to_show_its_interface_is_a_mismatch() -> None:
    class NeedsGrad:
        """As torch's CUDA tensors that require a gradient."""

        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")

    with pytest.raises(BufferMismatch, match="requires grad"):
        buffer_from(NeedsGrad(), lambda _: 0)


def test_dlpack_producer_on_cuda_orders_the_legacy_stream_itself() -> None:
    producer = FakeProducer(0x7000, (3, 4), bits=32, byte_offset=16, device=(2, 5))
    buffer = buffer_from(producer, never_asked)
    assert (buffer.pointer, buffer.nbytes) == (0x7010, 48)
    assert (buffer.device, buffer.stream) == (Device("cuda", 5), 1)
    assert producer.streams == [1]


def test_dlpack_producer_that_forbids_writing_or_has_holes_is_a_mismatch() -> None:
    with pytest.raises(BufferMismatch, match="read-only"):
        buffer_from(FakeProducer(0x7000, (4,), readonly=True), never_asked)
    with pytest.raises(BufferMismatch, match="not contiguous"):
        buffer_from(FakeProducer(0x7000, (4, 4), strides=(1, 4)), never_asked)


def test_dlpack_producer_on_another_kind_of_device_is_a_mismatch() -> None:
    with pytest.raises(BufferMismatch, match="device kind 10 is neither the host nor CUDA"):
        buffer_from(FakeProducer(0x7000, (4,), device=(10, 0)), never_asked)


def test_dlpack_producer_on_the_host_is_host_memory() -> None:
    memory = bytearray(8)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    buffer = buffer_from(FakeProducer(address, (8,), device=(1, 0)), never_asked)
    assert (buffer.pointer, buffer.nbytes, buffer.device) == (address, 8, HOST)


def test_producer_that_cannot_export_is_a_mismatch_with_its_reason() -> None:
    class Stubborn(FakeProducer):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("no such type in DLPack")

    with pytest.raises(BufferMismatch, match="no such type in DLPack"):
        buffer_from(Stubborn(0x7000, (4,)), never_asked)


def test_type_that_dlpack_lacks_goes_by_the_cuda_array_interface() -> None:
    class Half(FakeProducer):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("no such type in DLPack")

        @property
        def __cuda_array_interface__(self) -> Any:
            return interface().__cuda_array_interface__

    buffer = buffer_from(Half(0x7000, (12,)), lambda _: 2)
    assert (buffer.nbytes, buffer.device) == (48, Device("cuda", 2))


# torch, without a GPU.

TORCH_TYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


@pytest.mark.parametrize("name", TORCH_TYPES)
def test_torch_tensor_of_any_type_is_host_memory(name: str) -> None:
    torch = pytest.importorskip("torch")
    made = torch.empty((3, 5), dtype=getattr(torch, name))
    buffer = describe(made)
    assert (buffer.pointer, buffer.device) == (made.data_ptr(), HOST)
    assert buffer.nbytes == 15 * made.element_size()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda torch: torch.zeros(3, 5).T, "not contiguous"),
        (lambda torch: torch.zeros(3, 5)[:, ::2], "not contiguous"),
        (lambda torch: torch.zeros(1).expand(5), "not contiguous"),
        (lambda torch: torch.zeros(3, requires_grad=True), "require gradient"),
        (lambda torch: torch.zeros(3, dtype=torch.complex64).conj(), "conjugate"),
        (lambda torch: torch.eye(3).to_sparse(), "DLPack"),
        (lambda torch: torch.empty(3, device="meta"), "meta"),
    ],
    ids=["transposed", "strided", "expanded", "gradient", "conjugate", "sparse", "meta"],
)
def test_torch_tensor_that_does_not_fit_is_a_mismatch(
    make: Callable[[Any], Any], complaint: str
) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(BufferMismatch, match=complaint):
        describe(make(torch))


def test_torch_slices_parameters_and_single_numbers_are_taken() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(10, dtype=torch.uint8)
    put(describe(whole[3:7]), b"abcd")
    assert bytes(whole.tolist()) == b"\0\0\0abcd\0\0\0"
    assert describe(torch.zeros(())).nbytes == 4
    assert describe(torch.empty(0, 7)).nbytes == 0
    assert describe(torch.nn.Parameter(torch.zeros(2), requires_grad=False)).nbytes == 8


@pytest.mark.parametrize("writable", [True, False])
def test_negated_torch_memory_is_refused_since_its_bytes_are_of_the_other_sign(
    writable: bool,
) -> None:
    torch = pytest.importorskip("torch")
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    with pytest.raises(BufferMismatch, match=r"negative bit.*resolve_neg"):
        buffer_from(negated, never_asked, writable=writable)
    assert buffer_from(negated.resolve_neg(), never_asked, writable=writable).nbytes == 4

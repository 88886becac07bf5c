# ruff: noqa: N815 (the names are CUDA's)
from __future__ import annotations

import ctypes
import enum
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from headrace.bindings.cuda import CudaRuntime
from headrace.errors import DeviceError


class Code(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100
    cudaErrorNotReady = 600


class Kind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class Where(enum.IntEnum):
    cudaMemoryTypeHost = 1
    cudaMemoryTypeDevice = 2
    cudaMemoryTypeManaged = 3


class Order(enum.IntEnum):
    cudaMemcpySrcAccessOrderStream = 1


class Recorder:
    """Stands for ``cuda.bindings.runtime``: answers as told, and notes every call."""

    cudaError_t = Code
    cudaMemcpyKind = Kind
    cudaMemoryType = Where
    cudaMemcpySrcAccessOrder = Order
    cudaMemcpyAttributes = types.SimpleNamespace
    cudaHostRegisterPortable = 1
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2
    cudaEventBlockingSync = 1

    def __init__(self, version: int = 13000, **answers: Any) -> None:
        self.CUDART_VERSION = version
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            answer = self.answers.get(name, (Code.cudaSuccess, 7))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def cudaGetErrorString(self, code: int) -> tuple[Code, bytes]:  # noqa: N802
        return Code.cudaSuccess, b"the text of it"


class Driver:
    """Stands for ``cuda.bindings.driver``: one stream, 9, of a context of device 3."""

    def __init__(self, failing: str | None = None) -> None:
        self.current = ["the caller's"]
        self._failing = failing

    def _answer(self, call: str, *value: Any) -> tuple[Any, ...]:
        failed = call == self._failing
        code = Code.cudaErrorMemoryAllocation if failed else Code.cudaSuccess
        return (code, *(None if failed else each for each in value))

    def cuStreamGetCtx(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        assert stream == 9
        return self._answer("cuStreamGetCtx", "the stream's")

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:  # noqa: N802
        if self._failing != "cuCtxPushCurrent":
            self.current.append(context)
        return self._answer("cuCtxPushCurrent")

    def cuCtxGetDevice(self) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuCtxGetDevice", {"the stream's": 3, "the caller's": 7}[self.top])

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuCtxPopCurrent", self.current.pop())

    @property
    def top(self) -> str:
        return self.current[-1]


class Libcuda:
    """Stands for libcuda itself: every call gives `code`, and is noted."""

    def __init__(self, code: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in ("HtoD", "DtoH", "DtoD"):
            self._add(f"cuMemcpy{name}Async_v2", code)
        self._add("cuStreamQuery", code)

    def _add(self, name: str, code: int) -> None:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return code

        setattr(self, name, call)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CudaRuntime, Recorder]]:
    def build(
        driver: Driver | None = None, libcuda: Libcuda | None = None, **arguments: Any
    ) -> tuple[CudaRuntime, Recorder]:
        def load(name: str) -> Libcuda:
            if libcuda is None:
                raise OSError(f"there is no {name}")
            return libcuda

        monkeypatch.setattr(ctypes, "PyDLL", load)
        recorder = Recorder(**arguments)
        bindings = types.ModuleType("cuda.bindings")
        bindings.runtime = recorder  # type: ignore[attr-defined]
        bindings.driver = driver  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        return CudaRuntime(), recorder

    return build


def test_without_the_bindings_the_class_is_an_import_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError):
        CudaRuntime()


def test_code_that_is_no_success_is_a_device_error_with_call_name_number_and_text(
    make: Callable[..., tuple[CudaRuntime, Recorder]],
) -> None:
    cuda, _ = make(cudaHostRegister=(Code.cudaErrorMemoryAllocation,))
    with pytest.raises(DeviceError) as caught:
        cuda.register_host(4096, 8192)
    assert str(caught.value) == (
        "cudaHostRegister failed: cudaErrorMemoryAllocation (2): the text of it"
    )


def test_driver_that_is_not_there_is_a_device_error(
    make: Callable[..., tuple[CudaRuntime, Recorder]],
) -> None:
    cuda, _ = make(cudaGetDeviceCount=RuntimeError('Failed to dlopen "libcuda.so.1"'))
    with pytest.raises(DeviceError, match="libcuda"):
        cuda.device_count()


def test_no_device_is_a_count_of_zero(
    make: Callable[..., tuple[CudaRuntime, Recorder]],
) -> None:
    cuda, _ = make(cudaGetDeviceCount=(Code.cudaErrorNoDevice, None))
    assert cuda.device_count() == 0


@pytest.mark.parametrize(
    ("where", "device"),
    [
        (Where.cudaMemoryTypeDevice, 3),
        (Where.cudaMemoryTypeManaged, 3),
        (Where.cudaMemoryTypeHost, None),
    ],
)
def test_device_of_a_pointer_is_told_for_device_memory_only(
    make: Callable[..., tuple[CudaRuntime, Recorder]], where: Where, device: int | None
) -> None:
    attributes = types.SimpleNamespace(type=where, device=3)
    cuda, _ = make(cudaPointerGetAttributes=(Code.cudaSuccess, attributes))
    assert cuda.pointer_device(4096) == device


DIRECTIONS = {
    "copy_to_device": Kind.cudaMemcpyHostToDevice,
    "copy_to_host": Kind.cudaMemcpyDeviceToHost,
    "copy_on_device": Kind.cudaMemcpyDeviceToDevice,
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("version", [12090, 13000])
@pytest.mark.parametrize("count", [1, 3, 4, 100])
def test_every_copy_is_asked_for_once_in_a_batch_or_alone(
    make: Callable[..., tuple[CudaRuntime, Recorder]], version: int, count: int, direction: str
) -> None:
    cuda, recorder = make(version=version)
    copies = [(1000 + n, 2000 + n, 30 + n) for n in range(count)]
    getattr(cuda, direction)(copies, 9)
    if len(recorder.calls) == 1 and count > 1:
        (call,) = recorder.calls
        assert call[0] == "cudaMemcpyBatchAsync"
        assert version >= 13000
        assert list(zip(*call[1:4], strict=True)) == copies
        assert call[4] == count
        assert call[-1] == 9
    else:
        kind = DIRECTIONS[direction]
        assert recorder.calls == [("cudaMemcpyAsync", *copy, kind, 9) for copy in copies]


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize(
    ("direction", "call"),
    [("copy_to_device", "HtoD"), ("copy_to_host", "DtoH"), ("copy_on_device", "DtoD")],
)
def test_few_copies_go_to_libcuda_and_where_that_fails_to_the_runtime_for_its_error(
    make: Callable[..., tuple[CudaRuntime, Recorder]], direction: str, call: str, code: int
) -> None:
    libcuda = Libcuda(code)
    cuda, recorder = make(libcuda=libcuda)
    copies = [(1000 + n, 2000 + n, 30 + n) for n in range(3)]
    getattr(cuda, direction)(copies, 9)
    assert libcuda.calls == [(f"cuMemcpy{call}Async_v2", *copy, 9) for copy in copies]
    assert len(recorder.calls) == (3 if code else 0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sources_of_a_batch_are_read_in_stream_order(
    make: Callable[..., tuple[CudaRuntime, Recorder]], direction: str
) -> None:
    cuda, recorder = make()
    getattr(cuda, direction)([(1, 2, 3)] * 50, 9)
    ((_, *_, (attributes,), _, _, _),) = recorder.calls
    assert attributes.srcAccessOrder == Order.cudaMemcpySrcAccessOrderStream


@pytest.mark.parametrize(("stream", "batches"), [(0, 0), (1, 0), (2, 1), (9, 1)])
def test_legacy_stream_which_takes_no_batch_gets_one_copy_after_the_other(
    make: Callable[..., tuple[CudaRuntime, Recorder]], stream: int, batches: int
) -> None:
    cuda, recorder = make()
    cuda.copy_to_host([(1, 2, 3)] * 50, stream)
    names = [call[0] for call in recorder.calls]
    assert names.count("cudaMemcpyBatchAsync") == batches
    assert len(names) == (1 if batches else 50)


def test_failed_batch_is_a_device_error(
    make: Callable[..., tuple[CudaRuntime, Recorder]],
) -> None:
    cuda, _ = make(cudaMemcpyBatchAsync=(Code.cudaErrorMemoryAllocation,))
    with pytest.raises(DeviceError, match="cudaMemcpyBatchAsync failed"):
        cuda.copy_to_device([(1, 2, 3)] * 50, 9)


def test_handles_come_back_as_integers(
    make: Callable[..., tuple[CudaRuntime, Recorder]],
) -> None:
    cuda, recorder = make(cudaStreamWaitEvent=(Code.cudaSuccess,))
    stream, event = cuda.create_stream(), cuda.create_event()
    assert (type(stream), type(event)) == (int, int)
    cuda.record_event(event, stream)
    cuda.wait_event(stream, event)
    cuda.synchronize_stream(stream)
    cuda.synchronize_event(event)
    cuda.destroy_event(event)
    cuda.destroy_stream(stream)
    names = [call[0] for call in recorder.calls]
    assert names[-6:] == [
        "cudaEventRecord",
        "cudaStreamWaitEvent",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaEventDestroy",
        "cudaStreamDestroy",
    ]


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_device_of_a_default_stream_is_that_of_the_thread(
    make: Callable[..., tuple[CudaRuntime, Recorder]], stream: int
) -> None:
    cuda, _ = make(cudaGetDevice=(Code.cudaSuccess, 5))
    assert cuda.stream_device(stream) == 5


def test_device_of_a_stream_is_that_of_its_context_and_the_threads_own_comes_back(
    make: Callable[..., tuple[CudaRuntime, Recorder]],
) -> None:
    driver = Driver()
    cuda, _ = make(driver)
    assert cuda.stream_device(9) == 3
    assert driver.current == ["the caller's"]


@pytest.mark.parametrize(
    "call", ["cuStreamGetCtx", "cuCtxPushCurrent", "cuCtxGetDevice", "cuCtxPopCurrent"]
)
def test_failure_to_tell_a_streams_device_is_an_error_and_leaves_the_threads_context(
    make: Callable[..., tuple[CudaRuntime, Recorder]], call: str
) -> None:
    driver = Driver(failing=call)
    cuda, _ = make(driver)
    wanted = rf"^{call} failed: cudaErrorMemoryAllocation \(2\)$"
    with pytest.raises(DeviceError, match=wanted):
        cuda.stream_device(9)
    assert driver.current == ["the caller's"]


@pytest.mark.parametrize(
    ("code", "done"), [(Code.cudaSuccess, True), (Code.cudaErrorNotReady, False)]
)
def test_event_is_done_once_cuda_is_ready(
    make: Callable[..., tuple[CudaRuntime, Recorder]], code: Code, done: bool
) -> None:
    cuda, recorder = make(cudaEventQuery=(code,))
    assert cuda.event_is_done(9) is done
    assert recorder.calls == [("cudaEventQuery", 9)]


def test_event_that_failed_is_an_error_and_not_merely_undone(
    make: Callable[..., tuple[CudaRuntime, Recorder]],
) -> None:
    cuda, _ = make(cudaEventQuery=(Code.cudaErrorMemoryAllocation,))
    with pytest.raises(DeviceError, match="cudaEventQuery failed"):
        cuda.event_is_done(9)


@pytest.mark.parametrize("code", [Code.cudaSuccess, Code.cudaErrorMemoryAllocation])
def test_free_memory_is_asked_on_its_device_and_the_threads_own_comes_back(
    make: Callable[..., tuple[CudaRuntime, Recorder]], code: Code
) -> None:
    cuda, recorder = make(cudaGetDevice=(Code.cudaSuccess, 5), cudaMemGetInfo=(code, 100, 900))
    if code is Code.cudaSuccess:
        assert cuda.free_memory(2) == 100
    else:
        with pytest.raises(DeviceError, match="cudaMemGetInfo failed"):
            cuda.free_memory(2)
    assert recorder.calls[1:] == [("cudaSetDevice", 2), ("cudaMemGetInfo",), ("cudaSetDevice", 5)]

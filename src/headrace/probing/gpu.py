"""Facts of the GPU: whether CUDA can be used at all, and why not."""

from __future__ import annotations

from collections.abc import Callable

from headrace.bindings.cuda import Cuda
from headrace.errors import DeviceError, RouteUnavailable
from headrace.probing.fact import Fact

_NAME = "CUDA device"


def probe_gpu(load_cuda: Callable[[], Cuda], index: int) -> Fact:
    """Whether a CUDA device can be used from this process.

    Parameters
    ----------
    load_cuda
        Gives the bindings; raises ImportError where they are missing.
    index
        Ordinal of the device.
    """
    try:
        count = load_cuda().device_count()
    except ImportError as error:
        return Fact(
            _NAME,
            False,
            "no CUDA bindings",
            f"import cuda.bindings: {error}",
            "install headrace with its extra [cuda13], or [cuda12], to match the driver",
        )
    except DeviceError as error:
        return Fact(
            _NAME, False, "no usable driver", str(error), "install or repair the NVIDIA driver"
        )
    devices = f"{count} device{'s' * (count != 1)}"
    if index >= count:
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        found = devices if index == 0 else f"{devices}, so no cuda:{index}"
        return Fact(_NAME, False, found, "cudaGetDeviceCount", remedy)
    return Fact(_NAME, True, devices, "cudaGetDeviceCount")


def find_pointer_device(load_cuda: Callable[[], Cuda], pointer: int) -> int | None:
    """CUDA ordinal of the device that memory is on; None for host memory.

    Raises
    ------
    RouteUnavailable
        No GPU can be used from this process.
    DeviceError
        CUDA knows no such memory.
    """
    try:
        return load_cuda().pointer_device(pointer)
    except (ImportError, DeviceError) as error:
        gpu = probe_gpu(load_cuda, 0)
        if gpu.holds is True:
            raise
        raise RouteUnavailable(
            f"the buffer is on a GPU, and none can be used: {gpu.found} ({gpu.why}); {gpu.remedy}"
        ) from error

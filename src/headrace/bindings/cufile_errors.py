"""What cuFile's codes mean, and what to do about them."""

from __future__ import annotations

import re
from types import MappingProxyType

from headrace.errors import DeviceError

ALREADY_OPEN = 5026
"""The driver was opened before, by somebody else in this process."""
ALREADY_REGISTERED = 5023
"""The buffer was registered before, by somebody else in this process."""
PINNING_FAILED = (5016, 5036)
"""The GPU, or its BAR1 window, has no room for another registered buffer."""
FIRST_CODE = 5000
"""cuFile's own codes are above this; what is below are numbers of the operating system."""

_CODES = MappingProxyType({
    5001: ("DRIVER_NOT_INITIALIZED", "load nvidia-fs (modprobe nvidia-fs), or allow cuFile's "
           "compatibility mode (allow_compat_mode in cufile.json)"),
    5008: ("IO_NOT_SUPPORTED", "cuFile does not serve this kind of file; take the route direct"),
    5012: ("CUDA_POINTER_INVALID", ""),
    5013: ("CUDA_MEMORY_TYPE_INVALID", "pass memory of the GPU itself, not managed or host memory"),
    5016: ("INVALID_MAPPING_SIZE", "too much memory is registered, or BAR1 is full: register less, "
           "or raise max_device_pinned_mem_size_kb in cufile.json"),
    5020: ("DIO_NOT_SET", "the file was opened without O_DIRECT, which this file system may lack"),
    5022: ("INVALID_VALUE", ""),
    5023: ("MEMORY_ALREADY_REGISTERED", "deregister the buffer where it was registered first"),
    5024: ("MEMORY_NOT_REGISTERED", ""),
    5026: ("DRIVER_ALREADY_OPEN", ""),
    5027: ("HANDLE_NOT_REGISTERED", "cuFile did not take the file; most often udev has no record "
           "of its block device: mount /run/udev into the container, or start udev"),
    5033: ("NVFS_SETUP_ERROR", "nvidia-fs and libcufile do not fit together, or its device nodes "
           "are missing: check /dev/nvidia-fs* and both versions"),
    5036: ("GPU_MEMORY_PINNING_FAILED", "BAR1 of the GPU is full or other processes hold it: "
           "register less, or take buffers that are not registered"),
    5038: ("ASYNC_NOT_SUPPORTED", ""),
})  # fmt: skip

_LOG_ERROR = re.compile(r"^.*?\bERROR\s+\S+\s+(.*\S)", re.MULTILINE)


class CuFileError(DeviceError):
    """A call of cuFile failed with one of its own codes.

    Attributes
    ----------
    call : str
        Name of the C function.
    code : int
        ``CUfileOpError``.
    """

    def __init__(self, call: str, code: int, text: str = "", logged: str | None = None) -> None:
        name, remedy = _CODES.get(code, ("unknown code", ""))
        message = text or f"{name} ({code})"
        if logged:
            message += f"; cuFile's log: {logged}"
        super().__init__(f"{call} failed: {message}" + (f" ({remedy})" if remedy else ""))
        self.call, self.code = call, code

    def __reduce__(self) -> tuple[type[CuFileError], tuple[str, int], dict[str, object]]:
        return type(self), (self.call, self.code), {"args": self.args}


def logged_reason(text: str) -> str | None:
    """First error in a cuFile log; those that follow are its consequences. None without one."""
    found = _LOG_ERROR.search(text)
    return found.group(1) if found else None

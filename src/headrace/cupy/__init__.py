"""CuPy: tensors on a GPU as CuPy arrays."""

from headrace.cupy.loading import aligned_empty, load, load_file, read
from headrace.cupy.saving import save, save_file, save_file_async, write

__all__ = [
    "aligned_empty",
    "load",
    "load_file",
    "read",
    "save",
    "save_file",
    "save_file_async",
    "write",
]

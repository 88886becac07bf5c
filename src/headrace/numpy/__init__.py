"""NumPy: tensors in host memory as NumPy arrays."""

from headrace.numpy.loading import aligned_empty, load, load_file, read
from headrace.numpy.saving import save, save_file, save_file_async, write

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

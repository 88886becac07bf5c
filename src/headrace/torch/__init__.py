"""PyTorch: tensors in host memory or on a GPU as torch tensors."""

from headrace.torch.loading import aligned_empty, load, load_file, read
from headrace.torch.saving import save, save_file, save_file_async, write

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

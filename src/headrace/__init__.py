"""Bytes straight between storage and the GPU, by the fastest route, with a report that says which.

``headrace.torch``, ``headrace.cupy`` and ``headrace.numpy`` load and save weights and arrays;
`read_into` and `write_from` serve memory that you have; `explain` tells beforehand, `trace`
afterwards.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.errors import (
    BufferMismatch,
    DeviceError,
    FormatError,
    HeadraceError,
    RouteUnavailable,
    ShortRead,
    SourceChanged,
)

if TYPE_CHECKING:
    from headrace.context import Context, default_context
    from headrace.diagnosis import Diagnosis, alignment, doctor
    from headrace.futures import TransferFuture
    from headrace.observers import Trace
    from headrace.options import Options
    from headrace.probing.alignment import Alignment
    from headrace.progress import Progress
    from headrace.reading import explain, read_into, trace, write_from
    from headrace.report import Explanation, Report

__version__ = "0.1.0"

__all__ = [
    "Alignment",
    "BufferMismatch",
    "Context",
    "DeviceError",
    "Diagnosis",
    "Explanation",
    "FormatError",
    "HeadraceError",
    "Options",
    "Progress",
    "Report",
    "RouteUnavailable",
    "ShortRead",
    "SourceChanged",
    "Trace",
    "TransferFuture",
    "alignment",
    "default_context",
    "doctor",
    "explain",
    "read_into",
    "trace",
    "write_from",
]


def __getattr__(name: str) -> Any:
    # Loaded at first use (PEP 562): `import headrace` must cost next to nothing.
    for module, names in (
        ("headrace.reading", ("explain", "read_into", "trace", "write_from")),
        ("headrace.context", ("Context", "default_context")),
        ("headrace.diagnosis", ("Diagnosis", "alignment", "doctor")),
        ("headrace.options", ("Options",)),
        ("headrace.probing.alignment", ("Alignment",)),
        ("headrace.progress", ("Progress",)),
        ("headrace.report", ("Explanation", "Report")),
        ("headrace.observers", ("Trace",)),
        ("headrace.futures", ("TransferFuture",)),
    ):
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

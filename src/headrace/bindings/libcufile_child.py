"""Run as a program of its own: load libcufile, ask for its version, and print what came of it.

A library can crash or hang while it is loaded, which must not happen to the process that asks.
The driver of cuFile is not opened: libcufile 1.16 to 1.20 never return from that on some machines.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys


def _find_bindings() -> dict[str, str]:
    """Import NVIDIA's binding, and let its own search find the library."""
    try:
        importlib.import_module("cuda.bindings.cufile")
    except (ImportError, OSError, RuntimeError) as error:
        return {"bindings": "", "bindings_error": f"{type(error).__name__}: {error}"}
    version = getattr(importlib.import_module("cuda.bindings"), "__version__", "unknown version")
    return {"bindings": str(version)}


def _load(path: str) -> dict[str, str]:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return {"load_error": str(error)}
    version = ctypes.c_int()
    try:
        code = library.cuFileGetVersion(ctypes.byref(version))
    except AttributeError:
        return {"version": "before 1.8"}
    # 1200 is 1.20.0: thousands, tens, units.
    number = version.value
    text = f"{number // 1000}.{number % 1000 // 10}.{number % 10}"
    return {"version": text if code == 0 else f"cuFileGetVersion answers {code}"}


if __name__ == "__main__":
    os.environ["CUFILE_LOGFILE_PATH"] = os.devnull
    answer = _find_bindings()
    if len(sys.argv) > 1:
        answer.update(_load(sys.argv[1]))
    sys.stdout.write(json.dumps(answer))

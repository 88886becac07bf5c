"""What `import headrace` costs and pulls in, in interpreters of its own.

Times are what the import adds to the framework's own, the best of five runs: the machine may be
busy, but cannot make code faster than it is. The limits are those of DESIGN, without a margin; on
the machine of 2 CPUs where they were set the best of five is under a third of them.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support import run_python

NUMPY_LIMIT_S = 0.030
TORCH_LIMIT_S = 0.020
RUNS = 5
HEAVY = (
    *("torch", "cupy", "cuda", "jax", "rich", "typer", "click", "ml_dtypes", "safetensors"),
    *("xxhash", "pytest", "hypothesis", "kvikio"),
)

TIME = """
import sys, time
import {framework}
began = time.perf_counter()
import {module}
print(time.perf_counter() - began)
"""
MODULES = """
import json, sys
import numpy
before = set(sys.modules)
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def best_time(framework: str, module: str, limit_s: float) -> float:
    """Seconds that importing `module` adds; stops as soon as one run is below the limit."""
    best = float("inf")
    for _ in range(RUNS):
        best = min(best, float(run_python(TIME.format(framework=framework, module=module))))
        if best < limit_s:
            break
    return best


def added(module: str) -> set[str]:
    """Top-level packages that importing `module` brings in beside NumPy's."""
    return {name.split(".")[0] for name in json.loads(run_python(MODULES.format(module=module)))}


@pytest.mark.parametrize("module", ["headrace", "headrace.numpy"])
def test_import_brings_in_no_framework_and_nothing_of_the_command_line(module: str) -> None:
    assert added(module).isdisjoint(HEAVY)


def test_import_of_the_package_alone_does_not_even_need_numpy() -> None:
    code = "import sys, headrace; print(sorted({'numpy', 'headrace'} & set(sys.modules)))"
    assert "headrace" in run_python(code)


def test_import_adds_under_thirty_milliseconds_to_numpys() -> None:
    assert best_time("numpy", "headrace", NUMPY_LIMIT_S) < NUMPY_LIMIT_S


def test_import_of_the_numpy_namespace_adds_under_thirty_milliseconds_to_numpys() -> None:
    assert best_time("numpy", "headrace.numpy", NUMPY_LIMIT_S) < NUMPY_LIMIT_S


def test_import_of_the_torch_namespace_adds_under_twenty_milliseconds_to_torchs() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    assert best_time("torch", "headrace.torch", TORCH_LIMIT_S) < TORCH_LIMIT_S


def test_import_starts_no_thread_and_reads_no_environment() -> None:
    code = """
import os, threading
class Watched(dict):
    def __getitem__(self, key):
        raise AssertionError(f"the environment was asked for {key}")
    get = __getitem__
import numpy
os.environ = Watched()
import headrace
headrace.Context, headrace.explain, headrace.read_into, headrace.trace, headrace.Options
import headrace.numpy
print(threading.active_count())
"""
    assert run_python(code).strip() == "1"


def test_whole_load_from_files_brings_in_no_framework() -> None:
    code = """
import json, sys, tempfile
import numpy
from safetensors.numpy import save_file
import headrace.numpy
with tempfile.TemporaryDirectory() as folder:
    save_file({"a": numpy.zeros(3)}, f"{folder}/model.safetensors")
    headrace.numpy.load_file(f"{folder}/model.safetensors")
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    heavy = set(HEAVY) - {"safetensors"}
    assert heavy.isdisjoint(json.loads(run_python(code)))

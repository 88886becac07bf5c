"""For tests, ours and yours: fakes of what headrace stands on, and suites to inherit.

The fakes need nothing but headrace; the suites bring pytest and Hypothesis in (extra ``test``)
when they are first asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.testing.fake_array import FakeDeviceArray
from headrace.testing.fake_cuda import FakeCuda
from headrace.testing.fake_cufile import FakeCuFile
from headrace.testing.faulty_files import FaultyFiles
from headrace.testing.faulty_writing import Killed

if TYPE_CHECKING:
    from headrace.testing.engine_suite import EngineSuite
    from headrace.testing.format_suite import FormatSuite
    from headrace.testing.write_suite import WriteSuite

__all__ = [
    "EngineSuite",
    "FakeCuFile",
    "FakeCuda",
    "FakeDeviceArray",
    "FaultyFiles",
    "FormatSuite",
    "Killed",
    "WriteSuite",
]


def __getattr__(name: str) -> Any:
    modules = {
        "EngineSuite": "headrace.testing.engine_suite",
        "FormatSuite": "headrace.testing.format_suite",
        "WriteSuite": "headrace.testing.write_suite",
    }
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if modules[name] not in sys.modules:
        import pytest

        # Without it a failed assertion of the suite would not show its values.
        shared = [f"headrace.testing.{name}" for name in ("route_suite", "write_checks")]
        pytest.register_assert_rewrite(modules[name], *shared)
    return getattr(import_module(modules[name]), name)

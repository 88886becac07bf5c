"""Markers for hardware and rights, the option that makes a missing GPU a failure, and Ctrl-C."""

from __future__ import annotations

import os
import signal

import pytest

from headrace.errors import DeviceError

pytest.register_assert_rewrite(
    "headrace.testing.engine_suite",
    "headrace.testing.format_suite",
    "headrace.testing.route_suite",
    "headrace.testing.write_checks",
    "headrace.testing.write_suite",
    "tests.engines.gds_suite",
)

_DEVICES = pytest.StashKey[int]()
_DEVICES_NEEDED = {"gpu": 1, "gpu2": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, rather than skip, the tests for which too few CUDA devices are visible",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell in the background starts its children with SIGINT ignored, and Python leaves it so.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    needed = max(n if item.get_closest_marker(m) else 0 for m, n in _DEVICES_NEEDED.items())
    if not needed or needed <= _count_devices(item.config):
        return
    why = f"needs {needed} CUDA devices; {_count_devices(item.config)} are visible"
    if item.config.getoption("--require-gpu"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def _count_devices(config: pytest.Config) -> int:
    """Ask CUDA once, and only when a test needs a device."""
    if _DEVICES not in config.stash:
        config.stash[_DEVICES] = _ask_cuda()
    return config.stash[_DEVICES]


def _ask_cuda() -> int:
    from headrace.bindings.cuda import CudaRuntime

    try:
        return CudaRuntime().device_count()
    except (ImportError, DeviceError, RuntimeError):
        # cuda.bindings raises RuntimeError where the driver's library is missing.
        return 0

from __future__ import annotations

from typing import NoReturn

from headrace.errors import DeviceError
from headrace.probing.gpu import probe_gpu
from headrace.testing import FakeCuda


def test_devices_are_counted() -> None:
    assert probe_gpu(lambda: FakeCuda(), 0).holds
    assert probe_gpu(lambda: FakeCuda(), 0).found == "1 device"
    assert probe_gpu(lambda: FakeCuda(devices=3), 2).found == "3 devices"


def test_ordinal_that_is_not_there_is_named_beside_the_count() -> None:
    fact = probe_gpu(lambda: FakeCuda(devices=2), 2)
    assert (fact.holds, fact.found) == (False, "2 devices, so no cuda:2")
    assert "CUDA_VISIBLE_DEVICES" in fact.remedy


def test_missing_bindings_are_a_fact_that_says_what_to_install() -> None:
    def load() -> NoReturn:
        raise ModuleNotFoundError("No module named 'cuda'")

    fact = probe_gpu(load, 0)
    assert (fact.holds, fact.found) == (False, "no CUDA bindings")
    assert "No module named 'cuda'" in fact.why
    assert "[cuda13]" in fact.remedy


def test_no_device_is_a_fact_that_says_where_to_look() -> None:
    fact = probe_gpu(lambda: FakeCuda(devices=0), 0)
    assert (fact.holds, fact.found) == (False, "0 devices")
    assert "CUDA_VISIBLE_DEVICES" in fact.remedy


def test_driver_that_refuses_is_a_fact_with_its_own_words() -> None:
    class Refusing(FakeCuda):
        def device_count(self) -> int:
            raise DeviceError("cudaGetDeviceCount failed: cudaErrorInsufficientDriver (35): old")

    fact = probe_gpu(Refusing, 0)
    assert fact.holds is False
    assert "cudaErrorInsufficientDriver (35)" in fact.why
    assert "driver" in fact.remedy

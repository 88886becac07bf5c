from __future__ import annotations

from typing import Any

import pytest

from headrace.options import Options
from headrace.planning.effort import choose_workers
from headrace.types import HOST, Device
from tests.support import CUDA, make_facts

LARGE = 8 << 30


def workers(device: Device, nbytes: int = LARGE, cpus: int = 16, **how: Any) -> int:
    busy = how.pop("busy", False)
    return choose_workers(Options(**how), make_facts(cpus=cpus, busy=busy).machine, device, nbytes)


@pytest.mark.parametrize("device", [HOST, CUDA], ids=str)
@pytest.mark.parametrize("cpus", [1, 2, 4, 16, 200])
def test_chosen_number_of_workers_is_taken_as_it_is(device: Device, cpus: int) -> None:
    assert workers(device, cpus=cpus, workers=37, policy="cpu") == 37


@pytest.mark.parametrize("device", [HOST, CUDA], ids=str)
@pytest.mark.parametrize("cpus", [4, 8, 16, 64, 200])
def test_large_load_takes_more_threads_where_there_are_more_cpus_up_to_a_limit(
    device: Device, cpus: int
) -> None:
    assert min(cpus, 8) <= workers(device, cpus=cpus) <= min(cpus, 16)
    assert workers(device, cpus=cpus) <= workers(device, cpus=2 * cpus)


@pytest.mark.parametrize("cpus", [1, 2, 3])
def test_small_machine_still_gets_enough_to_keep_a_disk_busy(cpus: int) -> None:
    assert workers(HOST, cpus=cpus) == workers(CUDA, cpus=cpus) == 4


def test_small_load_takes_fewer_threads() -> None:
    assert workers(CUDA, nbytes=25 << 20) < workers(CUDA)


@pytest.mark.parametrize("device", [HOST, CUDA], ids=str)
@pytest.mark.parametrize("cpus", [1, 2, 4, 8, 16, 64])
def test_thrift_never_takes_more_threads_than_speed_nor_more_than_half_the_cpus(
    device: Device, cpus: int
) -> None:
    thrifty = workers(device, cpus=cpus, policy="cpu")
    assert 1 <= thrifty <= max(cpus // 2, 1)
    assert thrifty <= workers(device, cpus=cpus)


def test_auto_policy_is_thrifty_while_the_cpus_are_busy() -> None:
    assert workers(CUDA, policy="auto", busy=True) == workers(CUDA, policy="cpu")
    assert workers(CUDA, policy="auto", busy=False) == workers(CUDA, policy="speed")

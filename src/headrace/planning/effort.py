"""How many threads a transfer deserves."""

from __future__ import annotations

from headrace.options import Options
from headrace.probing.machine import MachineFacts
from headrace.types import Device

_GPU_WORKERS = 11
_HOST_WORKERS = 16
_THRIFTY_WORKERS = 8
_FEWEST_WORKERS = 4
_MEDIUM_NBYTES = 512 << 20
# Measured on 16 CPUs with blocks of 4 MiB. To the GPU, 10 to 12 threads saturate the link; more of
# them lose up to a quarter, above all where neighbours take CPU time; 8 reach nine tenths with a
# fifth less CPU. Below half a gigabyte 8 threads are as fast as more. Host memory goes on gaining
# up to 16. Direct I/O sleeps while the disk works, so that even a small machine gets 4.


def choose_workers(options: Options, machine: MachineFacts, device: Device, nbytes: int) -> int:
    """Most threads for a transfer.

    Parameters
    ----------
    options
        ``workers`` is taken as it is; else ``policy`` decides between speed and thrift.
    machine
        CPUs, and whether they are busy.
    device
        Destination.
    nbytes
        Bytes to move.
    """
    if options.workers is not None:
        return options.workers
    limit = _HOST_WORKERS if device.is_host else _GPU_WORKERS
    if is_thrifty(options, machine):
        return max(1, min(_THRIFTY_WORKERS, machine.cpus // 2))
    if nbytes < _MEDIUM_NBYTES:
        limit = _THRIFTY_WORKERS
    return min(limit, max(machine.cpus, _FEWEST_WORKERS))


def is_thrifty(options: Options, machine: MachineFacts) -> bool:
    """Whether CPU time counts for more than speed: asked for, or "auto" on busy CPUs."""
    return options.policy == "cpu" or (options.policy == "auto" and machine.busy.holds is True)

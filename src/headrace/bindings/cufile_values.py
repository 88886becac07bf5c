"""What cuFile is asked for and answers, as plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from headrace.bindings.cufile_errors import FIRST_CODE, CuFileError
from headrace.errors import DeviceError

Kind = Literal["reads", "writes"]
"""Which way bytes go."""

_WAYS = ("p2p", "nvfs", "posix")
_PENDING = -(1 << 63)  # no count and no code


@dataclass(frozen=True, slots=True)
class Counters:
    """How many operations went which way; None where the source of the numbers does not tell."""

    source: str
    """Who counted."""
    p2p_reads: int | None = None
    """Reads by PCI peer-to-peer DMA, without nvidia-fs."""
    nvfs_reads: int | None = None
    """Reads through nvidia-fs."""
    posix_reads: int | None = None
    """Reads through host memory: cuFile's compatibility mode."""
    unaligned_reads: int | None = None
    """Reads whose offset, length or address was not aligned, whatever the way."""
    p2p_writes: int | None = None
    """Writes by PCI peer-to-peer DMA."""
    nvfs_writes: int | None = None
    """Writes through nvidia-fs."""
    posix_writes: int | None = None
    """Writes through host memory."""
    unaligned_writes: int | None = None
    """Writes that were not aligned."""
    read_nbytes: int | None = None
    """Bytes that reads asked for, which past the end of a file is more than they got."""
    written_nbytes: int | None = None
    """Bytes that writes asked for."""

    def __sub__(self, earlier: Counters) -> Counters:
        """What happened since `earlier`."""
        names = [field.name for field in fields(self) if field.name != "source"]
        return Counters(
            self.source,
            **{name: _minus(getattr(self, name), getattr(earlier, name)) for name in names},
        )

    def by_way(self, kind: Kind) -> dict[str, int]:
        """How many of its operations went each way, of the ways that are counted."""
        counts = {way: getattr(self, f"{way}_{kind}") for way in (*_WAYS, "unaligned")}
        return {way: count for way, count in counts.items() if count is not None}

    def compatibility(self, kind: Kind) -> bool | None:
        """Whether all of them went through host memory; None where that cannot be told."""
        ways = self.by_way(kind)
        if "posix" not in ways:
            return None
        return ways["posix"] > 0 and not ways.get("p2p") and not ways.get("nvfs")

    def describe(self, kind: Kind) -> str:
        """One line for the report."""
        told = ", ".join(f"{count} {way}" for way, count in self.by_way(kind).items())
        return f"{self.source}: {told} {kind}"

    @classmethod
    def from_level3(cls, record: Any) -> Counters:
        """Add up the GPUs of a ``CUfileStatsLevel3_t``, given as a NumPy record."""
        gpus = record["per_gpu_stats"][: int(record["num_gpus"])]
        counts = {
            f"{way}_{kind}": int(gpus[f"n_{way}_{kind}"].sum())
            for way in (*_WAYS, "unaligned")
            for kind in ("reads", "writes")
        }
        basic = record["detailed"]["basic"]
        moved = {
            "read_nbytes": int(basic["read_bytes"]),
            "written_nbytes": int(basic["write_bytes"]),
        }
        return cls("cuFile statistics", **counts, **moved)


def parse_nvidia_fs(text: str | None) -> Counters | None:
    """Read ``/proc/driver/nvidia-fs/stats``; None where it says nothing.

    It counts what all processes do through nvidia-fs, and nothing that cuFile does without it.
    """
    counts = dict(re.findall(r"^(Reads|Writes)\s*:\s*n=(\d+)", text or "", re.MULTILINE))
    if "Reads" not in counts:
        return None
    return Counters(
        "nvidia-fs statistics of all processes",
        nvfs_reads=int(counts["Reads"]),
        nvfs_writes=int(counts["Writes"]) if "Writes" in counts else None,
    )


class StreamCount:
    """Outcome of a read or write in stream order; known once the stream got there."""

    __slots__ = ("_call", "_numbers")

    def __init__(self, call: str, nbytes: int, file_offset: int) -> None:
        self._call = call
        self._numbers = np.array([nbytes, file_offset, 0, _PENDING], dtype=np.int64)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Where length, file offset, buffer offset and outcome are, for the C call."""
        first = self._numbers.ctypes.data
        return first, first + 8, first + 16, first + 24

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return int(self._numbers[3]) != _PENDING

    def settle(self, outcome: int) -> None:
        """Note a byte count or a negative code, as the C library does."""
        self._numbers[3] = outcome

    def result(self) -> int:
        """Bytes that were moved.

        Raises
        ------
        DeviceError
            It failed, or the stream has not got there: synchronize it first.
        """
        outcome = int(self._numbers[3])
        if outcome == _PENDING:
            raise DeviceError(f"{self._call} is not done yet; synchronize its stream first")
        return checked_count(self._call, outcome)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One read or write of a batch."""

    handle: int
    """From `CuFile.register_handle`."""
    pointer: int
    """Base address on the GPU."""
    nbytes: int
    """Length."""
    file_offset: int
    """First byte in the file."""
    buffer_offset: int = 0
    """First byte after `pointer`."""
    write: bool = False
    """To the file, instead of from it."""
    cookie: int = 0
    """Comes back in the `BatchEvent`."""


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """A request of a batch that is done."""

    cookie: int
    """The request's."""
    complete: bool
    """Whether it succeeded."""
    outcome: int
    """Bytes moved, or a code, as cuFile gives it."""

    def result(self) -> int:
        """Bytes that were moved.

        Raises
        ------
        DeviceError
            The request failed.
        """
        signed = self.outcome - (1 << 64) if self.outcome >> 63 else self.outcome
        if not self.complete and signed >= 0:
            raise CuFileError("cuFileBatchIOGetStatus", signed)
        return checked_count("cuFileBatchIOGetStatus", signed)


def checked_count(call: str, outcome: int) -> int:
    """Give back a byte count; raise what a negative number stands for."""
    if outcome < -FIRST_CODE:
        raise CuFileError(call, -outcome)
    if outcome < 0:
        raise OSError(-outcome, f"{call} failed")
    return outcome


def _minus(now: int | None, earlier: int | None) -> int | None:
    return None if now is None or earlier is None else now - earlier

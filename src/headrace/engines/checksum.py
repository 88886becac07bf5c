"""Checksums: XXH3-64 of buffers on any devices.

Host memory is hashed where it lies; what is on a GPU passes through the ring's blocks. A hash needs
the bytes of a buffer in order, so each buffer has one worker, and workers share the buffers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.bindings.pymemory import view_memory
from headrace.engines.base import Cargo, Tally, share_out
from headrace.engines.ring import Part, Ring
from headrace.memory.buffer import Buffer
from headrace.types import Device

if TYPE_CHECKING:
    from xxhash import xxh3_64

_LONGEST_PIECE_NBYTES = 4 << 20
"""Of host memory, so that an interrupt is not kept waiting: a fraction of a millisecond."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Checksums of some buffers."""

    by_buffer: tuple[str, ...]
    """XXH3-64 of each: 16 hexadecimal digits in small letters."""
    cpu_seconds: float
    """User and system seconds of the workers' threads."""


def load_xxh3() -> type[xxh3_64]:
    """The hash.

    Raises
    ------
    ImportError
        ``xxhash`` is not installed.
    """
    try:
        from xxhash import xxh3_64
    except ImportError as error:
        raise ImportError(
            f"checksums need the package xxhash ({error}); install headrace with its extra "
            "[checksum], or go without checksums",
            name="xxhash",
        ) from error
    return xxh3_64


def digest(cargo: Cargo, ring: Ring | None) -> Digests:
    """Hash the buffers of a cargo.

    Parameters
    ----------
    cargo
        Its buffers, workers, block size, fence and progress callback are used.
    ring
        Brings what is on GPUs; None where nothing is.

    Raises
    ------
    ImportError
        ``xxhash`` is not installed.
    DeviceError
        The GPU refused.
    """
    xxh3 = load_xxh3()
    found = [xxh3().hexdigest()] * len(cargo.buffers)  # where there is no byte, that is it

    def work(loads: _Loads, tally: Tally) -> None:
        hashing = _Hashing(xxh3, cargo.buffers, found, tally)
        for device in loads.devices():
            if ring is None or device.is_host:
                _hash_in_place(loads.batches(device), cargo.buffers, hashing)
            else:
                ring.bring(device.index, cargo, loads.batches(device), hashing.add)

    tallies = share_out(work, _Loads(cargo.buffers, cargo.block_nbytes), cargo)
    return Digests(tuple(found), sum(tally.cpu_seconds for tally in tallies))


def _hash_in_place(
    batches: Iterable[Sequence[Part]], buffers: Sequence[Buffer], hashing: _Hashing
) -> None:
    for part in itertools.chain.from_iterable(batches):
        hashing.add(part, view_memory(buffers[part.buffer].pointer + part.start, part.nbytes))


class _Hashing:
    """What one worker hashes: buffer after buffer, each from its first byte to its last."""

    def __init__(
        self, xxh3: type[xxh3_64], buffers: Sequence[Buffer], found: list[str], tally: Tally
    ) -> None:
        self._start = xxh3
        self._state = xxh3()
        self._buffers = buffers
        self._found = found
        self._tally = tally

    def add(self, part: Part, view: memoryview) -> None:
        """Hash the next part."""
        if part.start == 0:
            self._state = self._start()
        self._state.update(view)
        self._tally.moved_nbytes += part.nbytes
        if part.start + part.nbytes == self._buffers[part.buffer].nbytes:
            self._found[part.buffer] = self._state.hexdigest()


class _Loads:
    """Loads that workers take one after the other: a big buffer, or small ones that fill a block.

    The biggest come first, so that no worker is left with one of them at the end.
    """

    def __init__(self, buffers: Sequence[Buffer], block_nbytes: int) -> None:
        self._buffers = buffers
        self._block_nbytes = block_nbytes
        self._stopped = False
        by_device: dict[Device, list[int]] = {}
        for index in sorted(range(len(buffers)), key=lambda index: -buffers[index].nbytes):
            if buffers[index].nbytes:
                by_device.setdefault(buffers[index].device, []).append(index)
        self._waiting = {
            device: deque(self._group(indexes)) for device, indexes in by_device.items()
        }

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def devices(self) -> Iterator[Device]:
        """Devices with loads that nobody has taken yet."""
        return (device for device, waiting in self._waiting.items() if waiting)

    def stop(self) -> None:
        """Give out no more parts."""
        self._stopped = True

    def batches(self, device: Device) -> Iterator[list[Part]]:
        """Take loads until there are no more, and cut them into what fits into a block."""
        nbytes = self._block_nbytes
        if device.is_host:
            nbytes = min(nbytes, _LONGEST_PIECE_NBYTES)
        for load in iter(partial(_take, self._waiting[device]), None):
            for batch in self._cut(load, nbytes):
                if self._stopped:
                    return
                yield batch

    def _group(self, indexes: Iterable[int]) -> Iterator[list[int]]:
        load: list[int] = []
        nbytes = 0
        for index in indexes:
            load.append(index)
            nbytes += self._buffers[index].nbytes
            if nbytes >= self._block_nbytes:
                yield load
                load, nbytes = [], 0
        if load:
            yield load

    def _cut(self, load: Iterable[int], block_nbytes: int) -> Iterator[list[Part]]:
        batch: list[Part] = []
        room = block_nbytes
        for index in load:
            start, stop = 0, self._buffers[index].nbytes
            while start < stop:
                batch.append(Part(index, start, min(room, stop - start)))
                start += batch[-1].nbytes
                room -= batch[-1].nbytes
                if not room:
                    yield batch
                    batch, room = [], block_nbytes
        if batch:
            yield batch


def _take(waiting: deque[list[int]]) -> list[int] | None:
    """The next load, for one thread only; None when there are no more."""
    try:
        return waiting.popleft()
    except IndexError:
        return None

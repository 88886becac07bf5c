"""Other ways to bring a raw file to its destination."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestants import Contestant
from benchmarks.memory import Arrays, Memory
from benchmarks.result import Role

KVIKIO_TUNED = "KvikIO tuned"
"""Family of the tuned KvikIO contestants."""

_MIB = 1 << 20
_WARM_NBYTES = 256 * _MIB


class NumpyFromfile(Contestant):
    """``np.fromfile``, then a copy to the device: what most scripts do."""

    package = "numpy"

    def __init__(self, memory: Memory) -> None:
        super().__init__(f"np.fromfile{_copying(memory)}", ("numpy",))
        self._memory = memory

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        return {"": _to_device(np.fromfile(source, np.uint8), self._memory)}


class NumpyMemmap(Contestant):
    """``np.memmap``, then a copy to the device, or in host memory."""

    package = "numpy"

    def __init__(self, memory: Memory) -> None:
        super().__init__("np.memmap + copy", ("numpy",))
        self._memory = memory

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        mapped = np.memmap(source, np.uint8, mode="c")
        if self._memory.framework == "numpy":
            return {"": np.array(mapped)}
        return {"": _to_device(mapped, self._memory)}


class DirectThreads(Contestant):
    """Plain threads with O_DIRECT into host memory, 4 MiB at a time."""

    package = "python"

    def __init__(self, threads: int) -> None:
        super().__init__(f"O_DIRECT preadv, {threads} threads", ())
        self._threads = threads

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        nbytes = source.stat().st_size
        block = 4 * _MIB
        buffer = memoryview(mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
        fd = os.open(source, os.O_RDONLY | os.O_DIRECT)

        def read(start: int) -> None:
            stop = min(start + block, len(buffer))
            while start < min(stop, nbytes):
                count = os.preadv(fd, [buffer[start:stop]], start)
                if count == 0:
                    raise EOFError(f"the file ends at {start}")
                start += count

        try:
            with ThreadPoolExecutor(self._threads) as pool:
                for _ in pool.map(read, range(0, nbytes, block)):
                    pass  # raises here what a thread raised
        finally:
            os.close(fd)
        return {"": np.frombuffer(buffer, np.uint8, nbytes)}


class Kvikio(Contestant):
    """KvikIO into memory that is there already.

    Parameters
    ----------
    target
        Array that receives the bytes.
    settings
        Threads and task size in MiB, in its compatibility mode; None leaves all at its defaults.
    compat
        Its compatibility mode: ``"ON"`` reads without cuFile, ``"OFF"`` through cuFile alone.
    """

    package = "kvikio-cu13"

    def __init__(
        self, target: Any, settings: tuple[int, int] | None = None, *, compat: str = "ON"
    ) -> None:
        name, role, family = "KvikIO default", Role.PEER, None
        if settings is not None:
            role, family = Role.PEER_TUNED, KVIKIO_TUNED if compat == "ON" else None
            which = family or f"KvikIO, compat mode {compat}"
            name = f"{which}, {settings[0]} threads x {settings[1]} MiB"
        super().__init__(name, ("kvikio", "kvikio.defaults"), role, family)
        self._target = target
        self._settings = settings
        self._compat = compat

    @contextmanager
    def session(self, path: Path) -> Iterator[None]:
        """See `Participant.session`; a short read starts the new threads and their buffers."""
        import kvikio
        import kvikio.defaults

        settings: dict[str, Any] = {}
        if self._settings is not None:
            threads, task_mib = self._settings
            settings = {
                "compat_mode": getattr(kvikio.CompatMode, self._compat),
                "num_threads": threads,
                "task_size": task_mib * _MIB,
            }
        with kvikio.defaults.set(settings):
            with kvikio.CuFile(path, "r") as file:
                file.read(self._target, min(_WARM_NBYTES, len(self._target)))
            yield

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        import kvikio

        with kvikio.CuFile(source, "r") as file:
            count = file.read(self._target)
        if count != len(self._target):
            raise EOFError(f"KvikIO read {count} of {len(self._target)} bytes")
        return {"": self._target}


def raw_peers(memory: Memory, target: Any) -> Sequence[Contestant]:
    """Every peer that reads a raw file into this memory."""
    plain = (NumpyFromfile(memory), NumpyMemmap(memory))
    if memory.framework != "torch":
        return (*plain, DirectThreads(8))
    tuned = itertools.product((4, 8, 16), (4, 8, 16))
    return (*plain, Kvikio(target), *(Kvikio(target, settings) for settings in tuned))


def _copying(memory: Memory) -> str:
    return "" if memory.framework == "numpy" else " + copy"


def _to_device(array: Any, memory: Memory) -> Any:
    if memory.framework == "numpy":
        return array
    import torch

    return torch.from_numpy(array).to(memory.device)

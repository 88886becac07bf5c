"""The memory of a FakeCuda: which addresses are whose, and what may not be done with them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from headrace.errors import DeviceError


@dataclass(slots=True, eq=False)
class Block:
    """Memory of a device, or page-locked host memory."""

    pointer: int
    """Address of its first byte."""
    nbytes: int
    """Length in bytes."""
    device: int | None
    """Ordinal of the device; None for host memory."""
    owner: mmap.mmap | None = None
    """What keeps the memory of a device; None for host memory."""
    alive: bool = True
    """False once it was freed or unpinned."""
    read_only: bool = False
    """Whether it was registered for reading alone."""

    def __str__(self) -> str:
        where = "pinned" if self.device is None else f"device {self.device}"
        return f"{where} memory at {self.pointer:#x} ({self.nbytes} bytes)"

    def holds(self, pointer: int, nbytes: int) -> bool:
        """Whether all these bytes are in it."""
        return self.pointer <= pointer <= pointer + nbytes <= self.pointer + self.nbytes

    def meets(self, pointer: int, nbytes: int) -> bool:
        """Whether any of these bytes is in it."""
        return pointer - self.nbytes < self.pointer < pointer + nbytes


FindBlock = Callable[[str, int, int], Block | None]
"""Block that a call needs for so many bytes at an address; None where they are pageable."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """Raises errors as CUDA words them, and keeps those that are misuse."""

    misuses: list[str]
    """Every misuse so far."""

    def __call__(
        self, call: str, name: str, code: int, what: str, *, misuse: bool = True
    ) -> NoReturn:
        """Raise `DeviceError`; an injected failure is no `misuse`."""
        message = f"{call} failed: {name} ({code}): {what}"
        self.misuses.extend([message] if misuse else [])
        raise DeviceError(message)


@dataclass(frozen=True, slots=True)
class Blocks:
    """All memory that a fake CUDA knows; the caller holds the lock."""

    refuse: Refusals
    """What raises on misuse."""
    _blocks: dict[int, Block] = field(default_factory=dict, init=False)

    def add(self, block: Block) -> None:
        """Know a block, under its address."""
        self._blocks[block.pointer] = block

    def allocate(self, nbytes: int, device: int) -> int:
        """Make memory of a device, of zeros, and return its address."""
        owner = mmap.mmap(-1, nbytes)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(owner))
        self.add(Block(pointer, nbytes, device, owner))
        return pointer

    def remove(self, call: str, pointer: int, *, pinned: bool) -> Block:
        """Forget the block that starts at `pointer`; it is dead to the copies that name it."""
        block = self._blocks.get(pointer)
        if block is None or (block.device is None) != pinned:
            what = f"{pointer:#x} is not the start of live memory of this kind"
            self.refuse(call, "cudaErrorInvalidValue", 1, what)
        block.alive = False
        del self._blocks[pointer]
        return block

    def met_by(self, pointer: int, nbytes: int) -> list[Block]:
        """Blocks that any of these bytes is in."""
        return [block for block in self._blocks.values() if block.meets(pointer, nbytes)]

    def on_device(self, call: str, pointer: int, nbytes: int) -> Block:
        """Device memory that holds all these bytes."""
        met = self.met_by(pointer, nbytes)
        if not met or met[0].device is None or not met[0].holds(pointer, nbytes):
            self._refuse_pointer(call, "device", pointer, nbytes)
        return met[0]

    def on_host(self, call: str, pointer: int, nbytes: int) -> Block | None:
        """Pinned memory that holds all these bytes; None where they are pageable."""
        met = self.met_by(pointer, nbytes)
        if any(block.device is not None or not block.holds(pointer, nbytes) for block in met):
            self._refuse_pointer(call, "host", pointer, nbytes)
        return met[0] if met else None

    def writable_on_host(self, call: str, pointer: int, nbytes: int) -> Block | None:
        """As `on_host`, for a destination: memory registered for reading alone is refused."""
        block = self.on_host(call, pointer, nbytes)
        if block is not None and block.read_only:
            self.refuse(call, "cudaErrorInvalidValue", 1, f"{block} is registered read-only")
        return block

    def _refuse_pointer(self, call: str, kind: str, pointer: int, nbytes: int) -> NoReturn:
        what = f"{nbytes} bytes at {pointer:#x} are not inside one allocation of {kind} memory"
        self.refuse(call, "cudaErrorInvalidValue", 1, what)


def move(destination: int, source: int, nbytes: int, *, of_file: bool, to_locked: bool) -> None:
    """Copy bytes; out of a mapped file, and into what may be one, through the kernel.

    A file that was truncated meanwhile would kill a process that touches its mapping; CUDA copies
    from and to the old pages.
    """
    data = _read_memory(source, nbytes) if of_file else ctypes.string_at(source, nbytes)
    if to_locked:
        _write_memory(destination, data)
    else:
        ctypes.memmove(destination, data, nbytes)


def _read_memory(pointer: int, nbytes: int) -> bytes:
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        data = b""
        with contextlib.suppress(OSError):  # past the end of a file that is shorter by now
            data = os.pread(memory.fileno(), nbytes, pointer)
    return data.ljust(nbytes, b"\0")


def _write_memory(pointer: int, data: bytes) -> None:
    with (
        open("/proc/self/mem", "r+b", buffering=0) as memory,
        contextlib.suppress(OSError),  # as above
    ):
        os.pwrite(memory.fileno(), data, pointer)

"""Snapshots: copies of buffers as they are now, so that their owner may change them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from headrace.bindings.cuda import LEGACY_STREAM, Copy
from headrace.bindings.pymemory import view_memory
from headrace.engines.base import Cargo, Job, Jobs, Tally, run_workers
from headrace.memory.alignment import align_up
from headrace.memory.buffer import Buffer
from headrace.options import PAGE_NBYTES
from headrace.planning.plan import Piece, Transfer
from headrace.probing.machine import MachineFacts
from headrace.report import Snapshot
from headrace.transfers import Transfers
from headrace.types import HOST, Device, Route

_MOST_OF_FREE = 0.75  # the rest is left to the program, which goes on meanwhile


class Spare(Protocol):
    """Memory of GPUs that the allocator of a framework can spare."""

    def idle_nbytes(self, device: Device) -> int:
        """Bytes that it holds of a device and has given to nobody."""

    def allocate(self, nbytes: int, device: Device) -> Buffer | None:
        """Take memory, in the order of the stream that it has then; None where there is none."""


class SnapshotTransfers(Transfers):
    """Takes snapshots: on the device where its free memory allows, else in host memory."""

    def run(
        self, buffers: Sequence[Buffer], spare: Spare, *, wait: bool
    ) -> tuple[list[Buffer], Snapshot]:
        """Copy buffers, in the order of their streams.

        Parameters
        ----------
        buffers
            On any devices; those of a GPU share one stream.
        spare
            Gives memory of a GPU.
        wait
            Wait until they are copied; else copies on a device are only enqueued on the buffers'
            streams.

        Returns
        -------
        list of Buffer, Snapshot
            The copies, in the same order, and where they are. They begin at multiples of the page
            size, and keep nothing of the buffers alive.

        Raises
        ------
        DeviceError, MemoryError
            The GPU refused; the host has no memory left.
        """
        began = time.perf_counter()
        by_number: dict[int, Buffer] = {}
        for device in dict.fromkeys(buffer.device for buffer in buffers):
            mine = {i: buffer for i, buffer in enumerate(buffers) if buffer.device == device}
            by_number |= self._copy(device, mine, spare)
        copies = [by_number[i] for i in range(len(buffers))]
        if wait:
            with self._equipment.fence(copies) as fence:
                self._equipment.wait_for(fence)
        places = dict.fromkeys(str(copy.device) for copy in copies if copy.nbytes)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        seconds = time.perf_counter() - began
        return copies, Snapshot(", ".join(places) or str(HOST), nbytes, seconds)

    def _copy(self, device: Device, buffers: dict[int, Buffer], spare: Spare) -> dict[int, Buffer]:
        """Copy the buffers of one device into one piece of memory."""
        starts, total = _string_together(buffers)
        if not total:
            return {i: replace(each, owner=None, stream=None) for i, each in buffers.items()}
        room = total + PAGE_NBYTES  # so that it can begin at a page
        arena = None if device.is_host else self._find_room(room, device, spare)
        if arena is None:
            memory = np.empty(room, np.uint8)
            arena = Buffer(int(memory.ctypes.data), room, HOST, memory)
        copies = _parts(arena, buffers, starts)
        if arena.device.is_host:
            self._copy_to_host(device, buffers, copies)
        else:
            self._copy_on_device(device, buffers, copies)
        return copies

    def _find_room(self, nbytes: int, device: Device, spare: Spare) -> Buffer | None:
        """Memory of the device for all copies; None where it would leave too little."""
        # What the framework keeps for itself is free for it alone, as the last snapshot's memory.
        free = self._equipment.load_cuda().free_memory(device.index) + spare.idle_nbytes(device)
        return spare.allocate(nbytes, device) if nbytes <= free * _MOST_OF_FREE else None

    def _copy_on_device(
        self, device: Device, buffers: dict[int, Buffer], copies: dict[int, Buffer]
    ) -> None:
        """Enqueue the copies, each on the stream of its buffer."""
        by_stream: dict[int, list[Copy]] = {}
        for i, buffer in buffers.items():
            if buffer.nbytes:
                copy = (copies[i].pointer, buffer.pointer, buffer.nbytes)
                by_stream.setdefault(buffer.stream or LEGACY_STREAM, []).append(copy)
        with self._equipment.on_device(device):
            for stream, parts in by_stream.items():
                self._equipment.load_cuda().copy_on_device(parts, stream)

    def _copy_to_host(
        self, device: Device, buffers: dict[int, Buffer], copies: dict[int, Buffer]
    ) -> None:
        """Copy as a write would, into memory in place of a file; done on return."""
        filled = [i for i in buffers if buffers[i].nbytes]
        base = copies[filled[0]].pointer
        pieces = tuple(
            Piece(copies[i].pointer - base, buffers[i].nbytes, number, 0)
            for number, i in enumerate(filled)
        )
        sources = [buffers[i] for i in filled]
        machine = MachineFacts(self._equipment.bindings.system)
        nbytes = sum(piece.nbytes for piece in pieces)
        with self._equipment.fence(sources) as fence:
            transfers = [Transfer(0, Route.HOST, "", pieces)]
            cargo = self._load_cargo(sources, nbytes, machine, fence, transfers=transfers)
            if device.is_host:
                self._equipment.wait_for(fence)
                _move_host(cargo, base)
            else:
                self._equipment.prepare_ring(device.index)
                self._drain(cargo, base)

    def _drain(self, cargo: Cargo, base: int) -> None:
        """Copy from a GPU, through the ring."""

        def spill(job: Job, view: memoryview) -> int:
            # What is between two pieces goes along: nobody looks at the end of a copy's last page.
            _copy_memory(base + job.start, view)
            return 0

        self._equipment.drain(cargo, spill)


def _move_host(cargo: Cargo, base: int) -> None:
    """Copy within host memory, by several threads: one alone spends its time on page faults."""

    def work(jobs: Jobs, tally: Tally) -> None:
        while (job := jobs.take()) is not None:
            for target, source, nbytes in job.copies_out(cargo.buffers, base):
                _copy_memory(target, view_memory(source, nbytes))
                tally.moved_nbytes += nbytes

    run_workers(work, cargo)


def _copy_memory(destination: int, source: memoryview) -> None:
    """Copy host memory; NumPy lets other threads run meanwhile."""
    into = np.frombuffer(view_memory(destination, len(source)), np.uint8)
    into[:] = np.frombuffer(source, np.uint8)


def _string_together(buffers: dict[int, Buffer]) -> tuple[dict[int, int], int]:
    """Where each copy begins, at multiples of the page size, and the size of all."""
    starts, stop = {}, 0
    for i, buffer in buffers.items():
        starts[i] = stop
        stop = align_up(stop + buffer.nbytes, PAGE_NBYTES)
    return starts, stop


def _parts(arena: Buffer, buffers: dict[int, Buffer], starts: dict[int, int]) -> dict[int, Buffer]:
    """The part of the arena that is the copy of each buffer."""
    base = align_up(arena.pointer, PAGE_NBYTES)
    return {
        i: replace(
            buffer,
            pointer=base + starts[i],
            device=arena.device,
            owner=arena.owner,
            stream=None if arena.device.is_host else buffer.stream or LEGACY_STREAM,
        )
        for i, buffer in buffers.items()
    }

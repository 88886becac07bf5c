"""Snapshots: copies of buffers as they are now, so that their owner may change them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from headrace.bindings.pymemory import view_memory
from headrace.engines.base import Cargo, Job
from headrace.engines.lanes import Fence
from headrace.memory.alignment import align_up
from headrace.memory.buffer import Buffer
from headrace.memory.pinned import Block
from headrace.options import PAGE_NBYTES
from headrace.planning.effort import choose_workers
from headrace.planning.plan import Piece, Transfer
from headrace.probing.machine import MachineFacts
from headrace.report import Snapshot
from headrace.transfers import Transfers
from headrace.types import HOST, Device, Route

Spare = Callable[[int, Device], Buffer | None]
"""Gives memory of a framework's own allocator; None where there is none to be had."""

_MOST_OF_FREE = 0.75  # the rest is left to the program, which goes on meanwhile


class SnapshotTransfers(Transfers):
    """Takes snapshots: on the device where its free memory allows, else in host memory."""

    def run(
        self, buffers: Sequence[Buffer], spare: Spare, *, wait: bool
    ) -> tuple[list[Buffer], Snapshot]:
        """Copy buffers, in the order of their streams.

        Parameters
        ----------
        buffers
            On any devices.
        spare
            Gives memory of a GPU.
        wait
            Wait until they are copied; else copies on a device are only enqueued on the buffers'
            streams.

        Returns
        -------
        list of Buffer, Snapshot
            The copies, in the same order, and where they are.
        """
        began = time.perf_counter()
        copies: dict[int, Buffer] = {}
        for device in dict.fromkeys(buffer.device for buffer in buffers):
            mine = {i: buffer for i, buffer in enumerate(buffers) if buffer.device == device}
            copies |= self._copy(device, mine, spare, wait)
        places = dict.fromkeys(str(copies[i].device) for i in range(len(buffers)))
        nbytes = sum(buffer.nbytes for buffer in buffers)
        seconds = time.perf_counter() - began
        snapshot = Snapshot(", ".join(places) or str(HOST), nbytes, seconds)
        return [copies[i] for i in range(len(buffers))], snapshot

    def _copy(
        self, device: Device, buffers: dict[int, Buffer], spare: Spare, wait: bool
    ) -> dict[int, Buffer]:
        """Copy the buffers of one device into one piece of memory."""
        starts, total = _string_together(buffers)
        arena = None if device.is_host else self._arena(total, device, spare)
        if arena is not None:
            copies = _parts(arena, buffers, starts)
            self._copy_on_device(buffers, copies, wait)
            return copies
        memory = np.empty(total + PAGE_NBYTES, np.uint8)
        pointer = align_up(int(memory.ctypes.data), PAGE_NBYTES)
        copies = _parts(Buffer(pointer, total, HOST, memory), buffers, starts)
        with self._equipment.fence(buffers.values()) as fence:
            if device.is_host:
                self._equipment.wait_for(fence)
                for i, buffer in buffers.items():
                    if buffer.nbytes:
                        _copy_memory(copies[i].pointer, buffer.pointer, buffer.nbytes)
            else:
                self._copy_to_host(device, buffers, starts, pointer, fence)
        return copies

    def _arena(self, nbytes: int, device: Device, spare: Spare) -> Buffer | None:
        """Memory of the device for all copies; None where it would leave too little."""
        free = self._equipment.load_cuda().free_memory(device.index)
        return spare(nbytes, device) if 0 < nbytes <= free * _MOST_OF_FREE else None

    def _copy_on_device(
        self, buffers: dict[int, Buffer], copies: dict[int, Buffer], wait: bool
    ) -> None:
        cuda = self._equipment.load_cuda()
        by_stream: dict[int, list[tuple[int, int, int]]] = {}
        for i, buffer in buffers.items():
            if buffer.nbytes and buffer.stream is not None:
                copy = (copies[i].pointer, buffer.pointer, buffer.nbytes)
                by_stream.setdefault(buffer.stream, []).append(copy)
        with self._equipment.on_device(next(iter(buffers.values())).device):
            for stream, parts in by_stream.items():
                cuda.copy_on_device(parts, stream)
        if wait:
            with self._equipment.fence(copies.values()) as fence:
                self._equipment.wait_for(fence)

    def _copy_to_host(
        self,
        device: Device,
        buffers: dict[int, Buffer],
        starts: dict[int, int],
        pointer: int,
        fence: Fence,
    ) -> None:
        """Copy through the ring, as a write would, into memory in place of a file."""
        order = list(buffers)
        pieces = tuple(
            Piece(starts[i], buffers[i].nbytes, place, 0)
            for place, i in enumerate(order)
            if buffers[i].nbytes
        )
        if not pieces:
            return
        # Each piece is a transfer of its own: there are gaps between them.
        transfers = [Transfer(0, Route.CACHED, "", (piece,)) for piece in pieces]
        machine = MachineFacts(self._equipment.bindings.system)
        nbytes = sum(piece.nbytes for piece in pieces)
        cargo = Cargo(
            transfers=transfers,
            sources=(),
            buffers=[buffers[i] for i in order],
            workers=choose_workers(self._options, machine, device, nbytes),
            block_nbytes=self._options.block_nbytes,
            fence=fence,
        )

        def spill(job: Job, block: Block) -> int:
            lead, nbytes = job.start % cargo.block_nbytes, job.stop - job.start
            _copy_memory(pointer + job.start, block.pointer + lead, nbytes)
            return 0

        self._equipment.drain(cargo, spill)


def _copy_memory(destination: int, source: int, nbytes: int) -> None:
    """Copy host memory; NumPy lets other threads run meanwhile."""
    into = np.frombuffer(view_memory(destination, nbytes), np.uint8)
    into[:] = np.frombuffer(view_memory(source, nbytes), np.uint8)


def _string_together(buffers: dict[int, Buffer]) -> tuple[dict[int, int], int]:
    """Where each copy begins, at multiples of the page size, and the size of all."""
    starts, stop = {}, 0
    for i, buffer in buffers.items():
        starts[i] = stop
        stop = align_up(stop + buffer.nbytes, PAGE_NBYTES)
    return starts, stop


def _parts(arena: Buffer, buffers: dict[int, Buffer], starts: dict[int, int]) -> dict[int, Buffer]:
    """The part of the arena that is the copy of each buffer."""
    return {
        i: replace(
            buffer,
            pointer=arena.pointer + starts[i],
            device=arena.device,
            owner=arena.owner,
            stream=None if arena.device.is_host else buffer.stream,
        )
        for i, buffer in buffers.items()
    }

"""GDS writer: cuFile writes straight out of memory of the GPU.

Of a piece that is not aligned, the ends go through the ring and the page cache: cuFile would read
the blocks around them and write these back whole, over what others write there meanwhile.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engines.base import Cargo
from headrace.engines.gds import GdsTransfer
from headrace.engines.ring import Ring
from headrace.memory.alignment import align_down, align_up
from headrace.memory.buffer import Buffer
from headrace.options import PAGE_NBYTES
from headrace.planning.plan import Piece
from headrace.storage.open_file import OpenFile
from headrace.storage.sink import Sink


class GdsWriter(GdsTransfer):
    """`Engine` from a GPU into files, through cuFile.

    Parameters
    ----------
    ring
        For the unaligned ends of pieces.
    arguments
        As for `GdsTransfer`.
    """

    kind = "writes"

    def __init__(self, ring: Ring, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ring = ring
        self._has_ends = self._is_shifted = False

    def _move(self, cargo: Cargo, handles: Mapping[int, int], index: int, piece: Piece) -> None:
        sink, (lower, upper) = cargo.sinks[index], _aligned_part(piece)
        self._write_through_ring(cargo, sink, piece, piece.file_offset, lower)
        done = lower
        while done < upper:
            done += self._write(cargo, handles[index], sink, piece, done, upper)
            whole = align_up(done, PAGE_NBYTES)  # a short count may end inside of a page
            self._write_through_ring(cargo, sink, piece, done, whole)
            done = whole
        self._write_through_ring(cargo, sink, piece, upper, piece.file_stop)

    def _write(
        self, cargo: Cargo, handle: int, sink: Sink, piece: Piece, start: int, stop: int
    ) -> int:
        """Let cuFile write whole pages of a piece; how many bytes it took."""
        pointer = cargo.buffers[piece.buffer].pointer
        place = piece.buffer_offset + start - piece.file_offset
        while True:
            try:
                count = self._cufile.write(handle, pointer, stop - start, start, place)
            except InterruptedError:
                continue
            except OSError as error:
                error.filename = sink.path
                raise
            if count:
                return count
            what = f"cuFileWrite at byte {start} of {stop} wrote nothing; check the file system"
            raise OSError(errno.EIO, what, sink.path)

    def _write_through_ring(
        self, cargo: Cargo, sink: Sink, piece: Piece, start: int, stop: int
    ) -> None:
        """Write less than a page of a piece through the ring and the page cache."""
        if start == stop:
            return
        buffer = cargo.buffers[piece.buffer]
        place = buffer.pointer + piece.buffer_offset + start - piece.file_offset
        with self._ring.fetch(buffer.device.index, place, stop - start) as view:
            sink.write([view], start)

    def _file(self, cargo: Cargo, index: int) -> OpenFile:
        return cargo.sinks[index]

    def _unaligned_nbytes(self, piece: Piece, buffers: Sequence[Buffer]) -> int:
        address = buffers[piece.buffer].pointer + piece.buffer_offset - piece.file_offset
        lower, upper = _aligned_part(piece)
        self._has_ends |= piece.nbytes > upper - lower
        if lower < upper and address % PAGE_NBYTES:
            self._is_shifted = True
            return piece.nbytes
        return piece.nbytes - (upper - lower)

    def _bounce(self, unaligned: bool) -> str:
        ends = f"{self._ring.bounce} (unaligned ends)" if self._has_ends else ""
        return " and ".join(filter(None, (super()._bounce(self._is_shifted), ends)))


def _aligned_part(piece: Piece) -> tuple[int, int]:
    """Where whole pages of a piece begin and end in the file; what lies outside is below a page."""
    lower = min(align_up(piece.file_offset, PAGE_NBYTES), piece.file_stop)
    return lower, max(align_down(piece.file_stop, PAGE_NBYTES), lower)

"""GDS writer: cuFile writes straight out of memory of the GPU.

Of a piece that is not aligned, the ends go through the ring and the page cache: cuFile would read
the blocks around them and write these back whole, over what others write there meanwhile.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from headrace.engines.base import Cargo
from headrace.engines.gds import GdsTransfer
from headrace.engines.ring import Ring
from headrace.memory.alignment import align_down, align_up
from headrace.memory.buffer import Buffer
from headrace.options import PAGE_NBYTES
from headrace.planning.plan import Piece


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

    def _move(self, cargo: Cargo, handles: Mapping[int, int], index: int, piece: Piece) -> None:
        lower, upper = _aligned_part(piece)
        sink, buffer = cargo.sinks[index], cargo.buffers[piece.buffer]
        for start, stop in ((piece.file_offset, lower), (upper, piece.file_stop)):
            if start < stop:
                place = buffer.pointer + piece.buffer_offset + start - piece.file_offset
                with self._ring.fetch(buffer.device.index, place, stop - start) as view:
                    sink.write([view], start)
        done = lower
        while done < upper:
            place = piece.buffer_offset + done - piece.file_offset
            try:
                count = self._cufile.write(
                    handles[index], buffer.pointer, upper - done, done, place
                )
            except InterruptedError:
                continue
            except OSError as error:
                error.filename = sink.path
                raise
            if count == 0:
                what = f"cuFileWrite at byte {done} of {upper} wrote nothing; check the file system"
                raise OSError(errno.EIO, what, sink.path)
            done += count

    def _descriptor(self, cargo: Cargo, index: int) -> AbstractContextManager[int]:
        sink = cargo.sinks[index]
        return nullcontext(sink.fd if sink.direct_fd is None else sink.direct_fd)

    def _unaligned_nbytes(self, piece: Piece, buffers: Sequence[Buffer]) -> int:
        address = buffers[piece.buffer].pointer + piece.buffer_offset - piece.file_offset
        lower, upper = _aligned_part(piece)
        return piece.nbytes if address % PAGE_NBYTES else piece.nbytes - (upper - lower)


def _aligned_part(piece: Piece) -> tuple[int, int]:
    """Where whole pages of a piece begin and end in the file; what lies outside is below a page."""
    lower = min(align_up(piece.file_offset, PAGE_NBYTES), piece.file_stop)
    return lower, max(align_down(piece.file_stop, PAGE_NBYTES), lower)

"""Plan and Transfer: which stretch of which file goes to which places of which buffers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from headrace.types import ByteRange, Route


class Piece(NamedTuple):
    """Bytes of a file that go to one place of one buffer.

    A tuple: one is made for each window that is moved, with the interpreter lock held.
    """

    file_offset: int
    """First byte in the file."""
    nbytes: int
    """Length; at least 1."""
    buffer: int
    """Index of the buffer."""
    buffer_offset: int
    """First byte in that buffer."""

    @property
    def file_stop(self) -> int:
        """End in the file, exclusive."""
        return self.file_offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Rejection:
    """A route that was not taken."""

    route: Route
    """The route."""
    why: str
    """The fact that ruled it out."""
    remedy: str
    """What would change it; "" where nothing needs to."""
    ruled_out: bool = True
    """Whether it could not serve, or would have been worse in every way; False for a trade."""

    def __str__(self) -> str:
        return f"{self.route}: {self.why}" + (f" ({self.remedy})" if self.remedy else "")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One stretch of one file, by one route, to one or many buffers."""

    source: int
    """Index of the file."""
    route: Route
    """How its bytes travel."""
    why: str
    """The fact that chose the route."""
    pieces: tuple[Piece, ...]
    """By rising file offset, not overlapping; gaps between them are not wanted."""
    keep_clean: bool = False
    """Drop the stretch from the page cache after a buffered read (``reuse="once"``)."""

    @property
    def file_range(self) -> ByteRange:
        """From the first wanted byte to the last."""
        return ByteRange(self.pieces[0].file_offset, self.pieces[-1].file_stop)

    @property
    def nbytes(self) -> int:
        """Wanted bytes, without gaps."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a load will do."""

    transfers: tuple[Transfer, ...]
    """In file order, per file."""
    rejected: tuple[Rejection, ...]
    """Every route that some stretch did not take, with the reason; no duplicates."""
    downgrades: tuple[Rejection, ...]
    """Those rejections that cost a stretch its first-choice route."""
    resident_nbytes: int
    """Wanted bytes that the page cache held when the plan was made."""

    def uses(self, *routes: Route) -> bool:
        """Whether some stretch takes one of the routes."""
        return any(transfer.route in routes for transfer in self.transfers)

    def takes_only(self, route: Route) -> bool:
        """Whether every stretch takes that route."""
        return all(transfer.route is route for transfer in self.transfers)

    def warned(self, downgrade: Rejection) -> Plan:
        """The same plan, with a downgrade of a route that was taken all the same."""
        return replace(self, downgrades=(*self.downgrades, downgrade))

    def rerouted(self, rejection: Rejection, taken: Route) -> Plan:
        """The same plan, once a route in it could not serve and another one did its part."""
        others = [r for r in self.rejected if r.route not in (rejection.route, taken)]
        return replace(self, rejected=tuple(others)).downgraded(rejection)

    def downgraded(self, rejection: Rejection) -> Plan:
        """The same plan, with one more downgrade to report."""
        return replace(
            self,
            rejected=(*self.rejected, rejection),
            downgrades=(*self.downgrades, rejection),
        )


def cut(pieces: tuple[Piece, ...], start: int, stop: int) -> list[Piece]:
    """Pieces, or parts of them, inside the window ``[start, stop)`` of the file; in order.

    Parameters
    ----------
    pieces
        Sorted by file offset, not overlapping.
    start, stop
        Window, in bytes of the file.
    """
    beyond = bisect_left(pieces, stop, key=_file_offset)
    if not beyond:
        return []
    last = pieces[beyond - 1]
    if last.file_offset <= start:  # as it is for most windows of large tensors
        return _part(last, start, stop)
    first = bisect_right(pieces, start, 0, beyond - 1, key=_file_offset) - 1
    head = _part(pieces[first], start, stop) if first >= 0 else []
    return [*head, *pieces[first + 1 : beyond - 1], *_part(last, start, stop)]


_file_offset = attrgetter("file_offset")


def _part(piece: Piece, start: int, stop: int) -> list[Piece]:
    """The part of a piece inside a window, if there is any."""
    file_offset, nbytes, buffer, buffer_offset = piece
    lower, upper = max(file_offset, start), min(file_offset + nbytes, stop)
    if lower >= upper:
        return []
    return [Piece(lower, upper - lower, buffer, buffer_offset + lower - file_offset)]

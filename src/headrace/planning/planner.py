"""Specs, residency and facts become a `Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.options import Options
from headrace.planning.coalesce import split
from headrace.planning.plan import Piece, Plan, Transfer
from headrace.planning.route import Amount, Choice, Facts, choose, gather
from headrace.storage.residency import Residency
from headrace.types import ByteRange, Device, Route


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is wanted of one file, and what holds for it."""

    pieces: tuple[Piece, ...]
    """Wanted bytes, by rising file offset."""
    residency: Residency
    """What the page cache holds of them."""
    facts: Facts
    """Machine, volume and GPU."""

    @property
    def stretches(self) -> tuple[ByteRange, ...]:
        """Ranges of the file that hold the pieces."""
        return tuple(stretch.file_range for stretch in self.residency.stretches)


def make_plan(
    files: Sequence[FileFacts], device: Device, options: Options, forced: Route | None
) -> Plan:
    """Choose a route for each stretch of each file.

    Parameters
    ----------
    files
        In the order of the sources.
    device
        Where all bytes go.
    options
        What the user wants.
    forced
        The only route allowed; None for the best of each stretch.

    Raises
    ------
    RouteUnavailable
        As `choose`.
    """
    chosen: list[tuple[Transfer, Choice]] = []
    amount = Amount(
        nbytes=sum(piece.nbytes for file in files for piece in file.pieces),
        missing_nbytes=sum(
            stretch.file_range.nbytes
            for file in files
            for stretch in file.residency.stretches
            if stretch.resident is False
        ),
    )
    for source, file in enumerate(files):
        for stretch, pieces in split(file.pieces, file.residency.stretches):
            choice = choose(stretch.resident, amount, device, file.facts, options, forced)
            clean = options.reuse == "once" and stretch.resident is False
            transfer = Transfer(source, choice.route, choice.why, pieces, clean)
            chosen.append((transfer, choice))
    resident_nbytes = sum(
        min(file.residency.resident_nbytes, sum(piece.nbytes for piece in file.pieces))
        for file in files
    )
    return gather(chosen, resident_nbytes)

"""Facts in, routes out, for bytes that go into files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import RouteUnavailable
from headrace.options import Options
from headrace.planning.plan import Piece, Plan, Rejection, Transfer
from headrace.planning.route import (
    SMALL_NBYTES,
    Choice,
    Facts,
    all_reasons,
    gather,
    impossible_routes,
    in_order,
    rule_for,
    take_forced,
    take_instead,
)
from headrace.storage.residency import ALWAYS_RESIDENT
from headrace.types import Device, Route


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """What goes into one file, and what holds for it."""

    pieces: tuple[Piece, ...]
    """Bytes by rising file offset, not overlapping."""
    facts: Facts
    """Machine, volume and GPU."""


def make_write_plan(
    files: Sequence[FileToWrite],
    devices: Sequence[Device],
    options: Options,
    forced: Route | None,
) -> Plan:
    """Choose a route for each run of bytes of one device.

    Parameters
    ----------
    files
        In the order of the sinks.
    devices
        Where each buffer lives.
    options
        What the user wants.
    forced
        The only route allowed; None for the best of each run.

    Raises
    ------
    RouteUnavailable
        As `choose_write`.
    """
    chosen: list[tuple[Transfer, Choice]] = []
    nbytes = sum(piece.nbytes for file in files for piece in file.pieces)
    for sink, file in enumerate(files):
        for device, pieces in _runs(file.pieces, devices):
            choice = choose_write(nbytes, device, file.facts, options, forced)
            chosen.append((Transfer(sink, choice.route, choice.why, pieces), choice))
    return gather(chosen, resident_nbytes=0)


def choose_write(
    nbytes: int, device: Device, facts: Facts, options: Options, forced: Route | None
) -> Choice:
    """Choose the route of bytes on one device into one file.

    Parameters
    ----------
    nbytes
        Bytes of the whole write.
    device
        Where they are.
    facts, options
        What is so, and what is wanted.
    forced
        The only route allowed; None for the best one.

    Raises
    ------
    RouteUnavailable
        The forced route, or every route, cannot serve; or `Options.strict` forbids a downgrade.
    """
    cannot = impossible_routes(device, facts, options.block_nbytes, what="the bytes are in")
    if Route.MAPPED not in cannot and facts.volume.file_system not in ALWAYS_RESIDENT:
        why = "a GPU may write into pages of a file only where they are written to no storage"
        cannot[Route.MAPPED] = Rejection(Route.MAPPED, why, "")
    buffered = Route.HOST if device.is_host else Route.CACHED
    if forced is not None:
        return take_forced(forced, cannot)
    if buffered in cannot:
        raise RouteUnavailable(all_reasons("no route can serve", cannot))
    first, why = _first_choice(nbytes, buffered, facts, options)
    if first in cannot:
        return take_instead(buffered, first, why, cannot, options)
    others = {route: Rejection(route, f"not the best here: {why}", "") for route in Route}
    return Choice(first, why, in_order({**others, **cannot}, first))


def _first_choice(
    nbytes: int, buffered: Route, facts: Facts, options: Options
) -> tuple[Route, str]:
    """The route that is best if it can be had, and the fact that makes it so."""
    kind = facts.volume.file_system
    if nbytes < SMALL_NBYTES:
        return buffered, f"fewer than {SMALL_NBYTES >> 20} MiB in all"
    if kind in ALWAYS_RESIDENT:
        why = f"{kind} keeps its files in memory"
        if buffered is Route.CACHED and options.workers != 1:
            return Route.MAPPED, why
        return buffered, why  # one thread alone backs pages slower than it writes
    if options.reuse == "many":
        available = facts.machine.available_nbytes
        if available is None or nbytes <= available // 2:
            return buffered, "reuse='many' leaves the bytes in the page cache"
    if facts.gds.holds is True and buffered is Route.CACHED:
        return Route.GDS, "written once, without the CPU"
    rule = rule_for(kind)
    if rule is not None and not rule.direct:
        return buffered, f"through the page cache of {kind}, which gathers writes"
    return Route.DIRECT, "written once, around the page cache"


def _runs(
    pieces: Sequence[Piece], devices: Sequence[Device]
) -> Iterator[tuple[Device, tuple[Piece, ...]]]:
    """Pieces that touch each other in the file and are on one device."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (
            piece.file_offset != run[-1].file_stop
            or devices[piece.buffer] != devices[run[-1].buffer]
        ):
            yield devices[run[-1].buffer], tuple(run)
            run = []
        run.append(piece)
    if run:
        yield devices[run[-1].buffer], tuple(run)

"""Facts in, routes out: the rules by which a stretch of a file gets its route."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import RouteUnavailable
from headrace.options import Options
from headrace.planning.effort import is_thrifty
from headrace.planning.plan import Plan, Rejection, Transfer
from headrace.probing.fact import Fact
from headrace.probing.machine import MachineFacts
from headrace.probing.volume import VolumeFacts
from headrace.types import Device, Route

SMALL_NBYTES = 16 << 20
"""Fewer missing bytes than this are read through the page cache, where the next reader finds them:
it costs a millisecond or two, even on the fastest disks."""


def parse_route(route: str) -> Route | None:
    """Read a route's name; None for "auto".

    Raises
    ------
    ValueError
        No such route.
    """
    if route == "auto":
        return None
    try:
        return Route(route)
    except ValueError:
        names = ", ".join(["auto", *Route])
        raise ValueError(f"route {route!r} does not exist; choose one of {names}") from None


@dataclass(frozen=True, slots=True)
class FileSystemRule:
    """How bytes that are not resident are best read from some kinds of file system."""

    kinds: tuple[str, ...]
    """Types in /proc/self/mountinfo; one that ends in a dot stands for all that begin so."""
    direct: bool
    """Whether O_DIRECT is worth it, where the file opens with it."""
    why: str
    """The reason."""


FILE_SYSTEM_RULES = (
    FileSystemRule(
        ("nfs", "nfs4"),
        False,
        "an NFS client reads ahead into the page cache, and sends each direct read alone",
    ),
    FileSystemRule(
        ("fuse", "fuseblk", "fuse."),
        False,
        "a FUSE daemon is asked in small requests when the page cache is left out",
    ),
    FileSystemRule(
        ("cifs", "smb3"),
        False,
        "an SMB client reads ahead into the page cache, and sends each direct read alone",
    ),
    FileSystemRule(
        ("lustre",),
        True,
        "a Lustre client spreads direct reads over its servers without copying",
    ),
    FileSystemRule(("gpfs",), True, "GPFS reads direct requests in parallel, past its page pool"),
    FileSystemRule(("wekafs",), True, "WekaFS serves direct reads from its own client processes"),
)
"""What is first for a network or parallel file system; the others are local, and direct is first
for them. A forced route overrides the rule."""


def rule_for(file_system: str) -> FileSystemRule | None:
    """The rule of a file system; None for a local one."""
    for rule in FILE_SYSTEM_RULES:
        for kind in rule.kinds:
            if file_system == kind or (kind.endswith(".") and file_system.startswith(kind)):
                return rule
    return None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a choice rests on."""

    machine: MachineFacts
    """Memory and CPUs."""
    volume: VolumeFacts
    """The file system under the file."""
    gpu: Fact
    """Whether a CUDA device can be used; looked at only for a destination on one."""
    mapping: Fact
    """Whether the GPU can read registered pages of a file; likewise."""
    gds: Fact
    """Whether cuFile moves bytes without the CPU here or, where the route is forced, at all."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much one load moves."""

    nbytes: int
    """Wanted bytes."""
    missing_nbytes: int
    """Those of them that are not resident."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The route of one stretch."""

    route: Route
    """The way its bytes go."""
    why: str
    """The fact that chose it."""
    rejections: tuple[Rejection, ...]
    """Every other route, with what ruled it out."""
    downgrade: Rejection | None = None
    """The first-choice route, where it could not serve."""


def choose(
    resident: bool | None,
    amount: Amount,
    device: Device,
    facts: Facts,
    options: Options,
    forced: Route | None,
) -> Choice:
    """Choose the route of one stretch.

    Parameters
    ----------
    resident
        Whether the page cache holds (nearly) all of it; None where that cannot be known.
    amount
        What the whole load moves.
    device
        Destination.
    facts, options
        What is so, and what is wanted.
    forced
        The only route allowed; None for the best one.

    Raises
    ------
    RouteUnavailable
        The forced route, or every route, cannot serve; or `Options.strict` forbids a downgrade.
    """
    cannot = impossible_routes(device, facts, options.block_nbytes)
    buffered = Route.HOST if device.is_host else Route.CACHED
    if forced is not None:
        return take_forced(forced, cannot)
    if buffered in cannot:
        raise RouteUnavailable(all_reasons("no route can serve", cannot))
    first, why = _first_choice(resident, amount, buffered, facts, options)
    if first in cannot:
        return take_instead(buffered, first, why, cannot, options)
    others = {**_not_preferred(first, buffered, why, device), **cannot}
    return Choice(first, why, in_order(others, first))


def impossible_routes(
    device: Device, facts: Facts, block_nbytes: int, what: str = "the destination is"
) -> dict[Route, Rejection]:
    """Routes that this machine, file or destination rules out, whatever is resident."""
    cannot: dict[Route, Rejection] = {}
    for new in (*_by_device(device, facts, what), *_by_volume(facts, block_nbytes)):
        old = cannot.get(new.route)
        if old is not None:  # nobody should mend one thing only to meet the next
            remedy = "; ".join(filter(None, (old.remedy, new.remedy)))
            new = Rejection(new.route, f"{old.why}; and {new.why}", remedy)
        cannot[new.route] = new
    return cannot


def _by_device(device: Device, facts: Facts, what: str) -> list[Rejection]:
    if device.is_host:
        why = f"{what} host memory, not a GPU"
        return [Rejection(route, why, "") for route in (Route.CACHED, Route.MAPPED, Route.GDS)]
    rejections = [Rejection(Route.HOST, f"{what} {device}, not host memory", "")]
    if facts.gpu.holds is not True:
        needs = [(route, facts.gpu) for route in Route if route is not Route.HOST]
    else:
        needs = [(Route.MAPPED, facts.mapping), (Route.GDS, facts.gds)]
    return rejections + [
        Rejection(route, f"{fact.name}: {fact.found} ({fact.why})", fact.remedy)
        for route, fact in needs
        if fact.holds is not True
    ]


def _by_volume(facts: Facts, block_nbytes: int) -> list[Rejection]:
    direct, alignment = facts.volume.direct, facts.volume.alignment.offset
    rejections = []
    if direct.holds is not True:
        why = f"{direct.found} ({direct.why})"
        rejections.append(Rejection(Route.DIRECT, why, direct.remedy))
    if block_nbytes % alignment:
        why = f"blocks of {block_nbytes} bytes are no multiple of the alignment, {alignment} bytes"
        remedy = f"set block_nbytes to a multiple of {alignment}"
        rejections.append(Rejection(Route.DIRECT, why, remedy))
    return rejections


def _first_choice(
    resident: bool | None, amount: Amount, buffered: Route, facts: Facts, options: Options
) -> tuple[Route, str]:
    """The route that is best if it can be had, and the fact that makes it so."""
    if resident:
        return _first_for_resident(amount, buffered, facts, options)
    if resident is None:
        return buffered, "whether the page cache holds these bytes cannot be known"
    if amount.missing_nbytes < SMALL_NBYTES:
        return buffered, f"not resident, but fewer than {SMALL_NBYTES >> 20} MiB in all"
    if options.reuse == "many":
        available = facts.machine.available_nbytes
        if available is None or amount.missing_nbytes <= available // 2:
            return buffered, "not resident; reuse='many' leaves the bytes in the page cache"
    if facts.gds.holds is True and buffered is Route.CACHED:
        return Route.GDS, "not resident: read once, without the CPU"
    rule = rule_for(facts.volume.file_system)
    if rule is not None and not rule.direct:
        return buffered, f"not resident; {rule.why}"
    return Route.DIRECT, "not resident: read once, around the page cache"


def _first_for_resident(
    amount: Amount, buffered: Route, facts: Facts, options: Options
) -> tuple[Route, str]:
    why = "the page cache holds these bytes"
    if buffered is Route.CACHED:
        if 0 < amount.nbytes <= options.mapped_nbytes:
            return Route.MAPPED, f"{why}, and mapped_nbytes keeps them registered"
        if is_thrifty(options, facts.machine):
            return Route.MAPPED, f"{why}, and the GPU can copy them without the CPU"
    return buffered, why


def _not_preferred(
    first: Route, buffered: Route, why: str, device: Device
) -> dict[Route, Rejection]:
    """Routes that could serve and were not the best."""
    others = {route: Rejection(route, f"not the best here: {why}", "") for route in Route}
    if first in (Route.DIRECT, Route.GDS):
        remedy = "Options(reuse='many') leaves them in the page cache for the next load"
        others[buffered] = Rejection(buffered, "slower for bytes that are not resident", remedy)
    if first is Route.CACHED and not device.is_host:
        slower = "a third to a half slower than the ring, at a fifth of its CPU time"
        remedy = "Options(policy='cpu') takes it"
        others[Route.MAPPED] = Rejection(Route.MAPPED, slower, remedy, ruled_out=False)
    del others[first]
    return others


def gather(chosen: Iterable[tuple[Transfer, Choice]], resident_nbytes: int) -> Plan:
    """Put transfers, and the choices of their routes, into a plan; each reason once."""
    pairs = tuple(chosen)
    choices = [choice for _, choice in pairs]
    return Plan(
        transfers=tuple(transfer for transfer, _ in pairs),
        rejected=tuple(dict.fromkeys(r for choice in choices for r in choice.rejections)),
        downgrades=tuple(dict.fromkeys(c.downgrade for c in choices if c.downgrade)),
        resident_nbytes=resident_nbytes,
    )


def take_forced(forced: Route, cannot: dict[Route, Rejection]) -> Choice:
    """Choose the route that was asked for.

    Raises
    ------
    RouteUnavailable
        It cannot serve; the message has every reason.
    """
    if forced in cannot:
        head = f"route {str(forced)!r} cannot serve: {cannot[forced]}"
        rest = {route: cannot[route] for route in cannot if route is not forced}
        raise RouteUnavailable(all_reasons(head + "; others", rest) if rest else head)
    why = f"route={str(forced)!r} was asked for"
    others = {other: Rejection(other, why, "") for other in Route if other is not forced}
    return Choice(forced, why, in_order({**others, **cannot}, forced))


def take_instead(
    buffered: Route, first: Route, why: str, cannot: dict[Route, Rejection], options: Options
) -> Choice:
    """Choose the page cache in place of the route that would be best, and cannot serve.

    Raises
    ------
    RouteUnavailable
        `Options.strict` forbids the downgrade.
    """
    downgrade = cannot[first]
    if options.strict:
        raise RouteUnavailable(f"strict=True forbids {buffered} in place of {downgrade}")
    why = f"{why}, but {downgrade.why}"
    return Choice(buffered, why, in_order(cannot, buffered), downgrade)


def all_reasons(head: str, cannot: dict[Route, Rejection]) -> str:
    """A message with every reason against every route."""
    return f"{head}: " + "; ".join(str(rejection) for rejection in cannot.values())


def in_order(rejections: dict[Route, Rejection], taken: Route) -> tuple[Rejection, ...]:
    """Rejections of all routes but the one that was taken, in the order of `Route`."""
    return tuple(rejections[route] for route in Route if route in rejections and route != taken)

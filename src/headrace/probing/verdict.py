"""From facts to routes: which can serve here, which cannot and why, and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.probing.fact import Fact
from headrace.types import Route

NAME_A_PATH = "name a PATH to look at its volume"
"""What to do where a route depends on the file."""


@dataclass(frozen=True, slots=True)
class RouteVerdict:
    """Whether one route can serve."""

    route: Route
    """The route."""
    available: bool | None
    """Whether it can serve; None where that cannot be known."""
    why: str
    """The facts that decide it."""
    remedy: str = ""
    """What would change it; "" where nothing needs to."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {
            "route": str(self.route),
            "available": self.available,
            "why": self.why,
            "remedy": self.remedy,
        }


Facts = Mapping[str, Fact]
"""Facts by their names."""


def judge_routes(facts: Sequence[Fact], allows_compat: bool) -> tuple[RouteVerdict, ...]:
    """One verdict for each route; a pure function of the facts.

    Parameters
    ----------
    facts
        What the doctor found.
    allows_compat
        Whether cuFile may serve in its compatibility mode.
    """
    named = {fact.name: fact for fact in facts}
    readable = named.get("readable")
    if readable is not None and readable.holds is False:
        why = f"{readable.name}: {readable.found} ({readable.why})"
        return tuple(RouteVerdict(route, False, why, readable.remedy) for route in Route)
    verdicts = (
        RouteVerdict(Route.HOST, True, "buffered reads into host memory need nothing else"),
        _judge(Route.CACHED, (named["CUDA device"],), "page-locked blocks, then the GPU's copy"),
        _judge_mapped(named),
        _judge_direct(named),
        _judge_gds(named, allows_compat),
    )
    path = named.get("path")
    if path is None or path.holds is not None:
        return verdicts
    hidden = f"path: {path.found}"
    return tuple(
        verdict
        if verdict.available is False
        else RouteVerdict(verdict.route, None, hidden, path.remedy)
        for verdict in verdicts
    )


def _judge(route: Route, needs: Sequence[Fact], good: str) -> RouteVerdict:
    """Say no where one fact does not hold, unknown where one is not known, else yes."""
    for holds in (False, None):
        against = [fact for fact in needs if fact.holds is holds]
        if against:
            return RouteVerdict(route, holds, _reasons(against), _remedies(against))
    return RouteVerdict(route, True, good)


def _judge_mapped(named: Facts) -> RouteVerdict:
    gpu, register = named["CUDA device"], named.get("host registration")
    read_only = named.get("read-only host registration")
    if gpu.holds is not True or register is None or read_only is None:
        return _judge(Route.MAPPED, (gpu,), "")
    if gpu.holds and read_only.holds is False:
        pageable = named.get("pageable memory access")
        if pageable is not None and pageable.holds:
            return _judge(Route.MAPPED, (register,), "the GPU reads pageable memory itself")
    good = "the GPU can read pages of the page cache that are registered read-only"
    return _judge(Route.MAPPED, (gpu, register, read_only), good)


def _judge_direct(named: Facts) -> RouteVerdict:
    direct = named.get("O_DIRECT")
    if direct is None:
        why = "whether files open with O_DIRECT depends on the volume"
        return RouteVerdict(Route.DIRECT, None, why, NAME_A_PATH)
    good = f"O_DIRECT: {direct.found}"
    if named["CUDA device"].holds is not True:
        good += "; into host memory, as there is no GPU to use"
    return _judge(Route.DIRECT, (direct,), good)


def _judge_gds(named: Facts, allows_compat: bool) -> RouteVerdict:
    """Judge GDS: what cuFile needs, then a way around the CPU, then what the volume must be."""
    needs = [named[name] for name in ("CUDA device", "cuFile bindings", "libcufile")]
    if any(fact.holds is False for fact in needs):
        return _judge(Route.GDS, needs, "")
    obstacles = [fact for check in _GDS_CHECKS for fact in check(named) if fact.holds is False]
    if obstacles:
        why = f"{_without_gds(obstacles, allows_compat)}: {_reasons(obstacles)}"
        return RouteVerdict(Route.GDS, False, why, _remedies(obstacles))
    if "mount" not in named:
        why = f"{_way(named)}; whether the file system takes part depends on the volume"
        return RouteVerdict(Route.GDS, None, why, NAME_A_PATH)
    unknown = [fact for check in _GDS_CHECKS for fact in check(named) if fact.holds is None]
    return _judge(Route.GDS, (*needs, *unknown), f"{_way(named)}; {named['mount'].found}")


def _without_gds(obstacles: Sequence[Fact], allows_compat: bool) -> str:
    """What cuFile would do with the file, if it were asked all the same."""
    names = {fact.name for fact in obstacles}
    if "loadable modules" in names:
        return "cuFile's driver would not come back from being opened"
    if "udev record" in names:
        return "cuFile refuses the file (5027)"
    if allows_compat:
        return "only cuFile's compatibility mode, through the CPU, would serve"
    return "cuFile cannot serve, and its compatibility mode is off"


def _way(named: Facts) -> str:
    name = "nvidia-fs" if named["nvidia-fs"].holds else "P2PDMA"
    return f"{name}: {named[name].found}"


def _check_modules(named: Facts) -> Sequence[Fact]:
    """Without modules, opening cuFile's driver never ends."""
    return (named["loadable modules"],)


def _check_way(named: Facts) -> Sequence[Fact]:
    """nvidia-fs, or else P2PDMA."""
    nvidia_fs, p2pdma = named["nvidia-fs"], named["P2PDMA"]
    if nvidia_fs.holds or p2pdma.holds:
        return ()
    if p2pdma.holds is None:
        return (p2pdma,)
    remedy = f"either {nvidia_fs.remedy}; or, for P2PDMA, {p2pdma.remedy}"
    found = f"{nvidia_fs.found}, and P2PDMA is no way either ({p2pdma.found})"
    return (Fact("nvidia-fs", False, found, nvidia_fs.why, remedy),)


def _check_p2pdma_volume(named: Facts) -> Sequence[Fact]:
    """P2PDMA reaches local NVMe alone, without RAID."""
    device = named.get("device")
    if device is None or named["nvidia-fs"].holds or not named["P2PDMA"].holds:
        return ()
    plain = "NVMe" in device.found and "RAID" not in device.found
    if plain and "NVMe, rdma" not in device.found and "NVMe, tcp" not in device.found:
        return ()
    remedy = "keep the file on one local NVMe disk, or load nvidia-fs"
    found = f"{device.found}, where P2PDMA reaches local NVMe without RAID only"
    return (Fact("device", False, found, device.why, remedy),)


def _check_hooks(named: Facts) -> Sequence[Fact]:
    """nvidia-fs needs an NVMe driver that was built for it."""
    hooks, device = named.get("storage drivers with nvidia-fs"), named.get("device")
    if hooks is None or device is None or "NVMe" not in device.found or named["P2PDMA"].holds:
        return ()
    if hooks.holds is None or "nvme" in hooks.found:
        return ()
    remedy = hooks.remedy or "install an NVMe driver built for GDS (MOFED/DOCA with nvidia-fs)"
    found = f"{hooks.found}: the NVMe driver is not among them"
    return (Fact(hooks.name, False, found, hooks.why, remedy),)


def _check_volume(named: Facts) -> Sequence[Fact]:
    """What the file system must be and show."""
    names = (
        "GDS file system",
        "data=ordered",
        "neither encrypted nor compressed",
        "udev record",
        "O_DIRECT",
    )
    return [named[name] for name in names if name in named]


_GDS_CHECKS: tuple[Callable[[Facts], Sequence[Fact]], ...] = (
    _check_modules,
    _check_way,
    _check_p2pdma_volume,
    _check_hooks,
    _check_volume,
)


def _reasons(facts: Sequence[Fact]) -> str:
    return "; ".join(f"{fact.name}: {fact.found}" for fact in facts)


def _remedies(facts: Sequence[Fact]) -> str:
    return "; ".join(dict.fromkeys(fact.remedy for fact in facts if fact.remedy))

"""``headrace load``: load each source and keep the reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import headrace
from headrace.cli.progress import Meter, quiet
from headrace.cli.target import Target, find_target
from headrace.context import read_cufile_environment
from headrace.framework import ShownProgress
from headrace.options import Options
from headrace.report import Report


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load, and how."""

    sources: tuple[str, ...]
    """Files, directories or indexes; each is a load of its own."""
    device: str | None = None
    """Where to; None chooses."""
    framework: str | None = None
    """Whose arrays; None chooses."""
    route: str = "auto"
    """``"auto"`` or the forced route."""
    names: tuple[str, ...] = ()
    """Tensor names or globs; () takes all."""
    raw: bool = False
    """Take files as plain bytes, whatever they hold."""
    repeat: int = 1
    """Loads of each source."""
    options: Options = field(default_factory=Options)
    """How transfers are made."""
    verify: bool = False
    """Compare what is read with the checksums that the files store."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the loads did."""

    target: Target
    """Where the bytes went, and why there."""
    reports: tuple[Report, ...]
    """One per transfer, in order."""

    def to_json(self) -> Any:
        """Give the report, or the list of them if there are several, ready for JSON."""
        documents = [report.to_dict() for report in self.reports]
        return documents[0] if len(documents) == 1 else documents


def collect(request: LoadRequest, meter: Meter = quiet) -> LoadResult:
    """Load every source as often as asked; the arrays are dropped at once.

    Raises
    ------
    HeadraceError, OSError, ValueError, KeyError
        As the framework's ``load`` and ``read`` do; KeyError also when a name matches nothing.
    """
    reports: list[Report] = []
    environment = read_cufile_environment()
    with headrace.Context(request.options, cufile_environment=environment) as context:
        target = find_target(request.device, request.framework, context)
        for source in request.sources:
            load = _loader(request, source, target, context, meter)
            for _ in range(request.repeat):
                meter(source, 0, 0)
                with headrace.trace() as traced:
                    load()
                reports.extend(traced.reports)
    return LoadResult(target, tuple(reports))


def _loader(
    request: LoadRequest, source: str, target: Target, context: headrace.Context, meter: Meter
) -> Callable[[], Any]:
    """Prepare the call that loads one source."""
    namespace = target.namespace()
    progress: ShownProgress = False
    if meter is not quiet:

        def show(done: headrace.Progress) -> None:
            meter(source, done.nbytes, done.total_nbytes)

        progress = show

    common = {
        "device": target.device,
        "route": request.route,
        "progress": progress,
        "context": context,
    }
    if request.raw or Path(source).suffix.lower() == ".npy":
        if request.names:
            raise ValueError(f"{source}: --names chooses tensors of safetensors sources only")
        if request.verify:
            raise ValueError(f"{source}: --verify takes checksums of safetensors sources only")
        # A stated length makes `read` take even a .npy file as plain bytes.
        extent = {"nbytes": os.stat(source).st_size} if request.raw else {}
        return partial(namespace.read, source, **extent, **common)
    names = None
    if request.names:
        names = find_names(source, request.names, context)
    return partial(namespace.load, source, names=names, verify=request.verify, **common)


def find_names(source: str, patterns: Sequence[str], context: headrace.Context) -> list[str]:
    """Names in a source that are asked for exactly or by a glob.

    Raises
    ------
    KeyError
        A pattern matches no tensor.
    HeadraceError, OSError
        As `headrace.explain` does.
    """
    listed = headrace.explain(source, device="cpu", context=context).tensors
    return select_names(source, patterns, [tensor["name"] for tensor in listed])


def select_names(source: str, patterns: Sequence[str], available: Sequence[str]) -> list[str]:
    """Names that are asked for exactly or by a glob, in the source's order.

    Raises
    ------
    KeyError
        A pattern matches no tensor.
    """
    matches = {
        pattern: {n for n in available if n == pattern or fnmatchcase(n, pattern)}
        for pattern in patterns
    }
    unmatched = [pattern for pattern, found in matches.items() if not found]
    if unmatched:
        some = ", ".join(available[:3]) + (", ..." if len(available) > 3 else "")
        raise KeyError(
            f"{source}: no tensor matches {', '.join(unmatched)}; it has {len(available)}: {some}"
        )
    wanted = set().union(*matches.values())
    return [name for name in available if name in wanted]

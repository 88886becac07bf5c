"""``headrace explain``: what a load would do, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

import headrace
from headrace.cli.load import find_names
from headrace.cli.target import find_target
from headrace.context import read_cufile_environment
from headrace.report import Explanation


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """Which load to explain."""

    source: str
    """File, directory or index."""
    device: str | None = None
    """Where to; None chooses as ``headrace load`` does."""
    route: str = "auto"
    """``"auto"`` or the forced route."""
    raw: bool = False
    """Take the file as plain bytes."""
    names: tuple[str, ...] = ()
    """Tensor names or globs; () takes all."""


def collect(request: ExplainRequest) -> Explanation:
    """Read headers and facts, no payload.

    Raises
    ------
    HeadraceError, OSError
        As `headrace.explain` does.
    """
    with headrace.Context(cufile_environment=read_cufile_environment()) as context:
        target = find_target(request.device, None, context)
        names = find_names(request.source, request.names, context) if request.names else None
        explanation = headrace.explain(
            request.source,
            device=target.device,
            route=request.route,
            raw=request.raw,
            names=names,
            context=context,
        )
        if request.device is not None:
            return explanation
        # The choice of the device rests on this fact, even where it ended at the host.
        gpu = context.gpu_fact().to_dict()
        facts = [fact for fact in explanation.facts if fact["name"] != gpu["name"]]
        return replace(explanation, facts=(*facts, gpu))

"""The doctor: what this machine and the volume under a path can do, and what would change it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Any

from headrace.bindings.posix import PosixFiles
from headrace.bindings.sysfs import Linux
from headrace.context import Context, choose_context
from headrace.probing.alignment import Alignment, find_alignment
from headrace.probing.examination import Instruments, examine
from headrace.probing.fact import Fact
from headrace.probing.verdict import RouteVerdict
from headrace.types import Route

PathLike = str | os.PathLike[str]
"""One path."""

_GPU_FACTS = ("CUDA device", "GPU on the PCI bus")
WORDS = MappingProxyType({True: "yes", False: "no", None: "unknown"})
"""What is said of a fact, by whether it holds."""
STATES = MappingProxyType({True: "available", False: "unavailable", None: "unknown"})
"""What is said of a route, by whether it can serve."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found."""

    facts: tuple[Fact, ...]
    """What holds here, how that is known, and what would change it."""
    routes: tuple[RouteVerdict, ...]
    """Whether each route can serve."""

    @property
    def works(self) -> bool:
        """Whether some route to the GPU serves; where there is no GPU, to host memory."""
        has_gpu = any(fact.holds is True for fact in self.facts if fact.name in _GPU_FACTS)
        wanted = (Route.CACHED, Route.MAPPED, Route.GDS) if has_gpu else (Route.HOST,)
        return any(verdict.available is True for verdict in self.routes if verdict.route in wanted)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "facts": [fact.to_dict() for fact in self.facts],
            "routes": [verdict.to_dict() for verdict in self.routes],
        }

    def __str__(self) -> str:
        routes = [
            f"{verdict.route}: {STATES[verdict.available]}: {verdict.why}{_arrow(verdict.remedy)}"
            for verdict in self.routes
        ]
        facts = [
            f"  {fact.name}: {WORDS[fact.holds]}: {fact.found} ({fact.why}){_arrow(fact.remedy)}"
            for fact in self.facts
        ]
        return "\n".join([*routes, "facts:", *facts])

    def _repr_html_(self) -> str:
        routes = _html_table(
            ("route", "state", "why", "remedy"),
            [(str(v.route), STATES[v.available], v.why, v.remedy) for v in self.routes],
        )
        facts = _html_table(
            ("fact", "holds", "found", "why", "remedy"),
            [(f.name, WORDS[f.holds], f.found, f.why, f.remedy) for f in self.facts],
        )
        return routes + facts


def doctor(
    path: PathLike | None = None,
    context: Context | None = None,
    *,
    instruments: Instruments | None = None,
) -> Diagnosis:
    """Find out what this machine, and the volume under a path, can do.

    Nothing is written, no payload is read, and root is not needed: what only root could tell is
    unknown, and says so. NVIDIA's library is loaded in a child process, and cuFile's driver is
    never opened.

    Parameters
    ----------
    path
        A file, or a folder; None looks at the machine alone.
    context
        Whose bindings to use; None for the default one.
    instruments
        What to look with; None for the running machine.

    Raises
    ------
    FileNotFoundError, OSError
        There is nothing at the path, or neither a file nor a folder.
    """
    if instruments is None:
        instruments = choose_context(context).instruments()
    found = examine(None if path is None else os.fspath(path), instruments)
    return Diagnosis(found.facts, found.routes)


def alignment(path: PathLike) -> Alignment:
    """Alignment that direct I/O on a file demands, and that cuFile serves without a bounce.

    Parameters
    ----------
    path
        A file; or a folder, whose first readable file is asked, since alignment belongs to files.

    Raises
    ------
    FileNotFoundError, PermissionError, OSError
        As the operating system says; OSError also for a device or a pipe.
    """
    return find_alignment(os.fspath(path), PosixFiles(), Linux())


def _arrow(remedy: str) -> str:
    return f" -> {remedy}" if remedy else ""


def _html_table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"

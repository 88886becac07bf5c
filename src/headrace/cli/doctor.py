"""``headrace doctor``: what this machine can do, and what would change it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from headrace.bindings.posix import PosixFiles
from headrace.bindings.sysfs import Linux
from headrace.context import Context
from headrace.diagnosis import Diagnosis, doctor
from headrace.probing.examination import Instruments

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WORDS = MappingProxyType({True: "yes", False: "no", None: "unknown"})
_STATES = MappingProxyType({True: "available", False: "unavailable", None: "unknown"})


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """What to look at."""

    path: str | None = None
    """File or folder whose volume is looked at; None for the machine alone."""


def collect(request: DoctorRequest) -> Diagnosis:
    """Look at the machine.

    Raises
    ------
    OSError
        As `headrace.doctor` does.
    """
    variables = {name: os.environ[name] for name in os.environ if name.startswith("CUFILE_")}
    with Context() as context:
        instruments = Instruments(Linux(), PosixFiles(), context.load_cuda, variables)
        return doctor(request.path, instruments=instruments)


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print the routes, then the facts that they rest on."""
    routes = _table("route", "state", "why", "what would change it")
    for verdict in diagnosis.routes:
        state = _STATES[verdict.available]
        routes.add_row(str(verdict.route), state, verdict.why, verdict.remedy)
    console.print(routes)
    facts = _table("fact", "holds", "found", "where; what would change it")
    for fact in diagnosis.facts:
        where = f"{fact.why} -> {fact.remedy}" if fact.remedy else fact.why
        facts.add_row(fact.name, _WORDS[fact.holds], fact.found, where)
    console.print(facts)


def _table(*headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=index < 2, overflow="fold")
    return table

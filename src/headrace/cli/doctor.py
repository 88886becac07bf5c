"""``headrace doctor``: what this machine can do, and what would change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.context import Context, read_cufile_environment
from headrace.diagnosis import STATES, WORDS, Diagnosis, doctor

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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
    with Context(cufile_environment=read_cufile_environment()) as context:
        return doctor(request.path, context)


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print the routes, then the facts that they rest on."""
    routes = _table("route", "state", "why", "what would change it")
    for verdict in diagnosis.routes:
        state = STATES[verdict.available]
        routes.add_row(str(verdict.route), state, verdict.why, verdict.remedy)
    console.print(routes)
    facts = _table("fact", "holds", "found", "where; what would change it")
    for fact in diagnosis.facts:
        where = f"{fact.why} -> {fact.remedy}" if fact.remedy else fact.why
        facts.add_row(fact.name, WORDS[fact.holds], fact.found, where)
    console.print(facts)


def _table(*headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=index < 2, overflow="fold")
    return table

"""Results as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.demo import DemoResult
from headrace.cli.demo_bench import Row
from headrace.cli.load import LoadResult
from headrace.conversion.outcome import Conversion
from headrace.report import Explanation, Report, format_nbytes, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_COLUMNS = 160  # width where there is no terminal to ask
_BY_WORKERS = ("read", "write", "wait")  # stages whose seconds are summed over the threads


def make_console() -> Console:
    """Open a console on standard output that takes names and messages literally."""
    from rich.console import Console

    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = None if is_terminal else _PIPE_COLUMNS
    return Console(width=width, markup=False, emoji=False, highlight=False)


def render_load(result: LoadResult, console: Console) -> None:
    """Print the line and the table of each report."""
    for report in result.reports:
        console.print(str(report), soft_wrap=True)
        console.print(_report_table(report))
    if result.target.is_host and result.target.why:
        why = result.target.why
        console.print(f"No GPU can be used here, so to host memory: {why}.", soft_wrap=True)


def render_conversion(result: Conversion, console: Console) -> None:
    """Print what was converted, what to know of it, and both ways of the bytes."""
    console.print(str(result), soft_wrap=True)
    for note in result.notes:
        console.print(f"Note: {note}.", soft_wrap=True)
    for report in filter(None, (result.read, result.write)):
        console.print(str(report), soft_wrap=True)
        console.print(_report_table(report))


def render_explanation(explanation: Explanation, console: Console, *, tensors: bool) -> None:
    """Print what a load would do, and why."""
    nbytes = sum(tensor["nbytes"] for tensor in explanation.tensors)
    count = len(explanation.tensors)
    console.print(
        f"{explanation.source} -> {explanation.device}  {count} tensor{'s' * (count != 1)}, "
        f"{format_nbytes(nbytes)}; nothing was read but headers",
        soft_wrap=True,
    )
    table = _table("", "route", "bytes", "why")
    for plan in explanation.planned:
        table.add_row("planned", str(plan.route), format_nbytes(plan.nbytes), plan.why)
    for rejection in explanation.rejected:
        table.add_row(
            "rejected", str(rejection.route), "", _with_remedy(rejection.why, rejection.remedy)
        )
    console.print(table)
    console.print(_facts_table(explanation.facts))
    if tensors:
        console.print(_tensor_table(explanation.tensors))


def render_demo(result: DemoResult, console: Console) -> None:
    """Print the table of the methods, and the sentences that it amounts to."""
    console.print(
        f"{format_nbytes(result.nbytes)} in {result.tensors} tensors, on {result.place.file_system}"
        f" under {result.place.folder}, to {result.target.device} ({result.target.framework}); "
        f"median of {result.repeat} after one untimed call; every result compared with the "
        "reference, byte for byte",
        soft_wrap=True,
    )
    table = _table("method", "state", "GB/s", "CPU s/GB", "route", "why")
    for row in result.rows:
        table.add_row(*_demo_cells(row))
    console.print(table)
    for route, why in result.unavailable:
        console.print(f"Not here: {route}: {why}", soft_wrap=True)
    for sentence in (*result.notes, *result.verdict):
        console.print(sentence, soft_wrap=True)


def _demo_cells(row: Row) -> tuple[str, ...]:
    """Write a row of the demo as text."""
    return (
        row.method,
        row.state,
        "-" if row.gb_per_s is None else f"{row.gb_per_s:.2f}",
        "-" if row.cpu_s_per_gb is None else f"{row.cpu_s_per_gb:.2f}",
        " + ".join(row.observed) or "-",
        row.why if row.matches else f"WRONG BYTES; {row.why}",
    )


def _report_table(report: Report) -> Table:
    """Tabulate what a report's line does not say."""
    table = _table("", "route", "bytes", "why")
    for plan in report.planned:
        table.add_row("planned", str(plan.route), format_nbytes(plan.nbytes), plan.why)
    for seen in report.observed:
        table.add_row("observed", str(seen.route), format_nbytes(seen.nbytes), seen.evidence)
    for rejection in report.rejected:
        table.add_row(
            "rejected", str(rejection.route), "", _with_remedy(rejection.why, rejection.remedy)
        )
    table.add_row("stages", "", "", _write_stages(report.stages))
    table.add_row("CPU", "", "", f"{report.cpu_seconds:.3f} s")
    if report.operation == "read":
        table.add_row("resident", "", format_nbytes(report.resident_nbytes), "before the read")
    if report.verified_nbytes is not None:
        told = "checksums right" if report.verified_nbytes else "no checksums stored"
        table.add_row("verified", "", format_nbytes(report.verified_nbytes), told)
    table.add_row("pinned", "", format_nbytes(report.pinned_nbytes), "at most, page-locked")
    return table


def _write_stages(stages: Mapping[str, float]) -> str:
    """Write the times of the stages; those of the workers overlap, and say so."""
    return ", ".join(
        f"{name} {1000 * seconds:.1f} ms" + (" (all workers)" if name in _BY_WORKERS else "")
        for name, seconds in stages.items()
    )


def _facts_table(facts: Iterable[Mapping[str, Any]]) -> Table:
    """Tabulate the facts that the choice rests on."""
    table = _table("fact", "holds", "found", "how we know; what would change it")
    for fact in facts:
        table.add_row(
            fact["name"],
            {True: "yes", False: "no"}.get(fact["holds"], "unknown"),
            fact["found"],
            _with_remedy(fact["why"], fact["remedy"]),
        )
    return table


def _tensor_table(tensors: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulate every tensor of a source."""
    table = _table("tensor", "dtype", "shape", "bytes", "file offset", "file")
    for tensor in tensors:
        table.add_row(
            one_line(tensor["name"]),
            tensor["dtype"],
            "x".join(str(n) for n in tensor["shape"]) or "scalar",
            str(tensor["nbytes"]),
            str(tensor["file_offset"]),
            tensor["path"],
        )
    return table


def _table(*headings: str) -> Table:
    """Make an empty table whose numbers stand on the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        numeric = heading in ("GB/s", "CPU s/GB", "bytes", "file offset")
        last = heading == headings[-1]
        table.add_column(
            heading, justify="right" if numeric else "left", no_wrap=not last, overflow="fold"
        )
    return table


def _with_remedy(why: str, remedy: str) -> str:
    """Join a reason and what would change it."""
    return f"{why} -> {remedy}" if remedy else why

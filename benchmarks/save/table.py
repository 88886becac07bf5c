"""Tables of a run of saves, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.markdown import (
    Document,
    format_number,
    render_heading,
    render_remarks,
    render_speeds,
    render_table,
    render_targets,
)

_WRITES = {"raw": "Raw bytes", "model": "Model, one file"}
_UNTIL = {"gb_per_s": "until the call returned", "synced_gb_per_s": "until fsync returned"}
_CALLS = {"async": "Saves in the background", "stream": "Reads in stream order"}


def render_save(document: Document) -> str:
    """Render all tables of what ``benchmarks.save`` wrote."""
    parts = [render_heading(document, "Arrays on")]
    for kind, title in _WRITES.items():
        rows = [row for row in document["rows"] if row["kind"] == kind]
        for figure, until in _UNTIL.items() if rows else ():
            parts += [f"### {title}, {until}", render_speeds(document, rows, figure, 2)]
        if rows:
            parts += [_sizes(rows), *render_remarks(document, rows)]
    parts += _memory_table(document)
    for kind, title in _CALLS.items():
        parts += _call_table(document, kind, title)
    if document["targets"]:
        parts += ["### Targets", render_targets(document)]
    return "\n\n".join(parts)


def _sizes(rows: Sequence[Document]) -> str:
    sizes = {row["place"]: row["nbytes"] for row in rows}
    return "Sizes: " + ", ".join(f"{n / 1e9:.3g} GB to {place}" for place, n in sizes.items()) + "."


def _memory_table(document: Document) -> list[str]:
    body = [
        [found["name"], _mib(found["growth_nbytes"]), found["error"] or "fresh process"]
        for found in document["host_memory"]
    ]
    head = ["Most host memory of the first save, MiB", "anonymous", ""]
    return ["### Host memory", render_table(head, body)] if body else []


def _mib(nbytes: int | None) -> str:
    return format_number(None if nbytes is None else nbytes / (1 << 20))


def _call_table(document: Document, kind: str, title: str) -> list[str]:
    """Render how soon calls returned, and when their bytes were there."""
    rows = [row for row in document["rows"] if row["kind"] == kind]
    head = ["", "where", "ms until the call returned, median (least to most)", "GB/s", ""]
    body = [
        [row["name"], row["place"], _milliseconds(row), format_number(row["gb_per_s"]), _note(row)]
        for row in rows
    ]
    return [f"### {title}", render_table(head, body)] if body else []


def _milliseconds(row: Document) -> str:
    median, least, most = (
        format_number(None if row[key] is None else 1e3 * row[key])
        for key in ("free_s", "free_s_min", "free_s_max")
    )
    return f"{median} ({least} to {most})"


def _note(row: Document) -> str:
    """Say what went wrong, else which snapshot headrace's report tells of, and the rounds."""
    if row["absent"]:
        return f"absent: {row['absent']}"
    if row["error"]:
        return str(row["error"])
    taken = [report["snapshot"] for report in row["reports"] if report.get("snapshot")]
    told = [f"snapshot: {each['device']}, {each['seconds'] * 1e3:.1f} ms" for each in taken]
    return "; ".join([f"{len(row['readings'])} calls", *row["routes"], *told])

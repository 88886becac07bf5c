"""Markdown tables from the JSON of a run: ``python -m benchmarks.table RESULT.json``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.markdown import (
    Document,
    format_number,
    keep_best,
    render_heading,
    render_remarks,
    render_speeds,
    render_table,
    render_targets,
)
from benchmarks.save.table import render_save

_KINDS = {
    "raw": "Raw file",
    "model": "Model, two shards",
    "kept": "Model whose registration is kept",
    "gds": "Raw file's first bytes through cuFile",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of one or more results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON of a benchmark")
    parser.add_argument("--all", action="store_true", help="every setting of each library")
    parsed = parser.parse_args(arguments)
    for path in parsed.results:
        document = json.loads(path.read_text())
        sys.stdout.write(render_document(document, every_setting=parsed.all) + "\n")


def render_document(document: Document, *, every_setting: bool = False) -> str:
    """Render all tables.

    Parameters
    ----------
    document
        What ``benchmarks.load`` or ``benchmarks.save`` wrote.
    every_setting
        Show all settings of a library that was tuned; else the best at each place.

    Returns
    -------
    str
        Markdown.
    """
    if document.get("benchmark") == "save":
        return render_save(document)
    parts = [render_heading(document)]
    for kind, title in _KINDS.items():
        rows = [row for row in document["rows"] if row["kind"] == kind]
        if rows:
            nbytes = max(row["nbytes"] for row in rows) / 1e9
            shown = rows if every_setting else keep_best(rows)
            size = f", {nbytes:.3g} GB" if nbytes else ""
            parts += [f"### {title}{size}", render_speeds(document, shown)]
            parts += render_remarks(document, shown)
    parts += _process_tables(document)
    parts += _neighbour_table(document) + _doctor_table(document)
    parts += ["### Targets", render_targets(document)]
    return "\n\n".join(parts)


def _process_tables(document: Document) -> list[str]:
    parts = []
    if calls := document["first_calls"]:
        body = [
            [
                c["name"],
                _middle(c["first_s"]),
                _middle(c["second_s"]),
                format_number(c["difference_s"]),
                c["error"] or f"{len(c['first_s'])} processes",
            ]
            for c in calls
        ]
        head = ["First calls in fresh processes, s", "first", "second", "difference", ""]
        parts += ["### First call", render_table(head, body)]
    if imports := document["imports"]:
        body = [
            [
                f"{i['name']} after {i['after']}",
                format_number(i["median_s"]),
                i["error"] or f"{len(i['seconds'])} processes",
            ]
            for i in imports
        ]
        parts += ["### Imports", render_table(["Import", "s", ""], body)]
    return parts


def _neighbour_table(document: Document) -> list[str]:
    rows = document.get("neighbour", [])
    if not rows:
        return []
    head = ["Beside a busy process per core", "GB/s", "CPU s/GB", "neighbours slower", ""]
    body = [
        [
            row["name"],
            format_number(row["gb_per_s"]),
            format_number(row["cpu_s_per_gb"]),
            "-" if row["lost_share"] is None else f"{row['lost_share']:.0%}",
            row["error"] or f"{len(row['loads'])} loads, {row['processes']} neighbours",
        ]
        for row in rows
    ]
    return ["### Neighbours", render_table(head, body)]


def _doctor_table(document: Document) -> list[str]:
    found = document.get("doctor")
    if not found:
        return []
    if found["error"]:
        return ["### Doctor", found["error"]]
    states = {True: "available", False: "unavailable", None: "unknown"}
    body = [[r["route"], states[r["available"]], r["why"], r["remedy"]] for r in found["routes"]]
    return ["### Doctor", render_table(["Route", "State", "Why", "What would change it"], body)]


def _middle(values: Sequence[float]) -> str:
    return format_number(sorted(values)[len(values) // 2] if values else None)


if __name__ == "__main__":
    main()

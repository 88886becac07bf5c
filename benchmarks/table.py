"""Markdown tables from the JSON of a run: ``python -m benchmarks.table RESULT.json``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]

_KINDS = {
    "raw": "Raw file",
    "model": "Model, two shards",
    "kept": "Model whose registration is kept",
    "gds": "Raw file's first bytes through cuFile",
}
_VERDICTS = {True: "yes", False: "**no**", None: "not told"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of one or more results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON of benchmarks.load")
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
        What ``benchmarks.load`` wrote.
    every_setting
        Show all settings of a library that was tuned; else the best at each place.

    Returns
    -------
    str
        Markdown.
    """
    parts = [_heading(document)]
    for kind, title in _KINDS.items():
        rows = [row for row in document["rows"] if row["kind"] == kind]
        if rows:
            nbytes = max(row["nbytes"] for row in rows) / 1e9
            shown = rows if every_setting else _best_of_families(rows)
            size = f", {nbytes:.3g} GB" if nbytes else ""
            parts += [f"### {title}{size}", _speed_table(document, shown)]
            parts += _remarks(document, shown)
    parts += _process_tables(document)
    parts += _neighbour_table(document) + _doctor_table(document)
    parts += ["### Targets", _target_table(document)]
    return "\n\n".join(parts)


def _heading(document: Document) -> str:
    machine, versions = document["machine"], document["versions"]
    gpus = (
        ", ".join(f"{gpu['name']} (driver {gpu['driver_version']})" for gpu in machine["gpus"])
        or "no GPU"
    )
    ram = machine["ram_nbytes"] / (1 << 30)
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    state = "" if document["finished"] else " **The run did not finish.**"
    return (
        f"{document['date']}: {gpus}; {machine['cores']} cores ({machine['cpu']}), "
        f"{ram:.0f} GiB RAM, Linux {machine['kernel']}, Python {machine['python']}; {packages}. "
        f"Destination {document['parameters']['device']}; medians of up to "
        f"{document['parameters']['repeats']} rounds, every result compared byte for byte.{state}"
    )


def _best_of_families(rows: Sequence[Document]) -> list[Document]:
    """Keep, of the settings of one library at one place, the fastest, under the family's name."""
    groups: dict[tuple[str, str], list[Document]] = {}
    for row in rows:
        groups.setdefault((row["place"], row["family"] or row["name"]), []).append(row)
    return [_best(group, name) for (_, name), group in groups.items()]


def _best(group: Sequence[Document], name: str) -> Document:
    valid = [row for row in group if row["compared"]]
    best = max(valid or group, key=lambda row: row["gb_per_s"] or 0.0)
    setting = best["name"].removeprefix(f"{name}, ")
    note = best["note"] if len(group) == 1 else f"best of {len(group)} settings: {setting}"
    return {**best, "name": name, "note": note}


def _speed_table(document: Document, rows: Sequence[Document]) -> str:
    titles = {place["key"]: place["title"] for place in document["places"]}
    keys = [key for key in titles if any(row["place"] == key for row in rows)]
    cells = {(row["name"], row["place"]): row for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    head = ["GB/s, median (least to most); CPU s/GB", *(titles[key] for key in keys)]
    body = [[name, *(_speed_cell(cells.get((name, key))) for key in keys)] for name in names]
    return _table(head, body)


def _speed_cell(row: Document | None) -> str:
    if row is None:
        return ""
    if row["absent"]:
        return "absent"
    if row["error"]:
        return "failed"
    if row["gb_per_s"] is None:
        return "not run"
    speed = f"{row['gb_per_s']:.1f} ({row['gb_per_s_min']:.1f} to {row['gb_per_s_max']:.1f})"
    routes = f" *{' + '.join(row['routes'])}*" if row["routes"] else ""
    return f"{speed}; {row['cpu_s_per_gb']:.2f}{routes}"


def _remarks(document: Document, rows: Sequence[Document]) -> list[str]:
    """Say once each why a contestant is absent, failed, or has fewer readings."""
    remarks: dict[str, list[str]] = {}
    for row in rows:
        for label, text in (("absent: ", row["absent"]), ("", row["error"] or row["note"])):
            if text:
                remarks.setdefault(f"{row['name']}: {label}{text}", []).append(row["place"])
    lines = [f"- {text} ({', '.join(places)})" for text, places in remarks.items()]
    lines += [f"- no {p['key']} place: {p['why']}" for p in document["absent_places"]]
    return ["\n".join(_one_line(line) for line in lines)] if lines else []


def _process_tables(document: Document) -> list[str]:
    parts = []
    if calls := document["first_calls"]:
        body = [
            [
                c["name"],
                _middle(c["first_s"]),
                _middle(c["second_s"]),
                _number(c["difference_s"]),
                c["error"] or f"{len(c['first_s'])} processes",
            ]
            for c in calls
        ]
        head = ["First calls in fresh processes, s", "first", "second", "difference", ""]
        parts += ["### First call", _table(head, body)]
    if imports := document["imports"]:
        body = [
            [
                f"{i['name']} after {i['after']}",
                _number(i["median_s"]),
                i["error"] or f"{len(i['seconds'])} processes",
            ]
            for i in imports
        ]
        parts += ["### Imports", _table(["Import", "s", ""], body)]
    return parts


def _neighbour_table(document: Document) -> list[str]:
    rows = document.get("neighbour", [])
    if not rows:
        return []
    head = ["Beside a busy process per core", "GB/s", "CPU s/GB", "neighbours slower", ""]
    body = [
        [
            row["name"],
            _number(row["gb_per_s"]),
            _number(row["cpu_s_per_gb"]),
            "-" if row["lost_share"] is None else f"{row['lost_share']:.0%}",
            row["error"] or f"{len(row['loads'])} loads, {row['processes']} neighbours",
        ]
        for row in rows
    ]
    return ["### Neighbours", _table(head, body)]


def _doctor_table(document: Document) -> list[str]:
    found = document.get("doctor")
    if not found:
        return []
    if found["error"]:
        return ["### Doctor", found["error"]]
    states = {True: "available", False: "unavailable", None: "unknown"}
    body = [[r["route"], states[r["available"]], r["why"], r["remedy"]] for r in found["routes"]]
    return ["### Doctor", _table(["Route", "State", "Why", "What would change it"], body)]


def _target_table(document: Document) -> str:
    body = [
        [
            target["name"],
            target["asked"],
            f"{_number(target['measured'])} {target['unit']}",
            f"{_number(target['wanted'])} {target['unit']}",
            _VERDICTS[target["met"]],
            target["evidence"],
        ]
        for target in document["targets"]
    ]
    return _table(["What", "Asked for", "Measured", "Bound", "Met", "From"], body)


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(_one_line(cell) for cell in line) + " |" for line in lines)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _middle(values: Sequence[float]) -> str:
    return _number(sorted(values)[len(values) // 2] if values else None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()

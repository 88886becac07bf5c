"""Parts of the tables of any benchmark, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
"""The JSON of a run, or a row of it."""

_VERDICTS = {True: "yes", False: "**no**", None: "not told"}


def render_heading(document: Document, arrays: str = "Destination") -> str:
    """Say when, on what and with what the run was; `arrays` says what the device holds."""
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
        f"{arrays} {document['parameters']['device']}; medians of up to "
        f"{document['parameters']['repeats']} rounds, every result compared byte for byte.{state}"
    )


def keep_best(rows: Sequence[Document]) -> list[Document]:
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


def render_speeds(
    document: Document, rows: Sequence[Document], figure: str = "gb_per_s", digits: int = 1
) -> str:
    """Render a line for each contestant, a column for each place.

    Parameters
    ----------
    document
        The JSON of the run.
    rows
        Contestants at every place.
    figure
        Key of the speed; with ``_min`` and ``_max`` it is the key of its least and most.
    digits
        After the point of a speed.
    """
    titles = {place["key"]: place["title"] for place in document["places"]}
    keys = [key for key in titles if any(row["place"] == key for row in rows)]
    cells = {(row["name"], row["place"]): row for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    head = ["GB/s, median (least to most); CPU s/GB", *(titles[key] for key in keys)]
    body = [
        [name, *(_speed_cell(cells.get((name, key)), figure, digits) for key in keys)]
        for name in names
    ]
    return render_table(head, body)


def _speed_cell(row: Document | None, figure: str, digits: int) -> str:
    if row is None:
        return ""
    if row["absent"]:
        return "absent"
    if row["error"]:
        return "failed"
    if row[figure] is None:
        return "not run"
    least, most = row[f"{figure}_min"], row[f"{figure}_max"]
    speed = f"{row[figure]:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"
    routes = f" *{' + '.join(row['routes'])}*" if row["routes"] else ""
    return f"{speed}; {row['cpu_s_per_gb']:.2f}{routes}"


def render_remarks(document: Document, rows: Sequence[Document]) -> list[str]:
    """Say once each why a contestant is absent, failed, or has fewer readings."""
    remarks: dict[str, list[str]] = {}
    for row in rows:
        for label, text in (("absent: ", row["absent"]), ("", row["error"] or row["note"])):
            if text:
                remarks.setdefault(f"{row['name']}: {label}{text}", []).append(row["place"])
    lines = [f"- {text} ({', '.join(places)})" for text, places in remarks.items()]
    lines += [f"- no {p['key']} place: {p['why']}" for p in document["absent_places"]]
    return ["\n".join(_one_line(line) for line in lines)] if lines else []


def render_targets(document: Document) -> str:
    """Render the figures asked for beside the measured ones."""
    body = [
        [
            target["name"],
            target["asked"],
            f"{format_number(target['measured'])} {target['unit']}",
            f"{format_number(target['wanted'])} {target['unit']}",
            _VERDICTS[target["met"]],
            target["evidence"],
        ]
        for target in document["targets"]
    ]
    return render_table(["What", "Asked for", "Measured", "Bound", "Met", "From"], body)


def render_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Render any table; cells become one line each."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(_one_line(cell) for cell in line) + " |" for line in lines)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def format_number(value: float | None) -> str:
    """Give four digits, or a dash for a figure that is missing."""
    return "-" if value is None else f"{value:.4g}"

"""Load a raw file and a model through headrace and its peers: ``python -m benchmarks.load``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.console import make_say, show_tables
from benchmarks.document import build_document, write_json
from benchmarks.memory import memory_of
from benchmarks.result import Role
from benchmarks.run import Contestants, Run, all_contestants, run_all
from benchmarks.settings import Settings, parse_settings
from benchmarks.table import render_document


def main(
    arguments: Sequence[str] | None = None, contestants: Contestants = all_contestants
) -> dict[str, Any]:
    """Run, show the tables, write the JSON.

    Parameters
    ----------
    arguments
        Command line; None takes the process's own.
    contestants
        Who takes part; tests bring their own.

    Returns
    -------
    dict
        The document that was written.
    """
    run = _start(parse_settings(arguments), contestants)
    try:
        run_all(run)
    finally:
        document = build_document(run)
        _save(run)
        show_tables(render_document(document))
    return document


def _start(settings: Settings, contestants: Contestants) -> Run:
    run = Run(
        settings=settings,
        memory=memory_of(settings.device),
        contestants=contestants,
        say=make_say(),
        save=lambda: _save(run),
    )
    return run


def _save(run: Run) -> None:
    if run.settings.json_path is not None:
        write_json(build_document(run), run.settings.json_path)


def find_failures(document: Mapping[str, Any]) -> list[str]:
    """Say where headrace's default call failed or gave wrong bytes; a missed target is not told."""
    ours = [row for row in document["rows"] if row["role"] == Role.OURS]
    return [
        f"{row['name']}, {row['place']}: {row['absent'] or row['error']}"
        for row in ours
        if row["absent"] or row["error"]
    ]


if __name__ == "__main__":
    sys.exit("\n".join(find_failures(main())) or None)

"""The command: run, show the tables, write the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.console import make_say, show_tables
from benchmarks.document import write_json
from benchmarks.memory import memory_of
from benchmarks.save.document import build_document
from benchmarks.save.run import Contestants, SaveRun, run_all
from benchmarks.save.settings import parse_settings
from benchmarks.save.table import render_save


def main(
    arguments: Sequence[str] | None = None, contestants: Contestants | None = None
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
    settings = parse_settings(arguments)
    run = SaveRun(
        settings=settings,
        memory=memory_of(settings.device),
        contestants=contestants or Contestants(),
        say=make_say(),
        save=lambda: _save(run),
    )
    try:
        run_all(run)
    finally:
        document = build_document(run)
        _save(run)
        show_tables(render_save(document))
    return document


def _save(run: SaveRun) -> None:
    if run.settings.json_path is not None:
        write_json(build_document(run), run.settings.json_path)

"""What a benchmark says while it runs, and its tables at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.markdown import Markdown


def make_say() -> Callable[[str], None]:
    """Give a function that writes a line of progress to stderr."""
    progress = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        progress.print(text, markup=False)

    return say


def show_tables(tables: str) -> None:
    """Draw the tables on a terminal; in a pipe they stay Markdown."""
    console = Console()
    if console.is_terminal:
        console.print(Markdown(tables))
    else:
        sys.stdout.write(tables + "\n")

"""The progress bar: on a terminal only, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Meter(Protocol):
    """Told how far a long piece of work has come; any thread may call it."""

    def __call__(self, text: str, moved_nbytes: int, total_nbytes: int) -> None:
        """Take note: what is going on, bytes moved and bytes in all."""


def quiet(text: str, moved_nbytes: int, total_nbytes: int) -> None:
    """Show nothing: the meter of a pipe."""


@contextmanager
def show_progress(*, speed: bool = True) -> Iterator[Meter]:
    """Show a bar on standard error while the block runs; nothing where that is no terminal.

    Parameters
    ----------
    speed
        Show the rate of the bytes; for work that is more than moving bytes it would mislead.
    """
    if not sys.stderr.isatty():
        yield quiet
        return
    from rich import progress as bars
    from rich.console import Console

    columns = [bars.TextColumn("{task.description}", markup=False), bars.BarColumn()]
    columns += [bars.DownloadColumn(), *([bars.TransferSpeedColumn()] if speed else [])]
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def meter(text: str, moved_nbytes: int, total_nbytes: int) -> None:
            progress.update(task, description=text, completed=moved_nbytes, total=total_nbytes)

        yield meter

"""The progress bar: on a terminal only, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress


class Meter(Protocol):
    """Told how far a long piece of work has come; any thread may call it."""

    def __call__(self, text: str, moved_nbytes: int, total_nbytes: int) -> None:
        """Take note: what is going on, bytes moved and bytes in all."""


def quiet(text: str, moved_nbytes: int, total_nbytes: int) -> None:
    """Show nothing: the meter of a pipe."""


@contextmanager
def show_progress(*, rate: bool = True) -> Iterator[Meter]:
    """Show a bar on standard error while the block runs; nothing where that is no terminal.

    Parameters
    ----------
    rate
        Add GB/s since the last call with 0 moved bytes; for work that is more than moving bytes
        it would mislead.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield quiet
        return
    with _open_bar() as progress:
        task = progress.add_task("", total=None, rate="")
        began = time.perf_counter()

        def meter(text: str, moved_nbytes: int, total_nbytes: int) -> None:
            nonlocal began
            began = began if moved_nbytes else time.perf_counter()
            speed = format_rate(moved_nbytes, time.perf_counter() - began) if rate else ""
            total = total_nbytes or None
            progress.update(task, description=text, completed=moved_nbytes, total=total, rate=speed)

        yield meter


def _open_bar() -> Progress:
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TextColumn("{task.fields[rate]}", markup=False),
        bars.TimeRemainingColumn(),
    )
    return bars.Progress(*columns, console=Console(stderr=True), transient=True)


def format_rate(nbytes: int, seconds: float) -> str:
    """Write a rate in 10**9 bytes a second; "" before there is one."""
    return f"{nbytes / seconds / 1e9:.2f} GB/s" if nbytes and seconds > 0 else ""

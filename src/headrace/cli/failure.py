"""The one place where an error becomes a line on standard error and an exit status."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from headrace.errors import HeadraceError
from headrace.report import one_line

_FAILED, _INTERRUPTED = 1, 130

_EXPECTED = (HeadraceError, OSError, ValueError, KeyError, ImportError, MemoryError)
# What bad input and a poor machine cause. Anything else is a fault of headrace: it says so.


@contextmanager
def report_failure(debug: bool) -> Iterator[None]:
    """Turn what the block raises into one line and exit status 1 (130 for Ctrl-C).

    Parameters
    ----------
    debug
        Log to standard error while the block runs, and show the traceback of a failure.
    """
    try:
        with _logging(debug):
            yield
    except BrokenPipeError:
        raise  # the reader of our output went away: typer ends quietly
    except KeyboardInterrupt:
        typer.echo("headrace: interrupted", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    except Exception as error:  # noqa: BLE001 (the top of the program: no traceback for users)
        if debug:
            typer.echo(traceback.format_exc(), err=True, nl=False)
        typer.echo(f"headrace: {describe(error)}", err=True)
        raise typer.Exit(_FAILED) from None


def describe(error: Exception) -> str:
    """One line that says what went wrong."""
    text = str(error)
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])  # str() of a KeyError is the repr of its message
    elif isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{one_line(os.fspath(error.filename))}: {error.strerror}"
    text = one_line(" ".join(text.split())) or type(error).__name__
    if isinstance(error, _EXPECTED):
        return text
    return f"{type(error).__name__}: {text} (unexpected; --debug shows the traceback)"


@contextmanager
def _logging(debug: bool) -> Iterator[None]:
    """Show headrace's log on standard error, or keep it off: the tables say the same."""
    handler = logging.StreamHandler(sys.stderr) if debug else logging.NullHandler()
    logger = logging.getLogger("headrace")
    before = logger.level
    logger.addHandler(handler)
    if debug:
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)

"""Futures: transfers that are made by threads of the context while the caller goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace.report import Report

_AT_ONCE = 4
# Each has workers of its own, and two saturate the link; more only keep short ones from waiting
# behind long ones.


class TransferFuture:
    """A transfer that was submitted: under way, waiting for its turn, or done.

    It keeps the buffers alive. One that is dropped goes on all the same; if it fails, the logger
    ``headrace`` has the reason.
    """

    def __init__(self, future: Future[Report], keeps: object) -> None:
        self._future = future
        self._keeps = keeps

    def result(self, timeout: float | None = None) -> Report:
        """Wait until the bytes are in place, and visible to any stream.

        Parameters
        ----------
        timeout
            Most seconds to wait; None for no limit.

        Returns
        -------
        Report
            Which way the bytes went, and why.

        Raises
        ------
        TimeoutError
            It is not done yet; it goes on.
        concurrent.futures.CancelledError
            It was cancelled.
        HeadraceError, OSError
            As the same transfer would raise if it were not submitted.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._future.done()

    def cancel(self) -> bool:
        """Give it up if no byte has moved yet; False where it is under way, or done."""
        return self._future.cancel()

    def cancelled(self) -> bool:
        """Whether it was given up before a byte moved."""
        return self._future.cancelled()

    def on_end(self, do: Callable[[], None]) -> None:
        """Call something once it has ended, in whatever way and thread."""
        self._future.add_done_callback(lambda _: do())

    def __await__(self) -> Generator[Any, None, Report]:
        """As `result`, for ``await``; a task that is cancelled meanwhile cancels it, too."""
        return asyncio.wrap_future(self._future).__await__()


class Submissions:
    """The threads of one context that make submitted transfers."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, run: Callable[[], Report], label: str, keeps: object) -> TransferFuture:
        """Let a thread make a transfer as soon as one is free.

        Parameters
        ----------
        run
            Makes it.
        label
            What it is called, should it fail.
        keeps
            What must stay alive.

        Raises
        ------
        ValueError
            The context is closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the context is closed; make a new one for further transfers")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_AT_ONCE, "headrace-submitted")
            return TransferFuture(self._threads.submit(_run_logged, run, label), keeps)

    def close(self) -> None:
        """Take no more, and wait until all are done; safe to call again."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()


def _run_logged(run: Callable[[], Report], label: str) -> Report:
    try:
        return run()
    except BaseException as error:
        logging.getLogger("headrace").error("%s: a submitted transfer failed: %s", label, error)
        raise

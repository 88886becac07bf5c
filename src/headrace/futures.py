"""Futures: transfers that are made by threads of the context while the caller goes on."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from headrace.report import Report

_AT_ONCE = 4
# Each has workers of its own, and two saturate the link; more only keep short ones from waiting
# behind long ones.


class TransferFuture:
    """A transfer that was submitted: under way, waiting for its turn, or done.

    Buffers are kept alive until it is done. One that is dropped goes on all the same; if it fails,
    the logger ``headrace`` has the reason.
    """

    def __init__(self, job: Future[Report]) -> None:
        self._job = job

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
        try:
            return self._job.result(timeout)
        finally:
            del self  # else the traceback of an error keeps the future, and that the error

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._job.done()

    def cancel(self) -> bool:
        """Give it up if no byte has moved yet; False where it is under way, or done."""
        return self._job.cancel()

    def cancelled(self) -> bool:
        """Whether it was given up before a byte moved."""
        return self._job.cancelled()

    def __await__(self) -> Generator[Any, None, Report]:
        """As `result`, for ``await``; a task that is cancelled meanwhile cancels it, too."""
        import asyncio  # 20 ms, which those who do not use it shall not pay

        return asyncio.wrap_future(self._job).__await__()


class Submissions:
    """The threads of one context that make submitted transfers.

    A thread ends when nothing waits for one, so that a context which nobody closes leaves none
    behind; they are no daemons, so that the process does not end before what it submitted.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Job] = deque()
        self._turns: set[str] = set()  # of the jobs that threads are at
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._changed = threading.Condition()

    def submit(
        self,
        run: Callable[[], Report],
        label: str,
        release: Callable[[], None],
        turn: str | None = None,
    ) -> TransferFuture:
        """Let a thread make a transfer as soon as one is free.

        Parameters
        ----------
        run
            Makes it; kept until then.
        label
            What it is called, should it fail.
        release
            Called once: after `run`, before anybody is told of the end, or else in its place.
        turn
            Those of one turn are made one after the other, in the order of their submission; None
            for those that need not wait for others.

        Raises
        ------
        ValueError
            The context is closed.
        RuntimeError
            The system gives no thread.
        """
        job = _Job(run, label, release, turn)
        try:
            with self._changed:
                if self._closed:
                    raise ValueError("the context is closed; make a new one for further transfers")
                self._waiting.append(job)
                if len(self._threads) < _AT_ONCE:
                    self._start()
        except BaseException:
            job.cancel()
            raise
        return TransferFuture(job)

    def close(self) -> None:
        """Take no more, and wait until all are done; safe to call again.

        Raises
        ------
        RuntimeError
            A submitted transfer calls it, which it would wait for.
        """
        with self._changed:
            if threading.current_thread() in self._threads:
                raise RuntimeError("close() within a transfer would wait for itself; call it after")
            self._closed = True
            self._changed.wait_for(lambda: not self._threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="headrace-submitted")
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # a limit of threads or memory, or the interpreter is ending
            self._threads.remove(thread)
            if not self._threads:
                raise
        except BaseException:
            self._threads.discard(thread)
            raise

    def _work(self) -> None:
        job: _Job | None = None
        while True:
            with self._changed:
                if job is not None and job.turn is not None:
                    self._turns.remove(job.turn)
                job = self._next()
                if job is None:  # what waits for its turn is left to the thread that has it
                    self._threads.discard(threading.current_thread())
                    self._changed.notify_all()
                    return
            job.do()

    def _next(self) -> _Job | None:
        """Take the first job whose turn it is out of the queue."""
        job = next((each for each in self._waiting if each.turn not in self._turns), None)
        if job is not None:
            self._waiting.remove(job)
            if job.turn is not None:
                self._turns.add(job.turn)
        return job


class _Job(Future[Report]):
    """A transfer in the queue; when its end is told, it has let go of the buffers."""

    def __init__(
        self,
        run: Callable[[], Report],
        label: str,
        release: Callable[[], None],
        turn: str | None,
    ) -> None:
        super().__init__()
        self.turn = turn
        self._label = label
        self._work: list[tuple[Callable[[], Report], Callable[[], None]]] = [(run, release)]

    def cancel(self) -> bool:
        """See `TransferFuture.cancel`."""
        given_up = super().cancel()
        if given_up and self._work:
            _, release = self._work.pop()
            release()
        return given_up

    def do(self) -> None:
        """Make the transfer, unless it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        outcome = _attempt(*self._work.pop())
        _empty_frames(outcome)
        if isinstance(outcome, Report):
            self.set_result(outcome)
        else:
            # As text: some handlers keep what they are given, and an error has the buffers along.
            reason = f"{type(outcome).__name__}: {outcome}"
            message = "%s: a submitted transfer failed: %s"
            logging.getLogger("headrace").error(message, self._label, reason)
            self.set_exception(outcome)
        # The traceback of an error keeps this frame, and the error shall not keep itself.
        del self, outcome


def _attempt(run: Callable[[], Report], release: Callable[[], None]) -> Report | BaseException:
    """What a transfer gives or raises."""
    try:
        try:
            return run()
        finally:
            release()
    except BaseException as error:  # noqa: BLE001 (raised again by `result`)
        return error


def _empty_frames(outcome: object) -> None:
    """Let an error go of what the calls that it ended had in hand: buffers, above all."""
    error = outcome if isinstance(outcome, BaseException) else None
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

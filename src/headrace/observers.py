"""Observers of transfers, and the trace that collects their reports."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import TracebackType

from headrace.planning.plan import Rejection
from headrace.report import Report

Observer = Callable[[Report], None]
"""Told of each transfer once it has ended, in the thread that made it."""


class Observers:
    """Who wants to be told of each `Report`; threads may share it."""

    def __init__(self) -> None:
        self._observers: tuple[Observer, ...] = ()
        self._lock = threading.Lock()

    def add(self, observer: Observer) -> None:
        """Tell `observer` from now on."""
        with self._lock:
            self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Tell `observer` no more."""
        with self._lock:
            self._observers = tuple(each for each in self._observers if each != observer)

    def tell(self, report: Report) -> None:
        """Tell everyone."""
        for observer in self._observers:
            observer(report)


class Publisher:
    """Makes the reports of one context known: to the logger ``headrace``, and to observers.

    Parameters
    ----------
    observers
        Whom to tell.
    """

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._warned: set[Rejection] = set()
        self._lock = threading.Lock()

    def publish(self, report: Report, downgrades: tuple[Rejection, ...]) -> Report:
        """Log a report, warn of each downgrade once for each cause, and tell the observers."""
        logger = logging.getLogger("headrace")
        for downgrade in downgrades:
            with self._lock:
                new = downgrade not in self._warned
                self._warned.add(downgrade)
            if new:
                logger.warning("%s: downgrade: %s", report.source, downgrade)
        logger.info("%s", report)
        self._observers.tell(report)
        return report


@functools.cache
def process_observers() -> Observers:
    """The observers that every context of this process shares unless it is given its own."""
    return Observers()


class Trace:
    """Collects a Report of each transfer made while it is entered, from any thread.

    Parameters
    ----------
    observers
        Whose transfers; by default those of every context of the process.
    """

    def __init__(self, observers: Observers | None = None) -> None:
        self.reports: list[Report] = []
        self._observers = observers or process_observers()

    def __enter__(self) -> Trace:
        self._observers.add(self.reports.append)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._observers.remove(self.reports.append)

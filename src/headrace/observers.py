"""Observers of transfers, and the trace that collects their reports."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType

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

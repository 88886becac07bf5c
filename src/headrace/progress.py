"""Progress: how far a transfer has come, for those who asked to be told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one transfer has come."""

    nbytes: int
    """Bytes moved so far."""
    total_nbytes: int
    """Bytes of the whole transfer."""
    seconds: float
    """Wall time since its first byte could move."""

    @property
    def gb_per_s(self) -> float:
        """Mean rate so far, in 10**9 bytes a second; 0 before there is one."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Wall time that the rest takes at that rate; None before there is one."""
        if not self.nbytes:
            return None
        return (self.total_nbytes - self.nbytes) * self.seconds / self.nbytes


OnProgress = Callable[[Progress], None]
"""Told about ten times a second, in the thread that called, and once at the end."""


class Odometer:
    """Adds up what engines tell, one after the other, and tells the whole transfer's progress.

    Parameters
    ----------
    on_progress
        Whom to tell.
    total_nbytes
        Bytes of the whole transfer.
    """

    def __init__(self, on_progress: OnProgress, total_nbytes: int) -> None:
        self._on_progress = on_progress
        self._total = total_nbytes
        self._began = time.perf_counter()

    def of_leg(self, before_nbytes: int) -> Callable[[int], None]:
        """What one engine shall tell its bytes to, once others have moved so many."""

        def tell(moved: int) -> None:
            seconds = time.perf_counter() - self._began
            self._on_progress(Progress(before_nbytes + moved, self._total, seconds))

        return tell

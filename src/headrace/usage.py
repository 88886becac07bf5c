"""Usage: the transfers of a context that are under way or submitted, which its end waits for."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from headrace.futures import Submissions, TransferFuture
from headrace.report import Report


class Usage:
    """Who uses a context now; threads may share it, and a forked child begins anew."""

    _process = -1

    def __init__(self) -> None:
        self._closed = False
        self._forget_parent()

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """Keep the context open until a transfer has ended.

        Raises
        ------
        ValueError
            The context is closed.
        """
        self._forget_parent()
        transfer = object()
        try:
            with self._changed:
                if self._closed:
                    raise ValueError("the context is closed; make a new one for further transfers")
                self._under_way[transfer] = threading.get_ident()
            yield
        finally:
            with self._changed:
                self._under_way.pop(transfer, None)
                self._changed.notify_all()

    def submit(
        self,
        run: Callable[[], Report],
        label: str,
        release: Callable[[], None],
        turn: str | None,
    ) -> TransferFuture:
        """Let a thread make a transfer; see `Submissions.submit`."""
        self._forget_parent()
        return self._submissions.submit(run, label, release, turn)

    def close(self) -> None:
        """Allow no more, and wait until all have ended; safe to call again.

        Raises
        ------
        RuntimeError
            It is called from within a transfer, which it would wait for.
        """
        self._forget_parent()
        with self._changed:
            if threading.get_ident() in self._under_way.values():
                raise RuntimeError("close() within a transfer would wait for itself; call it after")
        self._submissions.close()
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way)

    def _forget_parent(self) -> None:
        """In a forked child: its parent's threads are not here to end their transfers."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._submissions = Submissions()
            self._under_way: dict[object, int] = {}  # threads, by their transfers
            self._changed = threading.Condition()

"""Probes that may never answer, such as a look at a network mount whose server is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def answer_within(probe: Callable[[], T], timeout_s: float) -> T:
    """Run a probe, and stop waiting for it after a while.

    A probe that does not end is left behind in a daemon thread, which keeps no process alive.

    Raises
    ------
    TimeoutError
        No answer in time.
    Exception
        Whatever the probe raised.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(probe())
        except Exception as error:  # noqa: BLE001 (raised again in the thread that asked)
            errors.append(error)

    thread = threading.Thread(target=run, name="headrace-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return answers[0]

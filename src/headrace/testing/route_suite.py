"""What the suites for reading and for writing share: contexts over faulty files, and threads."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings

from headrace.context import Context
from headrace.options import Options
from headrace.testing.faulty_files import FaultyFiles

BLOCK = 4096
SMALL = Options(workers=4, block_nbytes=BLOCK, pinned_nbytes=4 * BLOCK)
TIMEOUT_S = 60

# Each subclass runs the same test functions, which Hypothesis would otherwise take for a mistake.
run_property = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.differing_executors]
)


class RouteSuite(ABC):
    """A route, and the contexts to test it in."""

    __test__ = False

    route: ClassVar[str]
    """Route to force."""
    unfit_route: ClassVar[str]
    """A route that can never serve this kind of memory."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Let pytest collect the subclass, unless that says otherwise itself."""
        super().__init_subclass__(**arguments)
        if "__test__" not in cls.__dict__:
            cls.__test__ = True

    @abstractmethod
    def make_context(self, **arguments: Any) -> Context:
        """Make a context; `arguments` are ``options`` and ``files``."""

    def check_released(self, context: Context) -> None:
        """Check what a closed context left behind; a subclass adds what it can see."""
        assert not [thread for thread in threading.enumerate() if thread.name == "headrace"]

    @contextmanager
    def open_context(
        self, options: Options = SMALL, **faults: Any
    ) -> Iterator[tuple[Context, FaultyFiles]]:
        """Make a context over faulty files, and check afterwards that it left nothing behind."""
        files = FaultyFiles(**faults)
        context = self.make_context(options=options, files=files)
        with context:
            yield context, files
        assert not files.open_descriptors
        self.check_released(context)


def write_sample(folder: Path, nbytes: int) -> Path:
    """Write a file of bytes that no two blocks share."""
    path = folder / f"{nbytes}.bin"
    path.write_bytes(random.Random(nbytes).randbytes(nbytes))
    return path


def run_at_once(tasks: list[Callable[[], object]]) -> None:
    """Run tasks in threads; daemons, so that a deadlock fails the test and does not hang it."""
    done: list[int] = []

    def attempt(number: int) -> None:
        tasks[number]()
        done.append(number)

    threads = [threading.Thread(target=attempt, args=(n,), daemon=True) for n in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(done) == list(range(len(tasks))), "a task failed or did not end"

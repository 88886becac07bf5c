"""Ways to write arrays of a run to a file: headrace's, and other libraries'."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.contestants import HeadraceParticipant, Participant
from benchmarks.memory import Arrays, Memory
from benchmarks.needs import Need
from benchmarks.result import TMPFS, Role
from benchmarks.save.result import DISK

THREADS = (1, 8, 16)
"""Threads of KvikIO, the first its default; and workers of headrace beside them."""

_TASK_NBYTES = 4 << 20
_WARM_NBYTES = 128 << 20


class Writer(Participant):
    """One way to write arrays to a file."""

    is_exact = True
    """Whether the file must be the reference's, byte for byte; else its tensors must be equal."""

    def write(self, arrays: Arrays, path: Path) -> None:
        """Write to a file that does not exist; the call that is timed."""
        raise NotImplementedError


class HeadraceWriter(HeadraceParticipant, Writer):
    """headrace writes: its call receives the arrays and the path.

    Parameters
    ----------
    name, memory, call, role, given
        See `HeadraceParticipant`.
    is_exact
        See `Writer`.
    """

    def __init__(
        self,
        name: str,
        memory: Memory,
        call: Callable[..., Any],
        role: Role = Role.OURS_EXTRA,
        *,
        is_exact: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(name, memory, call, role, **given)
        self.is_exact = is_exact

    def write(self, arrays: Arrays, path: Path) -> None:
        """See `Writer.write`."""
        self.call(arrays, path)


class KvikioWriter(Writer):
    """KvikIO from memory of the device; its compatibility mode stays as it comes.

    Parameters
    ----------
    source
        Array whose first bytes it writes to start its threads.
    threads
        Of its pool.
    """

    package = "kvikio-cu13"

    def __init__(self, source: Any, threads: int) -> None:
        default = threads == THREADS[0]
        name = f"KvikIO, {threads} {'thread (its default)' if default else 'threads'}"
        role = Role.PEER if default else Role.PEER_TUNED
        places = (TMPFS,) if default else None
        super().__init__(name, ("kvikio", "kvikio.defaults"), role, places=places)
        self._source = source
        self._threads = threads

    @contextmanager
    def session(self, path: Path) -> Iterator[None]:
        """See `Participant.session`; a short write starts the new threads and their buffers."""
        import kvikio.defaults

        settings = {"num_threads": self._threads, "task_size": _TASK_NBYTES}
        with kvikio.defaults.set(settings):
            self.write({"": self._source[:_WARM_NBYTES]}, path)
            yield

    def write(self, arrays: Arrays, path: Path) -> None:
        """See `Writer.write`."""
        import kvikio

        array = arrays[""]
        with kvikio.CuFile(path, "w") as file:
            count = file.write(array)
        if count != len(array):
            raise OSError(f"KvikIO wrote {count} of {len(array)} bytes")


class NumpyTofile(Writer):
    """``ndarray.tofile``, after a copy to host memory: what most scripts do."""

    package = "numpy"

    def __init__(self, memory: Memory) -> None:
        on_host = memory.framework == "numpy"
        name = "ndarray.tofile" if on_host else "tensor.cpu().numpy().tofile"
        super().__init__(name, ("numpy",), places=(DISK,))
        self._on_host = on_host

    def write(self, arrays: Arrays, path: Path) -> None:
        """See `Writer.write`."""
        array = arrays[""]
        host = array if self._on_host else array.cpu().numpy()
        host.tofile(path)


class SafetensorsSaveFile(Writer):
    """``save_file`` of the official library."""

    package = "safetensors"

    def __init__(self, memory: Memory) -> None:
        self._module = f"safetensors.{memory.framework}"
        super().__init__("safetensors save_file", (self._module,))

    def write(self, arrays: Arrays, path: Path) -> None:
        """See `Writer.write`."""
        importlib.import_module(self._module).save_file(dict(arrays), path)


def raw_writers(memory: Memory, source: Any) -> Sequence[Writer]:
    """Every way to write raw bytes; headrace's default call comes first.

    Parameters
    ----------
    memory
        Where the bytes are.
    source
        Array of bytes.
    """

    def write_from(namespace: Any, arrays: Arrays, path: Path, **given: Any) -> None:
        del namespace
        import headrace

        headrace.write_from(arrays[""], path, **given)

    name = "headrace write_from"
    needs = (Need("headrace", "write_from"),)

    def ours(title: str, role: Role = Role.OURS_EXTRA, **given: Any) -> Writer:
        places = None if role is Role.OURS else (TMPFS,)
        full = f"{name}{title}"
        return HeadraceWriter(full, memory, write_from, role, places=places, needs=needs, **given)

    routes = ("host" if memory.device == "cpu" else "cached",)
    return (
        ours("", Role.OURS),
        *(ours(workers_title(count), options={"workers": count}) for count in THREADS),
        *(ours(f', route="{route}"', route=route) for route in routes),
        *(KvikioWriter(source, count) for count in THREADS),
        NumpyTofile(memory),
    )


def workers_title(count: int) -> str:
    """End of the name of headrace with so many workers."""
    return f", workers={count}"


def model_writers(memory: Memory) -> Sequence[Writer]:
    """Every way to save a model as one file; headrace's default call comes first."""
    official = SafetensorsSaveFile(memory)
    return (
        _saver(memory, Role.OURS, {}),
        _saver(memory, Role.OURS_EXTRA, {"align": True}),
        _saver(memory, Role.OURS_EXTRA, {"checksum": True}),
        official,
    )


def _saver(memory: Memory, role: Role, choices: Mapping[str, Any]) -> Writer:
    def save_file(namespace: Any, arrays: Arrays, path: Path, **given: Any) -> None:
        namespace.save_file(dict(arrays), path, **choices, **given)

    namespace = f"headrace.{memory.framework}"
    name = ", ".join([f"{namespace}.save_file", *(f"{k}={v}" for k, v in choices.items())])
    needs = tuple(Need(namespace, "save_file", keyword) for keyword in choices or (None,))
    return HeadraceWriter(name, memory, save_file, role, is_exact=not choices, needs=needs)


class AsyncSaver(Participant):
    """One way to save while the caller goes on."""

    def start(self, arrays: Arrays, path: Path) -> Callable[[float], None]:
        """Begin, and return when the arrays may be changed; what it gives waits for the end."""
        raise NotImplementedError


class HeadraceAsyncSaver(HeadraceParticipant, AsyncSaver):
    """``save_file_async``: its call receives the arrays and the path, and gives a future."""

    def __init__(self, memory: Memory) -> None:
        def save(namespace: Any, arrays: Arrays, path: Path, **given: Any) -> Any:
            return namespace.save_file_async(dict(arrays), path, **given)

        namespace = f"headrace.{memory.framework}"
        needs = (Need(namespace, "save_file_async"),)
        super().__init__(f"{namespace}.save_file_async", memory, save, Role.OURS, needs=needs)
        self._report: tuple[Mapping[str, Any], ...] = ()

    def start(self, arrays: Arrays, path: Path) -> Callable[[float], None]:
        """See `AsyncSaver.start`."""
        future = self.call(arrays, path)

        def wait(timeout_s: float) -> None:
            self._report = (future.result(timeout_s).to_dict(),)

        return wait

    def take_reports(self) -> tuple[Mapping[str, Any], ...]:
        """Hand over the report of the last save; it exists only since the save has ended."""
        return self._report

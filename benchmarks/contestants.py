"""What a contestant is, and headrace's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.memory import Arrays, Memory
from benchmarks.result import Role


class Contestant:
    """One way to load a file, or a directory of shards, to the memory of a run.

    Parameters
    ----------
    name
        As tables show it; unique among the contestants of a kind.
    modules
        What must be importable.
    role
        What it stands for.
    family
        Shared by the settings of one library of which the best is reported.
    """

    package: str = ""
    """Distribution that it measures."""

    def __init__(
        self,
        name: str,
        modules: tuple[str, ...],
        role: Role = Role.PEER,
        family: str | None = None,
    ) -> None:
        self.name = name
        self.modules = modules
        self.role = role
        self.family = family

    def is_available(self) -> bool:
        """Whether it can take part."""
        return self.why_absent() is None

    def why_absent(self) -> str | None:
        """Say why it cannot take part; None if it can."""
        for module in self.modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001  a foreign module may raise anything: it is shown
                return f"cannot import {module}: {type(error).__name__}: {error}"
        return None

    def session(self, source: Path) -> AbstractContextManager[Any]:
        """Set up, untimed, what a reading needs and undo it after; by default nothing."""
        del source
        return nullcontext()

    def load(self, source: Path) -> Arrays:
        """Load; the call that is timed."""
        raise NotImplementedError

    def take_reports(self) -> tuple[Mapping[str, Any], ...]:
        """Hand over headrace's reports of the last load; peers have none."""
        return ()

    def close(self) -> None:
        """Release what lives from one reading to the next."""


class Headrace(Contestant):
    """headrace, by default without any tuning.

    Parameters
    ----------
    name, role
        See `Contestant`.
    memory
        Destination.
    call
        Loads a path: receives headrace's framework namespace, the path, and the keyword
        arguments ``route`` and ``context`` where they are not the defaults.
    route
        Forced route; None leaves the choice to headrace.
    policy
        Policy of a context of its own; None takes the default context.
    """

    package = "headrace"

    def __init__(
        self,
        name: str,
        memory: Memory,
        call: Callable[..., Arrays],
        role: Role = Role.OURS_EXTRA,
        *,
        route: str | None = None,
        policy: str | None = None,
    ) -> None:
        self._namespace = f"headrace.{memory.framework}"
        super().__init__(name, ("headrace", self._namespace), role)
        self._call = call
        self._route = route
        self._policy = policy
        self._context: Any = None
        self._reports: tuple[Mapping[str, Any], ...] = ()

    def session(self, source: Path) -> AbstractContextManager[Any]:
        """See `Contestant.session`; makes the context once."""
        import headrace

        if self._policy is not None and self._context is None:
            options: Any = {"policy": self._policy}
            self._context = headrace.Context(options=headrace.Options(**options))
        return super().session(source)

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        import headrace

        choices: dict[str, Any] = {"route": self._route, "context": self._context}
        given = {name: value for name, value in choices.items() if value is not None}
        with headrace.trace() as trace:
            arrays = self._call(importlib.import_module(self._namespace), source, **given)
        self._reports = tuple(report.to_dict() for report in trace.reports)
        return arrays

    def take_reports(self) -> tuple[Mapping[str, Any], ...]:
        """See `Contestant.take_reports`."""
        return self._reports

    def close(self) -> None:
        """See `Contestant.close`."""
        if self._context is not None:
            self._context.close()
            self._context = None


def headrace_raw(memory: Memory, target: Any) -> list[Contestant]:
    """Give headrace's contestants for a raw file, into `target` and into an array of its own.

    The first row is the one default call that the targets speak of.
    """

    def read_into(namespace: Any, source: Path, **given: Any) -> Arrays:
        del namespace
        import headrace

        headrace.read_into(target, source, **given)
        return {"": target}

    def read(namespace: Any, source: Path, **given: Any) -> Arrays:
        return {"": namespace.read(source, dtype=target.dtype, **_device(memory), **given)}

    name = "headrace read_into"
    return [
        Headrace(name, memory, read_into, Role.OURS),
        Headrace(f"headrace.{memory.framework}.read", memory, read),
        *_variants(name, memory, read_into),
    ]


def headrace_model(memory: Memory) -> list[Contestant]:
    """Give headrace's contestants for a directory of shards; the default call comes first."""

    def load(namespace: Any, source: Path, **given: Any) -> Arrays:
        arrays: Arrays = namespace.load(source, **_device(memory), **given)
        return arrays

    name = f"headrace.{memory.framework}.load"
    return [
        Headrace(name, memory, load, Role.OURS),
        *_variants(name, memory, load),
    ]


def _variants(name: str, memory: Memory, call: Callable[..., Arrays]) -> list[Contestant]:
    routes = ("host", "direct") if memory.device == "cpu" else ("cached", "direct")
    forced = [Headrace(f'{name}, route="{r}"', memory, call, route=r) for r in routes]
    return [*forced, Headrace(f'{name}, policy="cpu"', memory, call, policy="cpu")]


def _device(memory: Memory) -> dict[str, str]:
    return {} if memory.framework == "numpy" else {"device": memory.device}

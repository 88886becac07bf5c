"""What a contestant is, and headrace's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.memory import Arrays, Memory
from benchmarks.needs import Need
from benchmarks.result import RESIDENT, Role

KEPT_NBYTES = 16 << 30
"""Most bytes that stay registered where registrations are kept."""

_RAW_NAME = "headrace read_into"


class Participant:
    """One way to do what a contest is about.

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
    places
        Keys of the places where it takes part; None for all.
    needs
        What the modules must have.
    """

    package: str = ""
    """Distribution that it measures."""

    def __init__(
        self,
        name: str,
        modules: tuple[str, ...],
        role: Role = Role.PEER,
        family: str | None = None,
        places: tuple[str, ...] | None = None,
        needs: tuple[Need, ...] = (),
    ) -> None:
        self.name = name
        self.modules = modules
        self.role = role
        self.family = family
        self.places = places
        self.needs = needs

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
        return next((why for need in self.needs if (why := need.why_missing())), None)

    def session(self, path: Path) -> AbstractContextManager[Any]:
        """Set up, untimed, what a reading needs and undo it after; by default nothing."""
        del path
        return nullcontext()

    def take_reports(self) -> tuple[Mapping[str, Any], ...]:
        """Hand over headrace's reports of the last reading; peers have none."""
        return ()

    def close(self) -> None:
        """Release what lives from one reading to the next."""


class Contestant(Participant):
    """One way to load a file, or a directory of shards, to the memory of a run."""

    def load(self, source: Path) -> Arrays:
        """Load; the call that is timed."""
        raise NotImplementedError


class HeadraceParticipant(Participant):
    """headrace, by default without any tuning.

    Parameters
    ----------
    name, role
        See `Participant`.
    memory
        Whose framework and device are used.
    call
        Does the work: receives headrace's framework namespace, what it is about, and the keyword
        arguments ``route`` and ``context`` where they are not the defaults.
    route
        Forced route; None leaves the choice to headrace.
    options
        Fields of `headrace.Options` of a context of its own; None takes the default context.
    places, needs
        See `Participant`.
    """

    package = "headrace"

    def __init__(
        self,
        name: str,
        memory: Memory,
        call: Callable[..., Any],
        role: Role = Role.OURS_EXTRA,
        *,
        route: str | None = None,
        options: Mapping[str, Any] | None = None,
        places: tuple[str, ...] | None = None,
        needs: tuple[Need, ...] = (),
    ) -> None:
        self._namespace = f"headrace.{memory.framework}"
        super().__init__(name, ("headrace", self._namespace), role, places=places, needs=needs)
        self._call = call
        self._route = route
        self._options = options
        self._context: Any = None
        self._made: tuple[Any, ...] = ()

    def session(self, path: Path) -> AbstractContextManager[Any]:
        """See `Participant.session`; makes the context once."""
        import headrace

        if self._options is not None and self._context is None:
            self._context = headrace.Context(options=headrace.Options(**self._options))
        return super().session(path)

    def call(self, *subject: Any, **more: Any) -> Any:
        """Do the work, and keep the reports of it; `more` goes to the call as well."""
        import headrace

        choices: dict[str, Any] = {"route": self._route, "context": self._context}
        given = {name: value for name, value in choices.items() if value is not None} | more
        with headrace.trace() as trace:
            result = self._call(importlib.import_module(self._namespace), *subject, **given)
        self._made = tuple(trace.reports)
        return result

    def take_reports(self) -> tuple[Mapping[str, Any], ...]:
        """See `Participant.take_reports`."""
        return tuple(report.to_dict() for report in self._made)

    def close(self) -> None:
        """See `Participant.close`."""
        if self._context is not None:
            self._context.close()
            self._context = None


class Headrace(HeadraceParticipant, Contestant):
    """headrace loads: its call receives the source, and gives arrays."""

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        arrays: Arrays = self.call(source)
        return arrays


def headrace_raw(memory: Memory, target: Any) -> list[Contestant]:
    """Give headrace's contestants for a raw file, into `target` and into an array of its own.

    The first row is the one default call that the targets speak of.
    """
    read_into = _raw_read(target)

    def read(namespace: Any, source: Path, **given: Any) -> Arrays:
        return {"": namespace.read(source, dtype=target.dtype, **_device(memory), **given)}

    return [
        Headrace(_RAW_NAME, memory, read_into, Role.OURS),
        Headrace(f"headrace.{memory.framework}.read", memory, read),
        *_variants(_RAW_NAME, memory, read_into),
    ]


def headrace_model(memory: Memory) -> list[Contestant]:
    """Give headrace's contestants for a directory of shards; the default call comes first."""
    name, load = _model_load(memory)
    return [
        Headrace(name, memory, load, Role.OURS),
        *_variants(name, memory, load),
    ]


def headrace_kept(memory: Memory) -> Contestant:
    """Give headrace with a registration of the model's pages that is kept between loads."""
    name, load = _model_load(memory)
    options = {"mapped_nbytes": KEPT_NBYTES}
    return Headrace(f"{name}, mapped_nbytes=16 GiB", memory, load, options=options)


def headrace_gds(memory: Memory, target: Any) -> Contestant:
    """Give headrace with its route through cuFile, for the first bytes of a raw file."""
    call = _raw_read(target)
    return Headrace(f'{_RAW_NAME}, route="gds"', memory, call, route="gds")


def headrace_neighbour(memory: Memory, target: Any) -> list[Contestant]:
    """Give headrace for a raw file with the policy that spares the CPU, and the one for speed."""
    call, fast = _raw_read(target), "host" if memory.device == "cpu" else "cached"
    thrifty = Headrace(f'{_RAW_NAME}, policy="cpu"', memory, call, options={"policy": "cpu"})
    options = {"policy": "speed"}
    name = f'{_RAW_NAME}, policy="speed", route="{fast}"'
    return [thrifty, Headrace(name, memory, call, route=fast, options=options)]


def _raw_read(target: Any) -> Callable[..., Arrays]:
    """Fill `target` with the first bytes of a file."""

    def read_into(namespace: Any, source: Path, **given: Any) -> Arrays:
        del namespace
        import headrace

        headrace.read_into(target, source, **given)
        return {"": target}

    return read_into


def _model_load(memory: Memory) -> tuple[str, Callable[..., Arrays]]:
    def load(namespace: Any, source: Path, **given: Any) -> Arrays:
        arrays: Arrays = namespace.load(source, **_device(memory), **given)
        return arrays

    return f"headrace.{memory.framework}.load", load


def _variants(name: str, memory: Memory, call: Callable[..., Arrays]) -> list[Contestant]:
    on_gpu = memory.device != "cpu"
    routes = ("cached", "direct", "mapped") if on_gpu else ("host", "direct")
    forced = [
        # Pages that are missing would be read one by one: mapped is for resident files alone.
        Headrace(
            f'{name}, route="{route}"',
            memory,
            call,
            route=route,
            places=(RESIDENT,) if route == "mapped" else None,
        )
        for route in routes
    ]
    return [*forced, Headrace(f'{name}, policy="cpu"', memory, call, options={"policy": "cpu"})]


def _device(memory: Memory) -> dict[str, str]:
    return {} if memory.framework == "numpy" else {"device": memory.device}

"""``cufile.json``: which one cuFile would read, and the keys of it that decide routes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headrace.bindings.sysfs import System
from headrace.probing.fact import Fact

DEFAULT_PATH = "/etc/cufile.json"
"""Where cuFile looks when ``CUFILE_ENV_PATH_JSON`` is not set."""

PROPERTIES = (
    "allow_compat_mode",
    "use_pci_p2pdma",
    "gds_rdma_write_support",
    "rdma_dev_addr_list",
    "max_direct_io_size_kb",
    "per_buffer_cache_size_kb",
    "max_device_cache_size_kb",
)
"""Keys below "properties" that matter here (GDS configuration guide)."""

_VARIABLES = MappingProxyType(
    {
        "CUFILE_ALLOW_COMPAT_MODE": "allow_compat_mode",
        "CUFILE_USE_PCIP2PDMA": "use_pci_p2pdma",
    }
)
# Variables that cuFile takes before the file.
_NAME = "cufile.json"
_COMMENT_OR_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True, slots=True)
class CufileConfig:
    """Settings of cuFile, as far as they were found."""

    fact: Fact
    """Whether the file can be read, and what it says."""
    properties: Mapping[str, Any] = field(default_factory=dict)
    """Values of `PROPERTIES` that are set; cuFile has its own defaults for the others."""
    is_hidden: bool = False
    """Whether there is a file whose values are not known."""

    @property
    def allows_compat(self) -> bool:
        """Whether cuFile may serve through POSIX; its default is that it may."""
        return self.properties.get("allow_compat_mode", True) is True

    @property
    def uses_p2pdma(self) -> bool | None:
        """Whether P2PDMA is switched on, which it is not by default; None where nobody can tell."""
        told = self.properties.get("use_pci_p2pdma")
        return None if told is None and self.is_hidden else told is True


def probe_cufile_config(system: System, environment: Mapping[str, str]) -> CufileConfig:
    """Read the configuration that cuFile would read.

    Parameters
    ----------
    system
        Where files are read.
    environment
        The ``CUFILE_*`` variables of the process.
    """
    path = environment.get("CUFILE_ENV_PATH_JSON") or DEFAULT_PATH
    overrides = {
        name: _is_true(environment[variable])
        for variable, name in _VARIABLES.items()
        if variable in environment
    }
    text = system.read(path)
    if text is None:
        return _unread(path, system.exists(path), overrides)
    try:
        properties = _read_properties(text)
    except ValueError as error:
        remedy = f"correct {path}: JSON, where // and /* */ comments are allowed"
        malformed = Fact(_NAME, False, f"malformed: {error}", path, remedy)
        return CufileConfig(malformed, overrides, is_hidden=True)
    properties.update(overrides)
    why = path + "".join(f", {name}" for name in _VARIABLES if name in environment)
    found = _list_values(properties) or "none of the keys that matter, so cuFile's defaults"
    return CufileConfig(Fact(_NAME, True, found, why), properties)


def _unread(path: str, there: bool, overrides: Mapping[str, Any]) -> CufileConfig:
    """What is known where there is no file, or none that may be read."""
    if there:
        found = _list_values(overrides) or "there, but it cannot be read"
        remedy = f"make {path} a file that may be read"
        fact = Fact(_NAME, None, found, f"{path}: cannot be read", remedy)
        return CufileConfig(fact, overrides, is_hidden=True)
    found = _list_values(overrides) or "not there, so cuFile's own defaults"
    remedy = "" if path == DEFAULT_PATH else "set CUFILE_ENV_PATH_JSON to a file, or unset it"
    return CufileConfig(Fact(_NAME, None, found, f"{path}: no such file", remedy), overrides)


def _read_properties(text: str) -> dict[str, Any]:
    """Known keys of the file; ValueError with the line where it is malformed."""
    try:
        document = json.loads(strip_comments(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("line 1: nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("line 1: no object")  # noqa: TRY004 (a fault of the file, with its line)
    section = document.get("properties", {})
    if not isinstance(section, dict):
        line = _line_of(text, '"properties"')
        raise ValueError(f'line {line}: "properties" is no object')  # noqa: TRY004 (as above)
    return {name: section[name] for name in PROPERTIES if name in section}


def strip_comments(text: str) -> str:
    """Blank out ``//`` and ``/* */`` comments outside strings; every line keeps its number."""

    def keep(match: re.Match[str]) -> str:
        found = match[0]
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _COMMENT_OR_STRING.sub(keep, text)


def _line_of(text: str, part: str) -> int:
    return text[: max(text.find(part), 0)].count("\n") + 1


def _list_values(properties: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in properties.items())


def _is_true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")

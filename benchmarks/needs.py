"""What a contestant needs of a library beyond its import."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a version of a module may not have yet."""

    module: str
    """Module that has it."""
    name: str
    """Its name there, with dots for what is inside."""
    keyword: str | None = None
    """Argument that it must take; None asks for none."""

    def why_missing(self) -> str | None:
        """Say what is missing; None if it is there."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part, None)
        if found is None:
            return f"{self.module} has no {self.name}"
        if self.keyword and self.keyword not in inspect.signature(found).parameters:
            return f"{self.module}.{self.name} takes no {self.keyword}="
        return None

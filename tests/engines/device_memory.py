"""What EngineSuite needs of any memory of a GPU, real or made up."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from headrace.testing import EngineSuite


class DeviceMemory(EngineSuite):
    """Destinations inside larger allocations, whose first and last bytes must stay as they are."""

    __test__ = False
    unfit_route = "host"
    lead = 3
    """Bytes before and after a destination; 3 makes the addresses odd."""

    @abstractmethod
    def make_busy_buffer(self, nbytes: int) -> Any:
        """Make a destination that work which is still queued will set to 0."""

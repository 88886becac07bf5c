"""The demo's file in the page cache, or out of it; no root is needed for either."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headrace.bindings.posix import PosixFiles
from headrace.report import format_nbytes
from headrace.storage.residency import ALWAYS_RESIDENT, Residency, measure_residency
from headrace.storage.source import Source
from headrace.types import ByteRange

_BLOCK_NBYTES = 4 << 20
_COLD_SHARE = 0.02
# Up to this much of a file may stay in the cache and a read still counts as cold: a page that
# somebody else looks at cannot be dropped, and it moves no figure.


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file whose place in the page cache can be set."""

    path: str
    """The file."""
    file_system: str
    """Type, as in ``/proc/self/mountinfo``."""

    def warm(self) -> None:
        """Read the whole file once, so that its pages are resident."""
        buffer = bytearray(_BLOCK_NBYTES)
        with open(self.path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def chill(self) -> str:
        """Drop the file's pages.

        Returns
        -------
        str
            "" when they left; otherwise why a cold read cannot be shown.
        """
        with open(self.path, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        residency = self.residency()
        size = os.path.getsize(self.path)
        if residency.method == "unknown":
            return f"no cold figure: nothing tells what the page cache holds ({residency.why})"
        if self.file_system in ALWAYS_RESIDENT:
            return f"no cold figure: {residency.why}"
        if residency.resident_nbytes > _COLD_SHARE * size:
            stayed = f"{format_nbytes(residency.resident_nbytes)} of {format_nbytes(size)}"
            return f"no cold figure: {stayed} would not leave the page cache ({residency.why})"
        return ""

    def residency(self) -> Residency:
        """Ask what the page cache holds of the file now."""
        source = Source(self.path, PosixFiles())
        try:
            whole = (ByteRange(0, source.nbytes),) if source.nbytes else ()
            return measure_residency(source, whole, _BLOCK_NBYTES, self.file_system)
        finally:
            source.close()

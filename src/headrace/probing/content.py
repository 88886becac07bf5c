"""Facts of the file itself, or of a file in the folder: O_DIRECT, alignment, page cache."""

from __future__ import annotations

import os

from headrace.bindings.posix import Files
from headrace.bindings.sysfs import Mount, System
from headrace.probing.alignment import find_alignment
from headrace.probing.directory import first_file
from headrace.probing.fact import Fact
from headrace.probing.volume import probe_volume
from headrace.storage.residency import measure_residency
from headrace.storage.source import Source
from headrace.types import ByteRange

_GRANULE_NBYTES = 4 << 20


def probe_content(path: str, mount: Mount, files: Files, system: System) -> tuple[Fact, ...]:
    """Look at a file without reading it.

    Raises
    ------
    FileNotFoundError
        There is nothing at the path.
    OSError
        It is neither a regular file nor a folder.
    """
    files.path_status(path)
    name = path if not os.path.isdir(path) else first_file(path)
    if name is None:
        why = "no regular file in the folder, and none is written to find out"
        unknown = (Fact(each, None, "unknown", why) for each in ("O_DIRECT", "page cache"))
        return (Fact("readable", None, "no file", path), *unknown)
    try:
        source = Source(name, files)
    except PermissionError as error:
        remedy = "run as somebody who may read it, or change its mode"
        return (Fact("readable", False, "permission denied", f"open: {error}", remedy),)
    try:
        direct = probe_volume(source, (mount,)).direct
        return (
            Fact("readable", True, f"{name}, {source.nbytes} bytes", "open(2)"),
            direct,
            _alignment_fact(name, files, system),
            _residency_fact(source, mount.file_system),
        )
    finally:
        source.close()


def _alignment_fact(path: str, files: Files, system: System) -> Fact:
    found = find_alignment(path, files, system)
    text = (
        f"memory {found.memory_nbytes}, offset {found.offset_nbytes} bytes for direct I/O; "
        f"{found.cufile_nbytes} for cuFile"
    )
    return Fact("alignment", True, text, f"{found.source}; cuFile's 4 KiB rule")


def _residency_fact(source: Source, file_system: str) -> Fact:
    name, nbytes = "page cache", source.nbytes
    if not nbytes:
        return Fact(name, None, "the file is empty", "fstat")
    whole = (ByteRange(0, nbytes),)
    found = measure_residency(source, whole, _GRANULE_NBYTES, file_system)
    if found.method == "unknown":
        remedy = "own the file, or use Linux 6.5 or later"
        return Fact(name, None, "unknown", found.why, remedy)
    held = f"{found.resident_nbytes} of {nbytes} bytes are resident"
    return Fact(name, found.resident_nbytes >= nbytes, held, found.why)

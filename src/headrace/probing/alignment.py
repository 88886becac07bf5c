"""Alignment that a file asks for: of direct I/O, and of cuFile."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from headrace.bindings.posix import Files
from headrace.bindings.sysfs import System
from headrace.options import PAGE_NBYTES
from headrace.probing.block import find_disk
from headrace.probing.directory import first_file

_CUFILE_NBYTES = 4096  # cuFile sends what is not a multiple of this through bounce buffers


@dataclass(frozen=True, slots=True)
class Alignment:
    """What an access has to be a multiple of, to go the straight way."""

    memory_nbytes: int
    """Of the memory address, for direct I/O."""
    offset_nbytes: int
    """Of the file offset and of the length, for direct I/O."""
    source: str
    """Who says so: ``"statx(STATX_DIOALIGN)"``, or whose logical block size it is."""
    cufile_nbytes: int = _CUFILE_NBYTES
    """Of offsets and lengths that cuFile serves without bounce buffers."""


def find_alignment(path: str, files: Files, system: System) -> Alignment:
    """Ask the kernel for the alignment of a file, or of the files in a folder.

    Raises
    ------
    OSError
        The path is missing, may not be read, or is neither a file nor a folder.
    """
    status = files.path_status(path)
    if not stat.S_ISREG(status.mode) and not stat.S_ISDIR(status.mode):
        raise OSError(errno.EINVAL, "neither a regular file nor a folder", path)
    number = status.device
    stated = _stated(path, files)
    if stated is not None:
        return stated
    disk = find_disk(system, f"{os.major(number)}:{os.minor(number)}", "")
    text = system.read(f"{disk.folder}/queue/logical_block_size") if disk else None
    if disk is None or text is None or not text.strip().isdecimal():
        why = "a page: neither statx nor a block device says more"
        return Alignment(PAGE_NBYTES, PAGE_NBYTES, why)
    nbytes = int(text)
    return Alignment(nbytes, nbytes, f"logical block size of {disk.name}")


def _stated(path: str, files: Files) -> Alignment | None:
    """What statx says; None where the kernel, or the file system, does not."""
    name = first_file(path)
    if name is None:
        return None
    fd = files.open(name)
    try:
        found = files.direct_alignment(fd)
    except OSError:  # a kernel without statx
        return None
    finally:
        files.close(fd)
    if found is None or not (found.memory and found.offset):
        return None
    return Alignment(found.memory, found.offset, "statx(STATX_DIOALIGN)")

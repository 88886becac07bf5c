"""Files compared byte for byte, by plain reads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np

from benchmarks.files import CHUNK_NBYTES, for_each_chunk, read_all


def find_file_difference(path: Path, wanted: Path, nbytes: int) -> str | None:
    """Compare a whole file with the first bytes of another.

    Parameters
    ----------
    path
        The file that was written.
    wanted
        A file that begins with what it should hold.
    nbytes
        Bytes that it should have.

    Returns
    -------
    str or None
        The first fault; None if there is none.
    """
    size = path.stat().st_size
    if size != nbytes:
        return f"the file has {size} bytes; it should have {nbytes}"
    local = threading.local()
    wrong: list[int] = []
    with path.open("rb") as mine, wanted.open("rb") as theirs:

        def compare(start: int) -> None:
            if not hasattr(local, "pair"):
                local.pair = np.empty((2, CHUNK_NBYTES), np.uint8)
            found, right = local.pair[:, : min(CHUNK_NBYTES, nbytes - start)]
            read_all(mine.fileno(), memoryview(found), start)
            read_all(theirs.fileno(), memoryview(right), start)
            if not np.array_equal(found, right):
                wrong.append(start + int(np.argmax(found != right)))

        for_each_chunk(nbytes, compare)
    return f"the file has wrong bytes, the first at {min(wrong)}" if wrong else None


def empty_folder(folder: Path) -> None:
    """Delete the files of a folder, so that the next is new, and wait until that is on the disk."""
    for path in folder.iterdir():
        path.unlink()
    sync_path(folder)


def sync_path(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

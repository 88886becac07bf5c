"""A file to look at where a folder was named: nothing is ever written to find something out."""

from __future__ import annotations

import itertools
import os

_MOST_NAMES = 1000  # a folder of millions of files is not read to its end


def first_file(path: str) -> str | None:
    """The path itself if it is a regular file, else a readable regular file in that folder."""
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        return None
    try:
        with os.scandir(path) as entries:
            for entry in itertools.islice(entries, _MOST_NAMES):
                if entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
                    return entry.path
    except OSError:
        return None
    return None

"""The record of udev that cuFile asks for before it takes a file, where no udev writes any."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.places import PlaceError

RUN = Path("/run/udev")
"""Where udev keeps what it knows."""

_RECORD = "I:1\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE={}\n"


@contextmanager
def udev_record(directory: Path, filesystem: str, run: Path = RUN) -> Iterator[Path]:
    """Let udev know the block device below a directory; what was made is removed after.

    Parameters
    ----------
    directory
        Any directory of the file system.
    filesystem
        Its type, ``"ext4"`` say.
    run
        Where udev's records lie.

    Yields
    ------
    Path
        The record; one that udev has written stays as it is.

    Raises
    ------
    PlaceError
        It cannot be written; only root can.
    """
    number = directory.stat().st_dev
    record = run / "data" / f"b{os.major(number)}:{os.minor(number)}"
    with ExitStack() as stack:
        try:
            for missing in (run, record.parent):
                _make_folder(missing, stack)
            for path, text in ((run / "control", ""), (record, _RECORD.format(filesystem))):
                _make_file(path, text, stack)
        except OSError as error:
            raise PlaceError(f"no udev record can be written: {error}") from None
        yield record


def _make_folder(path: Path, stack: ExitStack) -> None:
    if not path.is_dir():
        path.mkdir()
        stack.callback(path.rmdir)


def _make_file(path: Path, text: str, stack: ExitStack) -> None:
    if not path.exists():
        path.write_text(text)
        stack.callback(path.unlink)

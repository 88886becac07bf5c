"""`write_from` where somebody else uses the same file at the same time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import headrace as hr
from headrace.testing import FaultyFiles
from headrace.testing.write_checks import make_data

PAGE = 4096


class Interrupting(FaultyFiles):
    """Does something once, just before the first bytes are written."""

    act: Callable[[], object] | None = None

    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        act, self.act = self.act, None
        if act:
            act()
        return FaultyFiles.pwritev(self, fd, views, file_offset)


@pytest.mark.parametrize("route", ["host", "direct"])
@pytest.mark.parametrize("old", [None, 100])
@pytest.mark.parametrize("theirs", [PAGE, 300 * PAGE + 5], ids=["before", "behind"])
def test_write_that_succeeded_meanwhile_survives_a_failed_one(
    tmp_path: Path, route: str, old: int | None, theirs: int
) -> None:
    path, data = tmp_path / "file", make_data(9 * PAGE)
    if old:
        path.write_bytes(bytes(old))
    files = Interrupting(write_eio_at=210 * PAGE)
    files.act = lambda: hr.write_from(data, path, file_offset=theirs, route=route)
    with hr.Context(files=files) as context, pytest.raises(OSError, match="EIO"):
        hr.write_from(bytes(99 * PAGE), path, file_offset=200 * PAGE, route=route, context=context)
    assert path.read_bytes()[theirs : theirs + len(data)] == data


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda path: path.unlink(), "removed"),
        (lambda path: (path.unlink(), path.write_bytes(b"theirs")), "replaced by another file"),
    ],
)
def test_file_that_is_taken_away_meanwhile_is_an_error(
    tmp_path: Path, act: Callable[[Path], object], told: str
) -> None:
    path, files = tmp_path / "file", Interrupting()
    path.write_bytes(bytes(100))
    files.act = lambda: act(path)
    with (
        hr.Context(files=files) as context,
        pytest.raises(OSError, match=f"{told} while it was written") as caught,
    ):
        hr.write_from(bytes(9 * PAGE), path, context=context)
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))
    assert (path.read_bytes() if path.exists() else None) in (None, b"theirs")


def test_length_that_cannot_be_restored_is_a_note_on_the_first_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    files = FaultyFiles(write_eio_at=5 * PAGE, fail={"resize": errno.EROFS})
    with hr.Context(files=files) as context, pytest.raises(OSError, match="EIO") as caught:
        hr.write_from(bytes(9 * PAGE), path, context=context)
    (note,) = caught.value.__notes__
    assert str(path) in note
    assert "EROFS" in note


def test_interrupt_leaves_the_old_length(tmp_path: Path) -> None:
    path, files = tmp_path / "file", Interrupting()

    def interrupt() -> None:
        raise KeyboardInterrupt

    files.act = interrupt
    with hr.Context(files=files) as context, pytest.raises(KeyboardInterrupt):
        hr.write_from(bytes(9 * PAGE), path, context=context)
    assert os.listdir(tmp_path) == []

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.bindings.posix import PosixFiles
from headrace.storage.targets import Targets
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from tests.support import TIMEOUT_S, RecordedSystem, refuse

PART = 10_000
IN_MEMORY = RecordedSystem({"/proc/self/mountinfo": "21 1 0:20 / / rw - tmpfs tmpfs rw\n"})
"""Only there the GPU may write into pages of a file."""


@pytest.fixture
def targets() -> Targets:
    return Targets()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def write(
    targets: Targets, path: Path, content: bytes, first: int = 0, fail: bool = False
) -> Iterator[None]:
    """One write in steps: it is open, then the bytes are there, then it ends or fails."""
    with targets.open(str(path), PosixFiles()) as (sink, extend):
        yield
        extend(first + len(content))
        sink.write([memoryview(content)], first)
        yield
        if fail:
            raise refuse(errno.EIO)


def finish(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def test_file_that_was_made_for_a_failed_write_is_removed(targets: Targets, path: Path) -> None:
    with pytest.raises(OSError, match="EIO"):
        finish(write(targets, path, b"new", fail=True))
    assert not path.exists()


def test_failed_write_gives_the_file_its_old_length(targets: Targets, path: Path) -> None:
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="EIO"):
        finish(write(targets, path, b"new", first=2, fail=True))
    assert path.read_bytes() == b"oln"


def test_link_that_leads_nowhere_stays_when_its_write_fails(targets: Targets, path: Path) -> None:
    path.symlink_to("elsewhere")
    with pytest.raises(OSError, match="EIO"):
        finish(write(targets, path, b"new", fail=True))
    assert path.is_symlink()
    assert not path.exists()


def test_file_that_somebody_put_in_its_place_is_not_removed(targets: Targets, path: Path) -> None:
    steps = write(targets, path, b"new", fail=True)
    next(steps)
    other = path.with_name("other")
    other.write_bytes(b"other")
    other.rename(path)
    with pytest.raises(OSError, match="EIO"):
        finish(steps)
    assert path.read_bytes() == b"other"


def test_failed_write_takes_nothing_from_one_that_had_ended_meanwhile(
    targets: Targets, path: Path
) -> None:
    failing = write(targets, path, b"bad", fail=True)
    next(failing)
    finish(write(targets, path, b"good", first=3))
    with pytest.raises(OSError, match="EIO") as caught:
        finish(failing)
    assert path.read_bytes() == b"badgood"
    assert any("others wrote to it" in note for note in caught.value.__notes__)


def test_failed_write_takes_nothing_from_one_that_goes_on(targets: Targets, path: Path) -> None:
    good = write(targets, path, b"good", first=3)
    next(good)
    failing = write(targets, path.with_name("link"), b"bad", fail=True)
    path.with_name("link").symlink_to(path)
    with pytest.raises(OSError, match="EIO"):
        finish(failing)
    finish(good)
    assert path.read_bytes() == b"badgood"


def test_write_that_begins_after_the_company_left_is_undone_again(
    targets: Targets, path: Path
) -> None:
    first, second = write(targets, path, b"first"), write(targets, path, b"second")
    next(first)
    next(second)
    finish(first)
    finish(second)
    with pytest.raises(OSError, match="EIO"):
        finish(write(targets, path, b"more", first=6, fail=True))
    assert path.read_bytes() == b"second"


def test_extending_never_cuts(targets: Targets, path: Path) -> None:
    path.write_bytes(b"12345")
    with targets.open(str(path), PosixFiles()) as (_, extend):
        extend(3)
        assert path.stat().st_size == 5
        extend(9)
        assert path.stat().st_size == 9


def test_old_length_that_cannot_be_restored_is_told_beside_the_failure(
    targets: Targets, path: Path
) -> None:
    files = FaultyFiles(fail={"remove": errno.EACCES})

    def fail() -> None:
        with targets.open(str(path), files):
            raise refuse(errno.EIO)

    with pytest.raises(OSError, match="EIO") as caught:
        fail()
    assert any("could not be restored" in note for note in caught.value.__notes__)
    assert files.open_descriptors == ()


# Through the front door.


@pytest.mark.parametrize("route", ["cached", "direct", "mapped"])
def test_parts_of_a_new_file_are_written_at_the_same_time(path: Path, route: str) -> None:
    """In no order: a later part may be written first, and a shorter file must not result."""
    cuda = FakeCuda()
    arrays = [FakeDeviceArray(cuda, PART) for _ in range(12)]
    for number, array in enumerate(arrays):
        array.fill(number + 1)
    with hr.Context(cuda=cuda, system=IN_MEMORY) as context:
        for _ in range(15):
            path.unlink(missing_ok=True)
            futures = [
                context.submit_write(array, path, file_offset=number * PART, route=route)
                for number, array in reversed(list(enumerate(arrays)))
            ]
            for future in futures:
                future.result(TIMEOUT_S)
            content = path.read_bytes()
            assert content == b"".join(array.tobytes() for array in arrays)


def test_part_that_fails_leaves_the_parts_that_were_written(path: Path) -> None:
    class Held(FaultyFiles):
        """The failing write is held until the other one is submitted."""

        def create(self, path: str, mode: int) -> int:
            fd = super().create(path, mode)
            made.set()
            assert let_go.wait(TIMEOUT_S)
            return fd

    made, let_go = threading.Event(), threading.Event()
    files = Held(write_eio_at=1)
    with hr.Context(files=files) as context:
        failing = context.submit_write(bytes([1]) * PART, path)
        assert made.wait(TIMEOUT_S)
        good = context.submit_write(bytes([2]) * PART, path, file_offset=PART)
        let_go.set()
        good.result(TIMEOUT_S)
        with pytest.raises(OSError, match="EIO"):
            failing.result(TIMEOUT_S)
    assert path.read_bytes()[PART:] == bytes([2]) * PART


def test_route_that_cannot_serve_leaves_a_file_as_it_was(path: Path) -> None:
    path.write_bytes(b"old")
    before = path.stat()
    with hr.Context() as context, pytest.raises(hr.RouteUnavailable):
        hr.write_from(bytes(PART), path, route="mapped", context=context)
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, 3)

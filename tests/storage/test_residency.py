from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bindings.sysfs import Linux, read_mounts
from headrace.probing.volume import find_mount
from headrace.storage.residency import Residency, measure_residency
from headrace.testing import FaultyFiles
from headrace.testing.faulty_files import pages_where
from headrace.types import ByteRange, windows
from tests.support import (
    PAGE,
    disk_folder,
    drop,
    needs_mount,
    open_source,
    warm,
    write_random,
)

NOBODY = 65_534
MIB = 1 << 20


def measure(
    path: Path,
    *wanted: ByteRange,
    files: FaultyFiles | None = None,
    granule: int = 16 * PAGE,
    file_system: str | None = None,
) -> Residency:
    kind = file_system or find_mount(str(path), read_mounts(Linux())).file_system
    with open_source(path, files or FaultyFiles()) as source:
        ranges = wanted or (ByteRange(0, source.nbytes),)
        return measure_residency(source, ranges, granule, kind)


def states(residency: Residency) -> list[tuple[int, int, bool | None]]:
    return [(s.file_range.start, s.file_range.stop, s.resident) for s in residency.stretches]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Size without bytes, for page caches that are made up."""
    path = tmp_path_factory.mktemp("residency") / "sparse"
    path.touch()
    os.truncate(path, 64 * PAGE + 17)
    return path


@st.composite
def wanted_ranges(draw: st.DrawFn) -> tuple[ByteRange, ...]:
    cuts = sorted(draw(st.sets(st.integers(0, 64 * PAGE + 17), min_size=2, max_size=6)))
    parts = [ByteRange(first, stop) for first, stop in pairwise(cuts)]
    return tuple(parts[::2])


@settings(deadline=None)
@given(
    wanted=wanted_ranges(),
    held=st.sets(st.integers(0, 64)),
    granule=st.integers(1, 9).map(lambda pages: pages * PAGE),
    invert=st.booleans(),
    method=st.sampled_from(["cachestat", "mincore"]),
)
def test_any_page_cache_is_told_apart_granule_by_granule(
    sparse: Path,
    wanted: tuple[ByteRange, ...],
    held: set[int],
    granule: int,
    invert: bool,
    method: str,
) -> None:
    held = set(range(65)) - held if invert else held
    files = FaultyFiles(
        resident=pages_where(lambda page: page in held), no_cachestat=method == "mincore"
    )
    found = measure(sparse, *wanted, files=files, granule=granule, file_system="ext4")
    assert found.method == method
    # They cover what is wanted and nothing else, and are as few as the states allow.
    expected: list[tuple[int, int, bool]] = []
    for part in wanted:
        for window in windows(part, granule):
            state = is_resident(window, held)
            start = window.start
            if start != part.start and expected[-1][2] == state:
                start, _, _ = expected.pop()
            expected.append((start, window.stop, state))
    assert states(found) == expected
    # To the page: each range may count the rest of its first and of its last page.
    exact = sum(overlap(part, page) for part in wanted for page in held)
    slack = sum(2 * PAGE for _ in wanted)
    assert exact <= found.resident_nbytes <= exact + slack
    assert found.resident_nbytes <= sum(part.nbytes for part in wanted)


def is_resident(window: ByteRange, held: set[int]) -> bool:
    """The rule: at least seven of eight pages."""
    pages = range(window.start // PAGE, -(-window.stop // PAGE))
    return 8 * len(held.intersection(pages)) >= 7 * len(pages)


def overlap(part: ByteRange, page: int) -> int:
    return max(0, min(part.stop, (page + 1) * PAGE) - max(part.start, page * PAGE))


@pytest.mark.parametrize(
    ("missing", "resident"), [(0, True), (1, True), (2, True), (3, False), (16, False)]
)
def test_seven_pages_of_eight_make_a_granule_resident(
    sparse: Path, missing: int, resident: bool
) -> None:
    files = FaultyFiles(resident=pages_where(lambda page: page % 16 >= missing))
    found = measure(sparse, ByteRange(0, 64 * PAGE), files=files, file_system="ext4")
    assert states(found) == [(0, 64 * PAGE, resident)]
    assert found.resident_nbytes == (64 - 4 * missing) * PAGE


def test_granules_that_are_clearly_one_or_the_other_are_not_counted_one_by_one(
    sparse: Path,
) -> None:
    asked: list[int] = []

    def half(file_offset: int, nbytes: int) -> int:
        asked.append(nbytes)
        return pages_where(lambda page: page < 32)(file_offset, nbytes)

    found = measure(
        sparse, ByteRange(0, 64 * PAGE), files=FaultyFiles(resident=half), file_system="ext4"
    )
    assert states(found) == [(0, 32 * PAGE, True), (32 * PAGE, 64 * PAGE, False)]
    assert len(asked) <= 4


def test_ranges_of_more_than_a_quarter_gigabyte_are_counted_in_parts_and_joined(
    tmp_path: Path,
) -> None:
    path, size = tmp_path / "large", (1 << 30) + 5
    path.touch()
    os.truncate(path, size)
    edge = 300 * MIB

    def count(file_offset: int, nbytes: int) -> int:
        return max(0, min(edge, file_offset + nbytes) - file_offset) // PAGE

    found = measure(path, files=FaultyFiles(resident=count), granule=4 * MIB, file_system="ext4")
    assert states(found) == [(0, edge, True), (edge, size, False)]
    assert found.resident_nbytes == edge


def test_granule_that_does_not_divide_the_parts_still_cuts_at_its_multiples(
    tmp_path: Path,
) -> None:
    path, size, granule = tmp_path / "large", 600 * MIB, 3 * PAGE
    path.touch()
    os.truncate(path, size)
    edge = 200_001 * granule // PAGE * PAGE
    files = FaultyFiles(
        resident=lambda file_offset, nbytes: max(
            0, -(-(min(edge, file_offset + nbytes) - file_offset) // PAGE)
        )
    )
    found = measure(path, files=files, granule=granule, file_system="ext4")
    assert [cut % granule for start, _, _ in states(found) for cut in (start,)] == [0] * len(
        found.stretches
    )
    assert states(found)[0][2]


# Real files.


def test_written_file_is_wholly_resident(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB + 100)
    found = measure(path)
    assert states(found) == [(0, 2 * MIB + 100, True)]
    assert (found.resident_nbytes, found.method) == (2 * MIB + 100, "cachestat")


def test_dropped_file_is_not_resident_and_measuring_does_not_make_it_so(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB + 100)
    drop(path)
    for _ in range(2):
        found = measure(path)
        assert states(found) == [(0, 2 * MIB + 100, False)]
        assert found.resident_nbytes == 0


@pytest.mark.parametrize("method", ["cachestat", "mincore"])
@pytest.mark.parametrize("start", [0, MIB])
def test_half_resident_file_has_two_stretches(tmp_path: Path, method: str, start: int) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB)
    drop(path)
    warm(path, start, MIB)
    found = measure(path, files=FaultyFiles(no_cachestat=method == "mincore"))
    assert states(found) == [(0, MIB, start == 0), (MIB, 2 * MIB, start == MIB)]
    assert (found.resident_nbytes, found.method) == (MIB, method)


def test_hole_of_one_granule_is_found(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB)
    drop(path)
    warm(path, 0, 32 * PAGE)
    warm(path, 48 * PAGE, 2 * MIB - 48 * PAGE)
    found = measure(path)
    assert states(found) == [
        (0, 32 * PAGE, True),
        (32 * PAGE, 48 * PAGE, False),
        (48 * PAGE, 2 * MIB, True),
    ]
    assert found.resident_nbytes == 2 * MIB - 16 * PAGE


def test_only_the_wanted_ranges_are_looked_at(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB)
    drop(path)
    warm(path, MIB, MIB)
    wanted = ByteRange(5, 1000), ByteRange(MIB + 1, MIB + 9000), ByteRange(2 * MIB - 1, 2 * MIB)
    found = measure(path, *wanted)
    assert states(found) == [
        (5, 1000, False),
        (MIB + 1, MIB + 9000, True),
        (2 * MIB - 1, 2 * MIB, True),
    ]
    assert found.resident_nbytes == 9000


def test_file_on_tmpfs_is_resident_by_nature_and_nobody_is_asked() -> None:
    shm = Path("/dev/shm")
    if find_mount(str(shm), read_mounts(Linux())).file_system != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")
    path = shm / f"headrace-{os.getpid()}"
    try:
        write_random(path, 3 * PAGE)
        found = measure(path, files=FaultyFiles(no_cachestat=True, no_mincore=True))
    finally:
        path.unlink()
    assert states(found) == [(0, 3 * PAGE, True)]
    assert (found.method, found.resident_nbytes) == ("by nature", 3 * PAGE)
    assert "tmpfs" in found.why


@pytest.mark.root
def test_file_on_an_overlay_is_seen_through_mincore(tmp_path: Path) -> None:
    folder = disk_folder(tmp_path)
    for name in ("lower", "upper", "work", "merged"):
        (folder / name).mkdir()
    write_random(folder / "lower" / "file", 2 * MIB)
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    with mounted(folder / "merged", "-t", "overlay", "overlay", "-o", options):
        path = folder / "merged" / "file"
        resident = measure(path)
        drop(folder / "lower" / "file")
        dropped = measure(path)
    assert states(resident) == [(0, 2 * MIB, True)]
    assert (resident.method, resident.resident_nbytes) == ("mincore", 2 * MIB)
    assert "overlay" in resident.why
    assert states(dropped) == [(0, 2 * MIB, False)]


@contextlib.contextmanager
def mounted(target: Path, *arguments: str) -> Iterator[None]:
    needs_mount(*arguments, str(target))
    try:
        yield
    finally:
        os.system(f"umount {target}")


def test_kernel_without_cachestat_is_asked_through_mincore(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB)
    found = measure(path, files=FaultyFiles(no_cachestat=True))
    assert (found.method, found.resident_nbytes) == ("mincore", 2 * MIB)
    assert "cachestat: ENOSYS" in found.why


@contextlib.contextmanager
def ordinary_user(path: Path, mode: int) -> Iterator[FaultyFiles]:
    """Be somebody who does not own the file, and whom cachestat therefore refuses."""
    path.chmod(mode)
    for folder in path.parents:
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    os.setresuid(NOBODY, NOBODY, 0)
    if not os.access(path, os.R_OK):
        os.setresuid(0, 0, 0)
        pytest.skip(f"others cannot reach {path}")
    try:
        yield FaultyFiles(deny_cachestat=True)
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.root
def test_writer_of_somebody_elses_file_is_told_by_mincore(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB)
    drop(path)
    with ordinary_user(path, 0o666) as files:
        found = measure(path, files=files)
    assert (states(found), found.method) == ([(0, 2 * MIB, False)], "mincore")


@pytest.mark.root
def test_reader_of_somebody_elses_file_does_not_believe_mincore(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB)
    drop(path)
    with ordinary_user(path, 0o644) as files:
        cold = measure(path, files=files)
        assert not files.open_descriptors
    assert cold.method != "mincore"
    assert "cachestat: EPERM" in cold.why
    assert "only the owner or a writer" in cold.why
    # Nobody says that bytes are there which are not, and asking brings (nearly) none in.
    believed = sum(each.file_range.nbytes for each in cold.stretches if each.resident)
    assert believed <= MIB // 8
    assert measure(path).resident_nbytes <= MIB // 4


@pytest.mark.root
def test_reader_of_somebody_elses_file_sees_what_is_resident(tmp_path: Path) -> None:
    path = disk_folder(tmp_path) / "file"
    write_random(path, 2 * MIB)
    drop(path)
    warm(path, MIB, MIB)
    with ordinary_user(path, 0o644) as files:
        found = measure(path, files=files)
    assert found.method == "samples"
    assert states(found) == [(0, MIB, False), (MIB, 2 * MIB, True)]
    assert found.resident_nbytes == MIB


def test_nothing_that_can_be_asked_is_unknown_with_both_reasons(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_random(path, 3 * PAGE)
    found = measure(path, files=FaultyFiles(no_cachestat=True, no_mincore=True), file_system="ext4")
    assert (found.method, found.resident_nbytes) == ("unknown", 0)
    assert "cachestat: ENOSYS" in found.why
    assert "mincore" in found.why
    assert [(s.file_range, s.resident) for s in found.stretches] == [(ByteRange(0, 3 * PAGE), None)]


def test_empty_wanted_ranges_have_no_stretches(sparse: Path) -> None:
    with open_source(sparse) as source:
        found = measure_residency(source, (), 16 * PAGE, "ext4")
    assert (found.stretches, found.resident_nbytes) == ((), 0)


def test_empty_file_is_known_to_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    for files in (FaultyFiles(), FaultyFiles(no_cachestat=True)):
        with open_source(path, files) as source:
            found = measure_residency(source, (), 16 * PAGE, "ext4")
        assert (found.stretches, found.resident_nbytes) == ((), 0)


def test_file_truncated_before_it_is_measured_is_no_value_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_random(path, 64 * PAGE)
    with open_source(path, FaultyFiles(no_cachestat=True)) as source:
        os.truncate(path, 2 * PAGE)
        with pytest.raises((OSError, EOFError)):
            measure_residency(source, (ByteRange(0, 64 * PAGE),), 16 * PAGE, "ext4")

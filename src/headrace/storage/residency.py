"""What the page cache holds of a file: stretches that are resident, and stretches that are not."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.memory.alignment import align_down, align_up
from headrace.storage.source import Source
from headrace.types import ByteRange, windows

ALWAYS_RESIDENT = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
"""File systems whose bytes live in memory by nature."""

REGISTERED = "registered"
"""`Residency.method` of what stays registered with the GPU."""

_UNSEEN_BY_CACHESTAT = ("overlay",)
# An overlay's own inodes have no pages: cachestat answers 0 for a file that is wholly resident
# (seen on Linux 6.18), while a mapping of it goes to the file underneath, where mincore looks.

_PART_NBYTES = 256 << 20
_PARALLEL_S = 0.004
_COUNTERS = 8
# cachestat walks the page tree: 0.3 ms for 8 GiB of large folios, 31 to 42 ms where the folios are
# small, 5 ms in threads, which themselves cost 2 ms.

_RESIDENT_EIGHTHS = 7
# A granule with some pages missing is read faster through the page cache from about 0.8 resident
# on: resident 50 GB/s, missing 9 GB/s, against 27 GB/s around the cache (FACTS: zram).


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of a file in one state."""

    file_range: ByteRange
    """Where."""
    resident: bool | None
    """Whether the page cache holds (nearly) all of it; None where that cannot be known."""


@dataclass(frozen=True, slots=True)
class Residency:
    """What the page cache held of the wanted ranges at one moment."""

    stretches: tuple[Stretch, ...]
    """In file order; they cover the wanted ranges and nothing else."""
    resident_nbytes: int
    """Bytes of them in the page cache, to the page."""
    method: str
    """"cachestat", "mincore", "samples", "by nature", "registered", or "unknown"."""
    why: str
    """What the method says, or why none could be used."""

    @classmethod
    def of_all(cls, wanted: tuple[ByteRange, ...], method: str, why: str) -> Residency:
        """Of ranges that are known to be resident without a look."""
        stretches = tuple(Stretch(part, True) for part in wanted)
        return cls(stretches, sum(part.nbytes for part in wanted), method, why)


Counter = Callable[[ByteRange], int]
"""Pages of a page-aligned range that the page cache holds."""


def measure_residency(
    source: Source, wanted: tuple[ByteRange, ...], granule_nbytes: int, file_system: str
) -> Residency:
    """Ask the kernel which parts of some ranges are in the page cache, without touching them.

    Parameters
    ----------
    source
        The file.
    wanted
        Ranges in file order, within the file.
    granule_nbytes
        Stretches are cut at multiples of this many bytes; a multiple of the page size.
    file_system
        Its type, as in ``/proc/self/mountinfo``.
    """
    if file_system in ALWAYS_RESIDENT:
        why = f"{file_system} keeps its files in memory"
        return Residency.of_all(wanted, "by nature", why)
    with contextlib.ExitStack() as stack:
        method, why, count = _pick_method(source, file_system, granule_nbytes, stack)
        if count is None:
            return Residency(tuple(Stretch(part, None) for part in wanted), 0, method, why)
        try:
            return _measure_all(wanted, granule_nbytes, count, method, why)
        except (OSError, ValueError):
            source.verify_unchanged()  # a mapping past the end of a file that was truncated
            raise


def _measure_all(
    wanted: tuple[ByteRange, ...], granule_nbytes: int, count: Counter, method: str, why: str
) -> Residency:
    stretches: list[Stretch] = []
    resident = 0
    for part in wanted:
        found, held = _measure(part, granule_nbytes, count)
        stretches.extend(found)
        resident += held
    return Residency(tuple(stretches), resident, method, why)


def _pick_method(
    source: Source, file_system: str, granule: int, stack: contextlib.ExitStack
) -> tuple[str, str, Counter | None]:
    """The first way of asking that works; what it opens is closed with `stack`."""
    files, fd = source.files, source.fd
    first_page = ByteRange(0, min(source.nbytes, mmap.PAGESIZE))
    reasons: list[str] = []

    def cachestat(part: ByteRange) -> int:
        return files.cached_pages(fd, part.start, part.nbytes)

    def mincore(part: ByteRange) -> int:
        return files.mapped_pages(fd, part.start, part.nbytes)

    sample = _open_sampler(source, granule, stack)
    for method, count, objection in (
        ("cachestat", cachestat, _object_to_cachestat(file_system)),
        ("mincore", mincore, _object_to_mincore(source)),
        ("samples", sample, ""),
    ):
        try:
            if not objection:
                count(first_page)
                return method, "; ".join([method, *reasons]), count
        except (OSError, ValueError) as error:
            objection = f"{method}: {error}"
        reasons.append(objection)
    return "unknown", "; ".join(reasons), None


def _object_to_cachestat(file_system: str) -> str:
    if file_system in _UNSEEN_BY_CACHESTAT:
        return f"cachestat does not see the pages of {file_system}"
    return ""


def _object_to_mincore(source: Source) -> str:
    # mincore(2) tells others that every page is resident, so that they learn nothing.
    if os.geteuid() in (0, source.owner_uid) or os.access(source.path, os.W_OK, effective_ids=True):
        return ""
    return "mincore answers only the owner or a writer of the file"


def _open_sampler(source: Source, granule: int, stack: contextlib.ExitStack) -> Counter:
    """A counter that looks at one page of each granule, for files of other users.

    A look at a page that is missing may fetch it. So it goes through a descriptor of its own that
    reads nothing ahead, no granule is looked at twice, and the page is picked at random: the next
    load must not find the pages that this one fetched.
    """
    opened: list[int] = []
    seen: dict[int, bool] = {}

    def count(part: ByteRange) -> int:
        if not opened:
            opened.append(source.files.open(source.path))
            stack.callback(source.files.close, opened[0])
            source.files.expect_random(opened[0])
        pages = 0
        for window in windows(part, granule):
            if window.start not in seen:
                place = random.randrange(window.start, window.stop)
                seen[window.start] = source.files.is_cached(opened[0], place)
            if seen[window.start]:
                first, end = align_down(window.start, mmap.PAGESIZE), window.stop
                pages += align_up(end - first, mmap.PAGESIZE) // mmap.PAGESIZE
        return pages

    return count


def _measure(wanted: ByteRange, granule: int, count: Counter) -> tuple[list[Stretch], int]:
    """Stretches of one range, and its resident bytes; a long count is spread over threads."""
    parts = list(windows(wanted, align_up(_PART_NBYTES, granule)))
    began = time.perf_counter()
    answers = [_split(parts[0], granule, count)]
    expected_s = (time.perf_counter() - began) * (len(parts) - 1)
    if expected_s < _PARALLEL_S:
        answers += [_split(part, granule, count) for part in parts[1:]]
    else:
        answers += _split_together(parts[1:], granule, count)
    found: list[Stretch] = []
    for stretches, _ in answers:
        for stretch in stretches:
            _append(found, stretch)
    return found, sum(held for _, held in answers)


def _split_together(
    parts: list[ByteRange], granule: int, count: Counter
) -> list[tuple[list[Stretch], int]]:
    """`_split` for several parts, in as many threads as there are to be had."""

    def split(part: ByteRange) -> tuple[list[Stretch], int]:
        return _split(part, granule, count)

    try:
        from concurrent.futures import ThreadPoolExecutor  # which an ending interpreter refuses

        with ThreadPoolExecutor(min(len(parts), _COUNTERS)) as pool:
            return list(pool.map(split, parts))
    except RuntimeError:  # a limit of threads or memory, or the interpreter is ending
        return [split(part) for part in parts]


def _split(part: ByteRange, granule: int, count: Counter) -> tuple[list[Stretch], int]:
    """Halve a range until each part is all resident, all missing, or within one granule."""
    pages = count(ByteRange(align_down(part.start, mmap.PAGESIZE), part.stop))
    total = align_up(part.stop, mmap.PAGESIZE) - align_down(part.start, mmap.PAGESIZE)
    total //= mmap.PAGESIZE
    middle = align_down((part.start + part.stop) // 2, granule)
    if middle <= part.start:
        middle = align_up(part.start + 1, granule)
    if pages in (0, total) or middle >= part.stop:
        resident = 8 * pages >= _RESIDENT_EIGHTHS * total
        return [Stretch(part, resident)], min(pages * mmap.PAGESIZE, part.nbytes)
    left, left_nbytes = _split(ByteRange(part.start, middle), granule, count)
    right, right_nbytes = _split(ByteRange(middle, part.stop), granule, count)
    return left + right, left_nbytes + right_nbytes


def _append(found: list[Stretch], stretch: Stretch) -> None:
    """Add a stretch, grown onto the last one where both are in the same state."""
    if found and found[-1].resident == stretch.resident:
        start = found.pop().file_range.start
        stretch = Stretch(ByteRange(start, stretch.file_range.stop), stretch.resident)
    found.append(stretch)

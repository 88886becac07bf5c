"""Where writes around the page cache and through it meet in one file, page or unit of alignment."""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.bindings.posix import DirectAlignment
from headrace.bindings.pymemory import map_pages
from headrace.engines.direct_writer import write_around
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.route_suite import run_at_once
from headrace.testing.strategies import WriteRequest, sizes, write_requests
from headrace.testing.write_checks import (
    drop_from_page_cache,
    first_difference,
    make_data,
    make_file,
    overlay,
)
from tests.support import folder_with_direct, open_sink

PAGE = 4096
COARSE = 4 * PAGE


class CoarseFiles(FaultyFiles):
    """A disk with sectors of 16 KiB, which takes nothing smaller."""

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        return DirectAlignment(512, COARSE)

    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        if self._find(fd)[1]:
            assert (file_offset % COARSE, sum(map(len, views)) % COARSE) == (0, 0)
        return FaultyFiles.pwritev(self, fd, views, file_offset)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_direct(tmp_path_factory.mktemp("direct"))


def check(path: Path, expected: bytes) -> None:
    """Check what readers find in the page cache, and then in storage."""
    assert first_difference(path.read_bytes(), expected) is None
    drop_from_page_cache(path)
    assert first_difference(path.read_bytes(), expected) is None


@settings(deadline=None, max_examples=60)
@given(
    old=st.none() | sizes(8 * COARSE),
    file_offset=sizes(8 * COARSE),
    nbytes=sizes(8 * COARSE, 1),
    unit=st.sampled_from((PAGE, COARSE)),
)
def test_unaligned_ends_and_the_middle_meet_without_a_seam(
    folder: Path, old: int | None, file_offset: int, nbytes: int, unit: int
) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        path, data = make_file(Path(inside), old), make_data(nbytes)
        expected = overlay(path.read_bytes() if old is not None else b"", data, file_offset)
        lead = file_offset % unit
        block = map_pages(nbytes + unit)[lead : lead + nbytes]
        block[:] = data
        with open_sink(path, FaultyFiles()) as sink:
            sink.open_direct()
            through = write_around(sink, block, file_offset, unit)
            assert sink.files.buffered_written_nbytes == through < 2 * unit  # type: ignore[attr-defined]
        check(path, expected)


@settings(deadline=None, max_examples=30)
@given(
    asked=write_requests(12 * COARSE),
    workers=st.integers(1, 4),
    blocks=st.integers(1, 3),
    on_gpu=st.booleans(),
    lead=st.sampled_from((0, 1, 512)),
)
def test_coarse_sectors_are_written_whole_or_through_the_page_cache(
    folder: Path, asked: WriteRequest, workers: int, blocks: int, on_gpu: bool, lead: int
) -> None:
    block_nbytes = blocks * COARSE
    options = hr.Options(workers=workers, block_nbytes=block_nbytes, pinned_nbytes=block_nbytes)
    cuda, data = FakeCuda(), make_data(asked.nbytes)
    with (
        tempfile.TemporaryDirectory(dir=folder) as inside,
        hr.Context(options, files=CoarseFiles(), cuda=cuda) as context,
    ):
        path = make_file(Path(inside), asked.file_nbytes)
        old = path.read_bytes() if path.exists() else b""
        whole = map_pages(lead + len(data) + 1)
        whole[lead : lead + len(data)] = data
        buffer: object = whole[lead : lead + len(data)]
        if on_gpu:
            array = FakeDeviceArray(cuda, lead + len(data) + 1)
            cuda.device_write(array.pointer + lead, data or b"x")
            buffer = array.view(lead, len(data))
        report = hr.write_from(
            buffer, path, file_offset=asked.file_offset, route="direct", context=context
        )
        assert report.nbytes == len(data)
        assert path.read_bytes() == overlay(old, data, asked.file_offset)
    assert cuda.errors == []


def test_blocks_that_are_no_multiple_of_the_sectors_rule_the_route_out(folder: Path) -> None:
    options = hr.Options(block_nbytes=PAGE, pinned_nbytes=PAGE)
    with (
        hr.Context(options, files=CoarseFiles()) as context,
        pytest.raises(hr.RouteUnavailable, match="block_nbytes"),
    ):
        hr.write_from(b"x", folder / "none", route="direct", context=context)
    assert not (folder / "none").exists()


def test_mapping_and_descriptor_that_were_there_before_see_all(folder: Path) -> None:
    """Pages that the cache held go, or are written to; none stays behind with old bytes."""
    path, data = folder / "seen", make_data(64 * PAGE)
    path.write_bytes(b"\x55" * 70 * PAGE)
    expected = overlay(path.read_bytes(), data, 5)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert mapping[:] == b"\x55" * 70 * PAGE
        hr.write_from(data, path, file_offset=5, route="direct")
        assert first_difference(mapping[:], expected) is None
        assert os.pread(file.fileno(), 70 * PAGE, 0) == expected
    check(path, expected)


def test_readers_that_draw_pages_in_meanwhile_leave_no_old_bytes_behind(folder: Path) -> None:
    """Many writers of neighbouring parts, by either way, while others read and read ahead."""
    path, data = folder / "busy", make_data(600 * PAGE)
    path.write_bytes(bytes(len(data)))
    chosen, ended = random.Random(1), threading.Event()
    cuts = [0, *sorted(chosen.sample(range(1, len(data)), 120)), len(data)]
    parts = list(pairwise(cuts))
    options = hr.Options(workers=2, block_nbytes=4 * PAGE, pinned_nbytes=16 * PAGE)

    def write(number: int) -> None:
        for start, stop in parts[number::4]:
            route = ("host", "direct")[start % 2]
            hr.write_from(data[start:stop], path, file_offset=start, route=route, context=context)

    def read() -> None:
        with path.open("rb") as file:
            while not ended.is_set():
                os.pread(file.fileno(), 64 * PAGE, chosen.randrange(len(data)))

    reader = threading.Thread(target=read)
    with hr.Context(options) as context:
        reader.start()
        try:
            run_at_once([lambda number=number: write(number) for number in range(4)])  # type: ignore[misc]
        finally:
            ended.set()
            reader.join()
    check(path, data)

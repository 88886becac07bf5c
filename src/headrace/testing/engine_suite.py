"""EngineSuite: what every route must do to every kind of memory, as tests to inherit.

::

    class TestMine(EngineSuite):
        route = "host"
        unfit_route = "cached"

        def make_context(self, **arguments):
            return headrace.Context(**arguments)

        def make_buffer(self, nbytes):
            return bytearray([POISON]) * nbytes

        def read_back(self, buffer):
            return bytes(buffer)
"""

# ruff: noqa: D102 (the names of tests are sentences and stand for docstrings)

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.context import Context
from headrace.errors import (
    BufferMismatch,
    HeadraceError,
    RouteUnavailable,
    ShortRead,
    SourceChanged,
)
from headrace.options import Options
from headrace.reading import read_into
from headrace.report import Report
from headrace.testing.fake_cuda import POISON
from headrace.testing.faulty_files import pages_where
from headrace.testing.route_suite import (
    BLOCK,
    RouteSuite,
    run_at_once,
    run_property,
    write_sample,
)
from headrace.testing.strategies import ReadRequest, read_requests, tunings

MEGABYTE = (1 << 20) // mmap.PAGESIZE

_changes = pytest.mark.parametrize(
    "change",
    [
        {"truncate_after": 1, "to": 0},
        {"truncate_after": 2 * BLOCK, "to": BLOCK + 7},
        {"truncate_after": 20 * BLOCK, "to": 20 * BLOCK - 1},
        {"replace_after": 1},
        {"replace_after": 20 * BLOCK},
        {"rewrite_after": 1},
        {"rewrite_after": 20 * BLOCK},
    ],
    ids=str,
)


class EngineSuite(RouteSuite):
    """Tests that a route must pass; a subclass says for which memory and in which context."""

    __test__ = False

    @abstractmethod
    def make_buffer(self, nbytes: int) -> Any:
        """Make a destination whose every byte is `POISON`."""

    @abstractmethod
    def read_back(self, buffer: Any) -> bytes:
        """Bytes of a destination, without waiting for anything."""

    def check_read(
        self,
        context: Context,
        path: Path,
        file_offset: int = 0,
        nbytes: int | None = None,
        *,
        route: str | None = None,
        slack: int = 0,
    ) -> Report:
        """Read, and check the bytes, those beside them, and the report."""
        expected = _pread(path, file_offset, nbytes)
        buffer = self.make_buffer(len(expected) + slack)
        place = {"file_offset": file_offset, "nbytes": len(expected)}
        report = read_into(buffer, path, **place, route=route or self.route, context=context)
        got = self.read_back(buffer)
        assert got[: len(expected)] == expected
        assert got[len(expected) :] == bytes([POISON]) * slack
        assert report.nbytes == len(expected) == sum(part.nbytes for part in report.observed)
        assert report.pinned_nbytes <= context.options.pinned_nbytes
        if route is None and expected:
            assert {str(part.route) for part in report.observed} == {self.route}
        return report

    def check_refused(
        self,
        error: type[Exception],
        path: Path,
        buffer_nbytes: int,
        faults: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Exception:
        """Check that a read raises `error` without a byte read or written, and give it back."""
        buffer = self.make_buffer(buffer_nbytes)
        arguments = {"route": self.route, **arguments}
        with self.open_context(**(faults or {})) as (context, files):
            with pytest.raises(error) as caught:
                read_into(buffer, path, context=context, **arguments)
            assert files.nbytes_read == 0
            assert not files.open_descriptors
        assert self.read_back(buffer) == bytes([POISON]) * buffer_nbytes
        return caught.value

    @run_property
    @given(asked=read_requests(1 << 18), options=tunings(), slack=st.integers(0, 9))
    def test_bytes_equal_pread_for_any_range_and_options(
        self, asked: ReadRequest, options: Options, slack: int
    ) -> None:
        with tempfile.TemporaryDirectory() as folder, self.open_context(options) as (context, _):
            path = write_sample(Path(folder), asked.file_nbytes)
            self.check_read(context, path, asked.file_offset, asked.nbytes, slack=slack)
            self.check_read(context, path, asked.file_offset, asked.nbytes, route="auto")

    @pytest.mark.parametrize(
        ("file_nbytes", "file_offset", "nbytes"),
        [
            (0, 0, 0),
            (10, 10, 0),
            (1, 0, 1),
            (BLOCK + 1, BLOCK, 1),
            (511, 0, 511),
            (513, 1, 512),
            (3 * BLOCK + 1, 0, 3 * BLOCK + 1),
            (3 * BLOCK + 511, 513, 3 * BLOCK - 2),
            (40 * BLOCK, 0, 40 * BLOCK),
            (40 * BLOCK + 5, 4095, 39 * BLOCK),
        ],
    )
    def test_bytes_equal_pread_at_the_edges(
        self, tmp_path: Path, file_nbytes: int, file_offset: int, nbytes: int
    ) -> None:
        path = write_sample(tmp_path, file_nbytes)
        with self.open_context() as (context, _):
            self.check_read(context, path, file_offset, nbytes, slack=5000)

    def test_more_blocks_than_the_pinned_budget_pass_through_it(self, tmp_path: Path) -> None:
        path = write_sample(tmp_path, 100 * BLOCK + 3)
        one_block = Options(workers=8, block_nbytes=BLOCK, pinned_nbytes=BLOCK)
        with self.open_context(one_block) as (context, _):
            self.check_read(context, path)

    def test_without_nbytes_the_buffer_is_filled(self, tmp_path: Path) -> None:
        path, buffer = write_sample(tmp_path, 3 * BLOCK), self.make_buffer(BLOCK + 1)
        with self.open_context() as (context, _):
            report = read_into(buffer, path, file_offset=7, route=self.route, context=context)
        assert report.nbytes == BLOCK + 1
        assert self.read_back(buffer) == _pread(path, 7, BLOCK + 1)

    @pytest.mark.parametrize(
        "held",
        [
            pytest.param(lambda _: False, id="nothing"),
            pytest.param(lambda _: True, id="everything"),
            pytest.param(lambda page: page < 3 * MEGABYTE, id="first-half"),
            pytest.param(lambda page: page // MEGABYTE % 2 == 1, id="odd-megabytes"),
        ],
    )
    def test_auto_gives_the_same_bytes_whatever_is_resident(
        self, tmp_path: Path, held: Callable[[int], bool]
    ) -> None:
        path = write_sample(tmp_path, (6 << 20) + 77)
        options = Options(workers=2, block_nbytes=1 << 18, pinned_nbytes=1 << 19)
        with self.open_context(options, resident=pages_where(held)) as (context, _):
            report = self.check_read(context, path, 4097, (6 << 20) - 4097, route="auto", slack=9)
        assert all(part.nbytes for part in report.observed)

    @pytest.mark.parametrize(
        "fault",
        [
            {"no_cachestat": True},
            {"deny_cachestat": True},
            {"no_cachestat": True, "no_mincore": True},
            {"no_dioalign": True},
            {"eintr_every": 2},
            {"eintr_every": 3},
            {"short_reads": 1},
            {"short_reads": 1000},
            {"short_reads": BLOCK, "eintr_every": 2},
        ],
        ids=str,
    )
    def test_fault_that_can_be_overcome_changes_no_bytes(
        self, tmp_path: Path, fault: dict[str, Any]
    ) -> None:
        path = write_sample(tmp_path, 3 * BLOCK + 700)
        with self.open_context(**fault) as (context, _):
            self.check_read(context, path, 3, slack=9)
            self.check_read(context, path, 3, route="auto")

    def test_route_around_the_page_cache_reads_nothing_through_it(self, tmp_path: Path) -> None:
        path = write_sample(tmp_path, 20 * BLOCK + 700)
        with self.open_context(short_reads=BLOCK) as (context, files):
            self.check_read(context, path, 3)
        through, around = files.buffered_nbytes, files.direct_nbytes
        assert (through == 0) if self.route == "direct" else (around == 0)

    @pytest.mark.parametrize("eio_at", [0, 10 * BLOCK + 5, 20 * BLOCK - 1])
    def test_read_error_stays_itself_and_the_context_usable(
        self, tmp_path: Path, eio_at: int
    ) -> None:
        path = write_sample(tmp_path, 20 * BLOCK)
        with self.open_context(eio_at=eio_at) as (context, files):
            with pytest.raises(OSError, match="EIO") as caught:
                self.check_read(context, path)
            assert not isinstance(caught.value, HeadraceError)
            assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
            assert not files.open_descriptors
            files.eio_at = None
            self.check_read(context, path)

    @_changes
    def test_change_during_the_read_is_told_and_the_context_stays_usable(
        self, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        path = write_sample(tmp_path, 20 * BLOCK)
        with self.open_context(**change) as (context, files):
            with pytest.raises(SourceChanged, match=str(path)):
                self.check_read(context, path)
            assert not files.open_descriptors
            self.check_read(context, write_sample(tmp_path, 9 * BLOCK + 1))

    @pytest.mark.parametrize(("file_offset", "nbytes"), [(0, 101), (50, 51), (100, 1), (101, 1)])
    def test_range_past_the_end_is_a_short_read_before_anything_moves(
        self, tmp_path: Path, file_offset: int, nbytes: int
    ) -> None:
        path = write_sample(tmp_path, 100)
        self.check_refused(ShortRead, path, 200, file_offset=file_offset, nbytes=nbytes)

    def test_buffer_too_small_is_a_mismatch_before_anything_moves(self, tmp_path: Path) -> None:
        self.check_refused(BufferMismatch, write_sample(tmp_path, 100), 10, nbytes=11)

    @pytest.mark.parametrize("argument", ["file_offset", "nbytes"])
    def test_negative_number_is_a_value_error(self, tmp_path: Path, argument: str) -> None:
        wrong: dict[str, Any] = {argument: -1}
        self.check_refused(ValueError, write_sample(tmp_path, 100), 10, **wrong)

    def test_unknown_route_is_a_value_error(self, tmp_path: Path) -> None:
        self.check_refused(ValueError, write_sample(tmp_path, 100), 10, route="teleport")

    def test_route_unfit_for_the_memory_is_unavailable_with_its_name(self, tmp_path: Path) -> None:
        path = write_sample(tmp_path, 100)
        error = self.check_refused(RouteUnavailable, path, 10, route=self.unfit_route)
        assert self.unfit_route in str(error)

    def test_refused_o_direct_rules_out_that_route_alone(self, tmp_path: Path) -> None:
        path = write_sample(tmp_path, 2 << 20)
        self.check_refused(RouteUnavailable, path, 10, {"refuse_direct": True}, route="direct")
        missing = pages_where(lambda _: False)
        with self.open_context(refuse_direct=True, resident=missing) as (context, _):
            report = self.check_read(context, path, route="auto")
        assert "direct" in {str(rejection.route) for rejection in report.rejected}

    def test_missing_file_stays_a_file_not_found_error(self, tmp_path: Path) -> None:
        error = self.check_refused(FileNotFoundError, tmp_path / "missing", 10)
        assert str(tmp_path / "missing") in str(error)

    def test_directory_stays_an_is_a_directory_error(self, tmp_path: Path) -> None:
        self.check_refused(IsADirectoryError, tmp_path, 10)

    @pytest.mark.parametrize("readers", [2, 8])
    @pytest.mark.parametrize("budget", [1, 3, 64])
    def test_concurrent_reads_share_a_context_and_its_budget(
        self, tmp_path: Path, readers: int, budget: int
    ) -> None:
        path = write_sample(tmp_path, 50 * BLOCK + 9)
        options = Options(workers=3, block_nbytes=BLOCK, pinned_nbytes=budget * BLOCK)
        with self.open_context(options) as (context, _):
            offsets = [11 * reader + 1 for reader in range(readers)]
            run_at_once([partial(self.check_read, context, path, each) for each in offsets])

    def test_failed_read_leaves_concurrent_reads_alone(self, tmp_path: Path) -> None:
        path = write_sample(tmp_path, 60 * BLOCK)

        def fail() -> None:
            with pytest.raises(OSError, match="EIO"):
                self.check_read(context, path, 40 * BLOCK)

        with self.open_context(eio_at=50 * BLOCK) as (context, _):
            sound = partial(self.check_read, context, path, 1, 40 * BLOCK)
            run_at_once([sound, fail, sound, fail])

    def test_closing_twice_is_allowed_and_reading_then_is_an_error(self, tmp_path: Path) -> None:
        path = write_sample(tmp_path, 2 * BLOCK)
        with self.open_context() as (context, files):
            self.check_read(context, path)
            context.close()
            context.close()
            opens = files.opens
            with pytest.raises(ValueError, match="context is closed"):
                self.check_read(context, path)
            assert files.opens == opens

    def test_report_is_plain_data_and_names_file_and_routes(self, tmp_path: Path) -> None:
        path = write_sample(tmp_path, 2 * BLOCK)
        with self.open_context() as (context, _):
            report = self.check_read(context, path)
        record = json.loads(json.dumps(report.to_dict()))
        assert (record["source"], record["nbytes"]) == (str(path), 2 * BLOCK)
        assert [part["route"] for part in record["planned"]] == [self.route]
        assert [part["route"] for part in record["observed"]] == [self.route]
        assert record["seconds"] > 0
        assert {each["route"] for each in record["rejected"]}.isdisjoint({self.route})


def _pread(path: Path, file_offset: int, nbytes: int | None) -> bytes:
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size - file_offset if nbytes is None else nbytes
        return os.pread(file.fileno(), length, file_offset)

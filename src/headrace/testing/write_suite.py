"""WriteSuite: what every route must do that writes memory to files, as tests to inherit.

::

    class TestMine(WriteSuite):
        route = "host"
        unfit_route = "cached"

        def make_context(self, **arguments):
            return headrace.Context(**arguments)

        def make_buffer(self, data):
            return bytearray(data)
"""

# ruff: noqa: D102 (the names of tests are sentences and stand for docstrings)

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.context import Context
from headrace.errors import BufferMismatch, RouteUnavailable
from headrace.options import Options
from headrace.progress import Progress
from headrace.reading import write_from
from headrace.testing.route_suite import BLOCK, run_at_once, run_property, write_sample
from headrace.testing.strategies import WriteRequest, tunings, write_requests
from headrace.testing.write_checks import (
    WriteChecks,
    drop_from_page_cache,
    first_difference,
    make_data,
    make_file,
    overlay,
    without_rights,
)

LARGE_NBYTES = (17 << 20) + 13
"""Enough for "auto" to leave the page cache out."""

_old_sizes = pytest.mark.parametrize("old_nbytes", [None, 100, 30 * BLOCK])


class WriteSuite(WriteChecks):
    """Tests that a route must pass; a subclass says for which memory and in which context."""

    __test__ = False

    @settings(run_property, max_examples=25)
    @given(asked=write_requests(), options=tunings(), slack=st.integers(0, 9))
    def test_only_the_range_changes_for_any_file_range_and_options(
        self, asked: WriteRequest, options: Options, slack: int
    ) -> None:
        with tempfile.TemporaryDirectory() as folder, self.open_context(options) as (context, _):
            path, data = make_file(Path(folder), asked.file_nbytes), make_data(asked.nbytes)
            self.check_write(context, path, data, asked.file_offset, slack=slack)
            other = make_file(Path(folder), asked.file_nbytes)
            self.check_write(context, other, data, asked.file_offset, route="auto", slack=slack)

    @pytest.mark.parametrize(
        ("old_nbytes", "file_offset", "nbytes"),
        [
            (None, 0, 0),
            (None, 5, 0),
            (10, 20, 0),
            (10, 10, 0),
            (1, 0, 1),
            (None, BLOCK, 1),
            (None, 511, BLOCK),
            (513, 1, 512),
            (3 * BLOCK, BLOCK - 1, BLOCK + 2),
            (3 * BLOCK, 1, 2 * BLOCK - 2),
            (3 * BLOCK + 1, 0, 3 * BLOCK + 1),
            (3 * BLOCK + 511, 2 * BLOCK, 2 * BLOCK - 1),
            (40 * BLOCK, 0, 40 * BLOCK),
            (5 * BLOCK + 7, 30 * BLOCK + 1, 9 * BLOCK),
            (50 * BLOCK, 4095, 39 * BLOCK),
        ],
    )
    def test_only_the_range_changes_at_the_edges_also_in_storage(
        self, tmp_path: Path, old_nbytes: int | None, file_offset: int, nbytes: int
    ) -> None:
        path, data = make_file(tmp_path, old_nbytes), make_data(nbytes)
        with self.open_context() as (context, _):
            self.check_write(context, path, data, file_offset, slack=5000)
        seen = path.read_bytes()
        drop_from_page_cache(path)
        assert first_difference(path.read_bytes(), seen) is None

    def test_more_blocks_than_the_pinned_budget_pass_through_it(self, tmp_path: Path) -> None:
        one_block = Options(workers=8, block_nbytes=BLOCK, pinned_nbytes=BLOCK)
        with self.open_context(one_block) as (context, _):
            self.check_write(context, tmp_path / "file", make_data(100 * BLOCK + 3), 5)

    def test_without_nbytes_all_of_the_buffer_is_written(self, tmp_path: Path) -> None:
        path, data = write_sample(tmp_path, 3 * BLOCK), make_data(BLOCK + 1)
        expected = overlay(path.read_bytes(), data, 7)
        with self.open_context() as (context, _):
            buffer = self.make_buffer(data)
            report = write_from(buffer, path, file_offset=7, route=self.route, context=context)
        assert report.nbytes == BLOCK + 1
        assert path.read_bytes() == expected

    def test_large_write_by_auto_is_right_and_each_byte_is_written_once(
        self, tmp_path: Path
    ) -> None:
        path, data = write_sample(tmp_path, 1 << 20), make_data(LARGE_NBYTES)
        with self.open_context(Options(workers=4)) as (context, files):
            report = self.check_write(context, path, data, 4097, route="auto")
        assert all(part.nbytes for part in report.observed)
        assert LARGE_NBYTES <= files.written_nbytes <= LARGE_NBYTES + 2 * BLOCK

    @pytest.mark.parametrize(
        "fault",
        [
            {"no_allocate": True},
            {"no_dioalign": True},
            {"eintr_every": 2},
            {"eintr_every": 3},
            {"short_writes": 1},
            {"short_writes": 1000},
            {"short_writes": BLOCK, "eintr_every": 2},
            {"no_dioalign": True, "short_writes": 512, "no_allocate": True},
        ],
        ids=str,
    )
    def test_fault_that_can_be_overcome_changes_no_bytes(
        self, tmp_path: Path, fault: dict[str, Any]
    ) -> None:
        path, data = write_sample(tmp_path, 2 * BLOCK), make_data(3 * BLOCK + 700)
        with self.open_context(**fault) as (context, _):
            self.check_write(context, path, data, 3, slack=9)
            self.check_write(context, path, data, 9 * BLOCK + 1, route="auto")

    def test_refused_o_direct_rules_out_that_route_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        self.check_refused(RouteUnavailable, path, {"refuse_direct": True}, route="direct")
        with self.open_context(Options(workers=4), refuse_direct=True) as (context, files):
            report = self.check_write(context, path, make_data(LARGE_NBYTES), 3, route="auto")
        assert "direct" in {str(rejection.route) for rejection in report.rejected}
        assert files.direct_written_nbytes == 0

    def test_whole_pages_go_by_the_route_and_the_ends_by_the_page_cache(
        self, tmp_path: Path
    ) -> None:
        path = write_sample(tmp_path, 2 * BLOCK)
        with self.open_context() as (context, files):
            report = self.check_write(context, path, make_data(20 * BLOCK + 700), 3)
        through, around = files.buffered_written_nbytes, files.direct_written_nbytes
        if self.route == "direct":
            ends = BLOCK - 3 + 703
            assert (through, around) == (ends, report.nbytes - ends)
        else:
            assert (around, files.written_nbytes >= report.nbytes) == (0, True)

    @_old_sizes
    @pytest.mark.parametrize(
        ("faults", "code"),
        [
            ({"write_eio_at": 3}, errno.EIO),
            ({"write_eio_at": 7 * BLOCK}, errno.EIO),
            ({"write_eio_at": 20 * BLOCK + 4}, errno.EIO),
            ({"enospc_after": 0}, errno.ENOSPC),
            ({"enospc_after": 5 * BLOCK + 1}, errno.ENOSPC),
            ({"enospc_after": 5 * BLOCK + 1, "no_allocate": True}, errno.ENOSPC),
        ],
        ids=str,
    )
    def test_failed_write_stays_itself_and_the_file_gets_its_length_back(
        self, tmp_path: Path, old_nbytes: int | None, faults: dict[str, Any], code: int
    ) -> None:
        path = make_file(tmp_path, old_nbytes)
        self.check_failed(path, code, faults, make_data(20 * BLOCK + 5), 3)

    @_old_sizes
    def test_failed_write_past_the_end_leaves_no_gap_behind(
        self, tmp_path: Path, old_nbytes: int | None
    ) -> None:
        path = make_file(tmp_path, old_nbytes)
        faults = {"write_eio_at": 45 * BLOCK}
        self.check_failed(path, errno.EIO, faults, make_data(20 * BLOCK), 31 * BLOCK + 1)

    def test_missing_folder_stays_a_file_not_found_error(self, tmp_path: Path) -> None:
        path = tmp_path / "missing" / "file"
        assert str(path) in str(self.check_refused(FileNotFoundError, path))

    def test_directory_stays_an_is_a_directory_error(self, tmp_path: Path) -> None:
        assert str(tmp_path) in str(self.check_refused(IsADirectoryError, tmp_path))

    def test_pipe_is_refused_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        run_at_once([partial(self.check_refused, OSError, tmp_path / "pipe")])

    @pytest.mark.parametrize("missing", [False, True])
    def test_missing_rights_stay_a_permission_error(self, missing: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file")
            os.chmod(folder, 0o555 if missing else 0o777)
            if not missing:
                path.write_bytes(b"old")
                path.chmod(0o444)
            with without_rights():
                if not os.access(path.parent, os.X_OK, effective_ids=True):
                    pytest.skip(f"{folder} lies where ordinary users may not look")
                assert str(path) in str(self.check_refused(PermissionError, path))

    @pytest.mark.parametrize("dangling", [False, True])
    def test_link_is_followed_and_its_target_made_if_it_is_missing(
        self, tmp_path: Path, dangling: bool
    ) -> None:
        path, link = tmp_path / "file", tmp_path / "link"
        link.symlink_to("file")
        if not dangling:
            path.write_bytes(b"old" * BLOCK)
        with self.open_context(write_eio_at=5 * BLOCK) as (context, files):
            with pytest.raises(OSError, match="EIO"):
                self.check_write(context, link, make_data(6 * BLOCK))
            assert path.exists() is not dangling
            files.write_eio_at = None
            self.check_write(context, link, make_data(2 * BLOCK), 5)
        assert link.is_symlink()
        assert not path.is_symlink()

    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ({"file_offset": -1}, ValueError),
            ({"nbytes": -1}, ValueError),
            ({"nbytes": 201}, BufferMismatch),
            ({"file_offset": 1.5}, TypeError),
            ({"route": "teleport"}, ValueError),
            ({"file_offset": (1 << 63) - 200}, OSError),
            ({"file_offset": 1 << 63}, OSError),
            ({"file_offset": 1 << 70}, OSError),
        ],
        ids=str,
    )
    def test_wrong_numbers_and_routes_are_refused(
        self, tmp_path: Path, wrong: dict[str, Any], error: type[Exception]
    ) -> None:
        for path in (tmp_path / "file", write_sample(tmp_path, 100)):
            self.check_refused(error, path, **wrong)

    def test_route_unfit_for_the_memory_is_unavailable_with_its_name(self, tmp_path: Path) -> None:
        for path in (tmp_path / "file", write_sample(tmp_path, 100)):
            error = self.check_refused(RouteUnavailable, path, route=self.unfit_route)
            assert self.unfit_route in str(error)

    @pytest.mark.parametrize("old_nbytes", [None, 9 * BLOCK + 5, 40 * BLOCK])
    def test_neighbours_that_write_one_file_at_once_leave_each_other_alone(
        self, tmp_path: Path, old_nbytes: int | None
    ) -> None:
        path, chosen = make_file(tmp_path, old_nbytes), random.Random(old_nbytes)
        data = make_data(35 * BLOCK + 99)
        cuts = [0, *sorted(chosen.sample(range(1, len(data)), 40)), len(data)]
        parts = list(pairwise(cuts))
        chosen.shuffle(parts)
        expected = overlay(path.read_bytes() if old_nbytes else b"", data, 5)
        with self.open_context() as (context, _):
            write = partial(self._write_parts, context, path, data)
            run_at_once([partial(write, parts[number::6]) for number in range(6)])
        assert first_difference(path.read_bytes(), expected) is None

    @pytest.mark.parametrize("old_nbytes", [None, 3])
    def test_failed_write_takes_nothing_away_from_what_others_wrote_meanwhile(
        self, tmp_path: Path, old_nbytes: int | None
    ) -> None:
        path, part = make_file(tmp_path, old_nbytes), 9 * BLOCK + 5
        data, written = make_data(6 * part), []

        def write(context: Context, number: int) -> None:
            start = 3 + number * part
            buffer = self.make_buffer(data[start - 3 :][:part])
            with contextlib.suppress(OSError):  # of the failure, or of the removal that followed
                write_from(buffer, path, file_offset=start, route=self.route, context=context)
                written.append(number)

        with self.open_context(write_eio_at=5 * BLOCK) as (context, _):
            run_at_once([partial(write, context, number) for number in (1, 0, 2, 3, 4, 5)])
        content = path.read_bytes() if path.exists() else b""
        assert 0 not in written
        for number in written:
            assert content[3 + number * part :][:part] == data[number * part :][:part]

    @pytest.mark.parametrize("budget", [1, 3, 64])
    def test_concurrent_writes_share_a_context_and_its_budget(
        self, tmp_path: Path, budget: int
    ) -> None:
        options = Options(workers=3, block_nbytes=BLOCK, pinned_nbytes=budget * BLOCK)
        with self.open_context(options) as (context, _):
            run_at_once(
                [
                    partial(
                        self.check_write,
                        context,
                        tmp_path / f"file{number}",
                        make_data(40 * BLOCK + number),
                        11 * number,
                    )
                    for number in range(8)
                ]
            )

    def test_closing_twice_is_allowed_and_writing_then_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        with self.open_context() as (context, _):
            self.check_write(context, write_sample(tmp_path, BLOCK), b"new" * BLOCK, 5)
            context.close()
            context.close()
            with pytest.raises(ValueError, match="context is closed"):
                self.check_write(context, path, b"new")
        assert not path.exists()

    def test_progress_grows_to_the_whole(self, tmp_path: Path) -> None:
        told: list[Progress] = []
        data = make_data(50 * BLOCK + 1)
        with self.open_context() as (context, files):
            request = context.request(
                "write_from",
                self.make_buffer(data),
                tmp_path / "file",
                file_offset=3,
                nbytes=None,
                stream=None,
                writable=False,
            )
            with request.delivery(files, None) as delivery:
                report = context.deliver(delivery, route=self.route, progress=told.append)
        moved = [each.nbytes for each in told]
        assert (moved[-1], {each.total_nbytes for each in told}) == (len(data), {len(data)})
        assert (sorted(moved), report.nbytes) == (moved, len(data))

    def test_report_is_plain_data_and_names_file_and_routes(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        with self.open_context() as (context, _):
            report = self.check_write(context, path, make_data(2 * BLOCK))
        record = json.loads(json.dumps(report.to_dict()))
        assert (record["source"], record["nbytes"]) == (str(path), 2 * BLOCK)
        assert (record["operation"], record["durable"]) == ("write", False)
        assert [part["route"] for part in record["planned"]] == [self.route]
        assert [part["route"] for part in record["observed"]] == [self.route]
        assert record["seconds"] > 0
        assert record["resident_nbytes"] == 0
        assert {"plan", "allocate", "transfer", "write"} <= set(record["stages"])
        assert {each["route"] for each in record["rejected"]}.isdisjoint({self.route})

    def _write_parts(
        self, context: Context, path: Path, data: bytes, parts: list[tuple[int, int]]
    ) -> None:
        for start, stop in parts:
            buffer = self.make_buffer(data[start:stop])
            route = "auto" if start % 4 == 0 else self.route
            write_from(buffer, path, file_offset=5 + start, route=route, context=context)

"""What EngineSuite asks of the route gds beyond the others, over any cuFile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from headrace.reading import read_into
from headrace.testing.fake_cufile import Mode
from headrace.testing.route_suite import BLOCK, SMALL
from tests.engines.device_memory import DeviceMemory


class GdsSuite(DeviceMemory):
    __test__ = False
    route = "gds"
    mode: ClassVar[Mode] = "p2p"

    def test_route_around_the_page_cache_reads_nothing_through_it(self, tmp_path: Path) -> None:
        """cuFile gets a descriptor with O_DIRECT where the file system has that, else a plain."""
        path = tmp_path / "file"
        path.write_bytes(os.urandom(20 * BLOCK + 700))
        with self.open_context() as (context, files):
            self.check_read(context, path, 3)
        ways = (files.buffered_nbytes, files.direct_nbytes)
        assert min(ways) == 0
        assert max(ways) >= 20 * BLOCK + 697

    def test_report_says_what_the_statistics_say(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        with self.open_context() as (context, _):
            report = self.check_read(context, path)
        (observed,) = report.to_dict()["observed"]
        assert "cuFile statistics" in observed["evidence"]
        assert ("compatibility mode" in observed["evidence"]) is (self.mode == "compat")

    def test_user_work_queued_before_the_read_comes_first(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"\x01" * 9 * BLOCK)
        with self.make_context(options=SMALL) as context:
            self.check_read(context, path)  # what only a first read waits for is over
            buffer = self.make_busy_buffer(9 * BLOCK)
            read_into(buffer, path, route=self.route, context=context)
        assert set(self.read_back(buffer)) == {1}

    def test_two_contexts_serve_side_by_side(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(9 * BLOCK))
        with self.make_context(options=SMALL) as first:
            with self.make_context(options=SMALL) as second:
                self.check_read(first, path)
                self.check_read(second, path)
            self.check_read(first, path)

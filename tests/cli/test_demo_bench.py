from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.demo_bench import COLD, RESIDENT, Bench, describe_choice
from headrace.cli.demo_cache import CachedFile
from headrace.cli.demo_methods import Method
from headrace.cli.progress import quiet
from headrace.errors import RouteUnavailable
from headrace.report import ObservedRoute, PlannedRoute, Report
from headrace.types import Route


def method(
    name: str, load: Callable[[], Any] = lambda: None, *, route: str = "", right: bool = True
) -> Method:
    return Method(name, route, f"how {name} works", load, lambda _: right)


def report(*planned: PlannedRoute) -> Report:
    total = sum(part.nbytes for part in planned)
    observed = [ObservedRoute(part.route, part.nbytes, "seen") for part in planned]
    return Report("m", "cpu", total, 1.0, 1.0, planned, tuple(observed), (), 0, {}, 0)


def why(*planned: PlannedRoute) -> str:
    return describe_choice(report(*planned), RESIDENT)


def refuse() -> None:
    raise RouteUnavailable("route 'gds' cannot serve: gds: not here")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    return Bench(CachedFile(str(path), "ext4"), 100_000, 3, quiet)


def test_a_route_that_cannot_serve_is_dropped_with_its_reason(bench: Bench) -> None:
    able, unavailable = bench.drop_unavailable(
        [method("a"), method("headrace gds", refuse, route="gds")]
    )
    assert [m.name for m in able] == ["a"]
    assert unavailable == {"gds": "route 'gds' cannot serve: gds: not here"}


def test_methods_take_turns_as_often_as_asked(bench: Bench) -> None:
    order: list[str] = []
    methods = [method(name, partial(order.append, name)) for name in "ab"]
    rows = bench.compare(methods, RESIDENT)
    assert order == ["a", "b"] * 3
    assert [row.method for row in rows] == ["a", "b"]
    assert all(row.gb_per_s and row.why == f"how {row.method} works" for row in rows)


def test_wrong_bytes_mark_the_row(bench: Bench) -> None:
    good, bad = bench.compare([method("a"), method("b", right=False)], RESIDENT)
    assert good.matches
    assert not bad.matches


def test_a_state_that_cannot_be_had_gives_rows_without_figures(bench: Bench) -> None:
    in_memory = Bench(CachedFile(bench.file.path, "tmpfs"), bench.nbytes, 3, quiet)
    rows = in_memory.compare([method("a"), method("b")], COLD)
    assert [(row.gb_per_s, row.cpu_s_per_gb) for row in rows] == [(None, None)] * 2
    assert all("tmpfs keeps its files in memory" in row.why for row in rows)


def test_a_route_refused_later_loses_its_figure_and_the_others_go_on(bench: Bench) -> None:
    served, refused = bench.compare([method("a"), method("b", refuse, route="gds")], RESIDENT)
    assert served.gb_per_s is not None
    assert refused.gb_per_s is None
    assert "cannot serve" in refused.why


def test_one_planned_route_is_told_by_its_reason_alone() -> None:
    assert why(PlannedRoute(Route.HOST, 5, "it is there")) == "it is there"


def test_several_planned_routes_are_told_with_their_shares_the_greatest_first() -> None:
    parts = (PlannedRoute(Route.HOST, 25, "there"), PlannedRoute(Route.DIRECT, 75, "not there"))
    assert why(*parts) == "direct 75%: not there; host 25%: there"


def test_one_route_with_several_reasons_is_named_once() -> None:
    parts = (PlannedRoute(Route.HOST, 50, "there"), PlannedRoute(Route.HOST, 50, "small"))
    assert why(*parts) == "50%: there; 50%: small"


def test_what_came_in_with_the_header_is_told_of_a_cold_run() -> None:
    read_ahead = replace(report(PlannedRoute(Route.HOST, 100, "there")), resident_nbytes=40)
    assert describe_choice(read_ahead, COLD) == "there, and reading the header brought 40 B in"
    assert describe_choice(read_ahead, RESIDENT) == "there"

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.base import Stats
from headrace.formats.catalog import TensorSpec
from headrace.planning.plan import Piece, Plan, Rejection, Transfer
from headrace.probing.fact import Fact
from headrace.report import (
    ObservedRoute,
    PlannedRoute,
    Report,
    Stopwatch,
    format_nbytes,
    make_explanation,
    make_report,
)
from headrace.types import HOST, ByteRange, Route
from tests.support import CUDA

KEYS = (
    *("schema", "source", "device", "nbytes", "seconds", "gb_per_s", "cpu_seconds"),
    *("planned", "observed", "rejected", "resident_nbytes", "stages", "pinned_nbytes"),
    "mapped_nbytes",
    "operation",
    "durable",
    "snapshot",
    "verified_nbytes",
)


def report(**fields: Any) -> Report:
    given_fields: dict[str, Any] = {
        "source": "model.safetensors",
        "device": "cuda:0",
        "nbytes": 7_850_000_000,
        "seconds": 0.17,
        "cpu_seconds": 2.5,
        "planned": (PlannedRoute(Route.CACHED, 7_850_000_000, "the page cache holds them"),),
        "observed": (ObservedRoute(Route.CACHED, 7_850_000_000, "preadv"),),
        "rejected": (
            Rejection(Route.GDS, "nvidia-fs is not loaded", "load nvidia-fs"),
            Rejection(Route.HOST, "the destination is cuda:0, not host memory", ""),
        ),
        "resident_nbytes": 7_850_000_000,
        "stages": {"open": 0.01, "transfer": 0.15},
        "pinned_nbytes": 100 << 20,
        **fields,
    }
    return Report(**given_fields)


def test_line_is_that_of_the_public_interface() -> None:
    assert str(report()) == (
        "model.safetensors -> cuda:0  7.85 GB in 0.17 s (46.2 GB/s) cached; "
        "gds: nvidia-fs is not loaded"
    )


def test_line_leaves_out_what_nobody_can_act_on_but_the_dict_has_it() -> None:
    line, record = str(report()), report().to_dict()
    assert "not host memory" not in line
    assert {"route": "host", "why": "the destination is cuda:0, not host memory", "remedy": ""} in (
        record["rejected"]
    )


def test_line_names_every_route_that_bytes_took() -> None:
    both = (ObservedRoute(Route.HOST, 1, "a"), ObservedRoute(Route.DIRECT, 2, "b"))
    assert "GB/s) host + direct" in str(report(observed=both))
    assert "nothing to move" in str(report(observed=(), nbytes=0))


def test_line_is_one_line_whatever_the_path() -> None:
    line = str(report(source="/data/a\nINFO:headrace:b"))
    assert len(line.splitlines()) == 1


def test_dict_has_the_keys_of_the_public_interface_in_order() -> None:
    record = report().to_dict()
    assert tuple(record) == KEYS
    assert record["schema"] == 1
    assert [tuple(each) for each in record["planned"]] == [("route", "nbytes", "why")]
    assert [tuple(each) for each in record["observed"]] == [
        ("route", "nbytes", "evidence", "unaligned_nbytes", "bounce")
    ]
    assert {tuple(each) for each in record["rejected"]} == {("route", "why", "remedy")}


def test_dict_is_plain_data() -> None:
    record = report().to_dict()
    assert json.loads(json.dumps(record)) == record
    assert {type(each["route"]) for each in record["planned"] + record["observed"]} == {str}


def test_dict_may_be_changed_without_changing_the_report() -> None:
    made = report()
    made.to_dict()["stages"]["open"] = 7.0
    assert made.stages["open"] == 0.01


def test_speed_is_decimal_gigabytes_over_wall_time_and_zero_without_time() -> None:
    assert report(nbytes=3 * 10**9, seconds=1.5).gb_per_s == 2.0
    assert report(nbytes=0, seconds=0.0).gb_per_s == 0.0


def test_notebook_form_escapes_what_the_file_system_allows() -> None:
    html = report(source="<script>alert(1)</script>&'").__getattribute__("_repr_html_")()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    for key in KEYS:
        assert f"<td>{key}</td>" in html


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (7_850_000_000, "7.85 GB"),
        (1 << 30, "1.07 GB"),
        (10**12, "1 TB"),
        (123 * 10**12, "123 TB"),
    ],
)
def test_bytes_are_written_as_the_field_writes_them(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(nbytes=st.integers(0, 999 * 10**12))
def test_bytes_are_written_with_at_most_three_digits_and_half_a_percent_off(nbytes: int) -> None:
    number, unit = format_nbytes(nbytes).split(" ")
    scale = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert len(number.replace(".", "").lstrip("0")) <= 3
    assert abs(float(number) * scale - nbytes) <= 0.005 * nbytes + 1e-9


def test_long_load_has_its_seconds_in_plain_digits() -> None:
    assert "1.23e+03" not in str(report(seconds=1234.5))


# How reports are made.


def plan_of(*transfers: Transfer) -> Plan:
    rejected = (Rejection(Route.GDS, "no", ""),)
    return Plan(transfers, rejected, (), 40)


def transfer(route: Route, nbytes: int, why: str) -> Transfer:
    return Transfer(0, route, why, (Piece(0, nbytes, 0, 0),))


def test_report_adds_up_plan_and_statistics() -> None:
    plan = plan_of(
        transfer(Route.HOST, 10, "resident"),
        transfer(Route.DIRECT, 20, "missing"),
        transfer(Route.HOST, 30, "resident"),
        transfer(Route.HOST, 5, "small"),
    )
    stats = [
        Stats(route=Route.HOST, nbytes=45, evidence="a", file_seconds=0.5, cpu_seconds=1.0),
        Stats(route=Route.DIRECT, nbytes=20, evidence="b", file_seconds=0.25, cpu_seconds=2.0),
    ]
    watch = Stopwatch()
    with watch.stage("transfer"):
        time.sleep(0.01)
    made = make_report("label", HOST, plan, stats, watch, (77, 0))
    assert made.planned == (
        PlannedRoute(Route.HOST, 40, "resident"),
        PlannedRoute(Route.DIRECT, 20, "missing"),
        PlannedRoute(Route.HOST, 5, "small"),
    )
    assert [(each.route, each.nbytes) for each in made.observed] == [("host", 45), ("direct", 20)]
    assert (made.source, made.device, made.nbytes) == ("label", "cpu", 65)
    assert (made.resident_nbytes, made.pinned_nbytes, made.rejected) == (40, 77, plan.rejected)
    assert made.stages["read"] == 0.75
    assert 0.01 <= made.stages["transfer"] <= made.seconds
    assert made.cpu_seconds >= 3.0


def test_explanation_has_the_keys_of_the_public_interface_and_is_plain_data() -> None:
    specs = [
        TensorSpec("a", "F32", (2, 3), ByteRange(8, 32)),
        TensorSpec("b", "BF16", (), ByteRange(32, 34)),
    ]
    plan = plan_of(transfer(Route.CACHED, 26, "resident"))
    made = make_explanation(
        "label", CUDA, specs, ["x", "y"], plan, [Fact("O_DIRECT", True, "found", "why")]
    )
    record = made.to_dict()
    keys = ("source", "device", "tensors", "planned", "rejected", "facts")
    assert tuple(record) == keys
    assert record["tensors"][0] == {
        "name": "a",
        "dtype": "F32",
        "shape": [2, 3],
        "nbytes": 24,
        "path": "x",
        "file_offset": 8,
    }
    assert record["facts"] == [
        {"name": "O_DIRECT", "holds": True, "found": "found", "why": "why", "remedy": ""}
    ]
    assert json.loads(json.dumps(record)) == record
    assert str(made) == "label -> cuda:0  cached 26 B (resident); gds: no"


def test_stage_that_fails_is_let_through() -> None:
    watch = Stopwatch()
    with pytest.raises(KeyError), watch.stage("open"):
        raise KeyError("x")
    wall, cpu = watch.stop()
    assert wall >= 0
    assert cpu >= 0

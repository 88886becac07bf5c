"""Targets are computed from the rows of the run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.raw_peers import KVIKIO_TUNED
from benchmarks.result import (
    Beside,
    BesideRow,
    FirstCall,
    ImportTime,
    Reading,
    Role,
    Row,
    Target,
)
from benchmarks.targets import Findings, gpu_targets, host_targets

NBYTES = 10**9


def make_row(name: str, gb_per_s: float, role: Role = Role.PEER, **given: Any) -> Row:
    values: dict[str, Any] = {
        "kind": "raw",
        "place": "resident",
        "package": "",
        "family": None,
        "nbytes": NBYTES,
        "first": None,
        "readings": (Reading(1, 1 / gb_per_s, 0.2, NBYTES, given.pop("peak", None)),),
        "compared": True,
        "absent": None,
        "error": None,
        "note": None,
        "reports": (),
    }
    return Row(name=name, role=role, **{**values, **given})


def make_findings(*rows: Row, **given: Any) -> Findings:
    values: dict[str, Any] = {"first_calls": (), "imports": (), "pinned_limit_nbytes": 256 << 20}
    return Findings(rows=rows, **{**values, **given})


def pick(targets: list[Target], name: str, asked: str = "") -> Target:
    return next(t for t in targets if name in t.name and asked in t.asked)


def test_speed_is_met_at_the_bound() -> None:
    targets = gpu_targets(make_findings(make_row("ours", 48.0, Role.OURS)))
    assert pick(targets, "raw file, resident", "48").met is True


def test_factor_is_taken_over_the_best_setting() -> None:
    ours = make_row("ours", 50.0, Role.OURS)
    settings = [
        make_row(f"k{speed}", speed, Role.PEER_TUNED, family=KVIKIO_TUNED) for speed in (20.0, 44.0)
    ]
    target = pick(gpu_targets(make_findings(ours, *settings)), "raw file", "1.15")
    assert target.wanted == pytest.approx(1.15 * 44.0)
    assert target.met is False
    assert "k44.0 44.0 GB/s" in target.evidence


def test_missing_peer_leaves_a_factor_untold() -> None:
    target = pick(gpu_targets(make_findings(make_row("ours", 50.0, Role.OURS))), "raw", "1.15")
    assert target.met is None
    assert "not measured" in target.evidence


def test_failed_peer_is_no_bound() -> None:
    ours = make_row("ours", 50.0, Role.OURS, kind="model")
    wrong = make_row("wrong", 99.0, kind="model", compared=False, error="wrong bytes")
    right = make_row("right", 40.0, kind="model")
    target = pick(gpu_targets(make_findings(ours, wrong, right)), "model, resident", "as it comes")
    assert target.wanted == pytest.approx(44.0)
    assert target.met is True


def test_wrong_bytes_of_ours_leave_a_target_untold() -> None:
    ours = make_row("ours", 50.0, Role.OURS, compared=False, error="'' has wrong bytes")
    target = pick(gpu_targets(make_findings(ours)), "raw file, resident", "48")
    assert target.met is None
    assert "wrong bytes" in target.evidence


def test_tuned_peers_have_a_target_of_their_own() -> None:
    ours = make_row("ours", 50.0, Role.OURS, kind="model")
    plain = make_row("plain", 40.0, kind="model")
    tuned = make_row("tuned", 49.0, Role.PEER_TUNED, kind="model")
    targets = gpu_targets(make_findings(ours, plain, tuned))
    assert pick(targets, "model, resident", "as it comes").met is True
    assert pick(targets, "model, resident", "tuned ones too").met is False


def test_first_call_and_imports_have_upper_bounds() -> None:
    findings = make_findings(
        first_calls=(FirstCall("headrace.torch.load", (0.5, 0.6, 0.4), (0.2, 0.2, 0.2), None),),
        imports=(ImportTime("headrace", "numpy", (0.01, 0.02, 0.03), None),),
    )
    targets = host_targets(findings)
    first = pick(targets, "first call")
    assert first.measured == pytest.approx(0.3)
    assert first.met is False
    assert pick(targets, "import headrace").met is True


def test_memory_targets_come_from_reports_and_readings() -> None:
    ours = make_row(
        "ours", 50.0, Role.OURS, kind="model", peak=1_005_000_000,
        reports=({"pinned_nbytes": 1 << 20}, {"pinned_nbytes": 300 << 20}),
    )  # fmt: skip
    targets = gpu_targets(make_findings(ours))
    assert pick(targets, "peak pinned memory").met is False
    assert pick(targets, "peak device memory").met is True


def test_kept_and_mapped_have_a_bound_on_cpu_time() -> None:
    kept = make_row(
        "headrace.torch.load, mapped_nbytes=16 GiB", 52.0, Role.OURS_EXTRA, kind="kept",
        reports=({"mapped_nbytes": 7_850_000_000, "pinned_nbytes": 0},),
    )  # fmt: skip
    mapped = make_row(
        'headrace.torch.load, route="mapped"', 25.0, Role.OURS_EXTRA, kind="model",
        readings=(Reading(1, 1 / 25.0, 0.05, NBYTES, None),),
    )  # fmt: skip
    targets = gpu_targets(make_findings(kept, mapped))
    assert pick(targets, "kept", "50 GB/s").met is True
    assert pick(targets, "kept", "CPU").met is False
    assert "7.85 GB stay registered" in pick(targets, "kept", "CPU").evidence
    assert pick(targets, 'route="mapped"', "18 GB/s").met is True
    assert pick(targets, 'route="mapped"', "CPU").measured == pytest.approx(0.05)
    assert pick(targets, 'route="mapped"', "CPU").met is True


def test_cufile_is_compared_with_cufile_by_kvikio() -> None:
    ours = make_row(
        'headrace read_into, route="gds"', 8.0, Role.OURS_EXTRA, kind="gds", place="cold"
    )
    peer = make_row("KvikIO, compat mode OFF", 7.0, Role.PEER_TUNED, kind="gds", place="cold")
    failed = make_row(
        "KvikIO, compat mode OFF", 7.0, kind="gds", place="cold", compared=False, error="no cuFile"
    )
    assert pick(gpu_targets(make_findings(ours, peer)), "cuFile").met is True
    untold = pick(gpu_targets(make_findings(ours, failed)), "cuFile")
    assert untold.met is None
    assert "KvikIO: no cuFile" in untold.evidence


def make_beside(policy: str, cpu_seconds: float, **given: Any) -> BesideRow:
    load = Beside(1, 0.5, cpu_seconds, 900, 7.5, 1000.0, 8.0)
    values: dict[str, Any] = {"compared": True, "error": None, "reports": (), **given}
    return BesideRow(f'headrace read_into, policy="{policy}"', 16, NBYTES, (load,), **values)


@pytest.mark.parametrize(("taken", "met"), [(0.05, True), (0.06, False)])
def test_cpu_policy_may_take_a_quarter_from_neighbours(taken: float, met: bool) -> None:
    rows = (make_beside("cpu", taken), make_beside("speed", 0.2))
    target = pick(gpu_targets(make_findings(beside=rows)), "busy neighbours")
    assert target.measured == pytest.approx(taken / 0.2)
    assert target.met is met
    assert "16 neighbours 10% slower" in target.evidence


def test_wrong_bytes_beside_neighbours_leave_the_target_untold() -> None:
    wrong = make_beside("cpu", 0.01, compared=False, error="'' has wrong bytes")
    target = pick(
        gpu_targets(make_findings(beside=(wrong, make_beside("speed", 0.2)))), "busy neighbours"
    )
    assert target.met is None
    assert "wrong bytes" in target.evidence


def test_nothing_measured_gives_no_verdict() -> None:
    for targets in (gpu_targets(make_findings()), host_targets(make_findings())):
        assert targets
        assert all(target.met is None for target in targets)

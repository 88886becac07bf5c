"""Targets are computed from the rows of the run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.raw_peers import KVIKIO_TUNED
from benchmarks.result import FirstCall, ImportTime, Reading, Role, Row, Target
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


def test_nothing_measured_gives_no_verdict() -> None:
    for targets in (gpu_targets(make_findings()), host_targets(make_findings())):
        assert targets
        assert all(target.met is None for target in targets)

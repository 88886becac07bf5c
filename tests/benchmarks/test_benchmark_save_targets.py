"""Targets of writing are computed from the rows of the run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.result import Role, Target
from benchmarks.save.result import HostMemory, SaveRow, Timing
from benchmarks.save.targets import SaveFindings, save_targets

NBYTES = 10**9


def make_row(
    name: str, gb_per_s: float, synced: float | None = None, role: Role = Role.PEER, **given: Any
) -> SaveRow:
    until_fsync = None if synced is None else 1 / synced
    timing = Timing(1, 1 / gb_per_s, 0.2, 0, None, given.pop("free", 1.0), until_fsync)
    values: dict[str, Any] = {
        "kind": "raw", "place": "tmpfs", "package": "", "family": None, "nbytes": NBYTES,
        "first": None, "readings": (timing,), "compared": True, "absent": None, "error": None,
        "note": None, "reports": (),
    }  # fmt: skip
    return SaveRow(name=name, role=role, **{**values, **given})


def targets_of(*rows: SaveRow, host_memory: tuple[HostMemory, ...] = ()) -> list[Target]:
    return save_targets(SaveFindings(rows, host_memory))


def pick(targets: list[Target], name: str) -> Target:
    (target,) = (target for target in targets if target.name == name)
    return target


@pytest.mark.parametrize(("gb_per_s", "met"), [(3.0, True), (2.9, False)])
def test_tmpfs_is_compared_with_kvikio_of_as_many_threads(gb_per_s: float, met: bool) -> None:
    ours = make_row("headrace write_from, workers=8", gb_per_s, role=Role.OURS_EXTRA)
    more = make_row("headrace write_from, workers=16", 99.0, role=Role.OURS_EXTRA)
    peers = [make_row("KvikIO, 8 threads", 2.0), make_row("KvikIO, 16 threads", 9.0)]
    target = pick(targets_of(more, ours, *peers), "GPU to tmpfs, threads: 8")
    assert target.measured == pytest.approx(gb_per_s)
    assert target.wanted == pytest.approx(3.0)
    assert target.met is met


def test_one_worker_is_not_taken_for_sixteen() -> None:
    ours = make_row("headrace write_from, workers=16", 9.0, role=Role.OURS_EXTRA)
    peers = [make_row("KvikIO, 16 threads", 2.0), make_row("KvikIO, 1 thread (its default)", 1.0)]
    target = pick(targets_of(ours, *peers), "GPU to tmpfs, threads: 1")
    assert target.wanted == pytest.approx(1.5)
    assert (target.measured, target.met) == (None, None)
    assert "not measured" in target.evidence


def test_disk_is_compared_until_fsync_and_until_the_call_returned() -> None:
    rows = (
        make_row("headrace write_from", 2.0, 1.5, Role.OURS, place="disk"),
        make_row("KvikIO, 8 threads", 3.0, 1.0, place="disk"),
        make_row("KvikIO, 16 threads", 1.0, 1.4, place="disk"),
        make_row("numpy", 9.0, 9.0, place="disk"),
    )
    targets = targets_of(*rows)
    synced = pick(targets, "GPU to disk, until fsync returned")
    assert synced.wanted == pytest.approx(1.4)
    assert synced.met is True
    assert pick(targets, "GPU to disk, until the call returned").met is False


def test_wrong_bytes_leave_a_target_untold() -> None:
    ours = make_row("own", 9.0, None, Role.OURS, kind="model", compared=False, error="wrong bytes")
    peer = make_row("safetensors save_file", 1.0, kind="model")
    target = pick(targets_of(ours, peer), "model to tmpfs, one file")
    assert target.wanted == pytest.approx(3.0)
    assert target.met is None
    assert "wrong bytes" in target.evidence


@pytest.mark.parametrize(("growth", "met"), [(512 << 20, True), ((512 << 20) + 1, False)])
def test_host_memory_has_a_bound(growth: int, met: bool) -> None:
    found = (
        HostMemory("headrace.torch.save_file", NBYTES, growth, 1.0, None, ()),
        HostMemory("safetensors save_file", NBYTES, NBYTES, 1.0, None, ()),
    )
    target = pick(targets_of(host_memory=found), "peak host memory of saving the model")
    assert target.met is met
    assert "safetensors save_file 1 GB" in target.evidence


@pytest.mark.parametrize(
    ("kind", "place", "name", "bound"),
    [
        ("async", "tmpfs", "headrace.torch.save_file_async", 0.05),
        ("stream", "idle", "headrace read_into(stream=), registration kept", 0.001),
        ("stream", "delayed", "headrace submit_read(stream=), route", 0.001),
    ],
)
def test_caller_is_free_within_a_bound(kind: str, place: str, name: str, bound: float) -> None:
    for factor, met in ((1.0, True), (1.1, False)):
        row = make_row(name, 1.0, None, Role.OURS, kind=kind, place=place, free=bound * factor)
        told = [target for target in targets_of(row) if target.met is not None]
        assert [(target.measured, target.met) for target in told] == [(bound * factor, met)]


def test_nothing_measured_gives_no_verdict() -> None:
    targets = targets_of()
    assert len(targets) == 3 + 4 + 1 + 1 + 1 + 4
    assert all(target.met is None for target in targets)

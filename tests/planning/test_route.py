from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from headrace.errors import RouteUnavailable
from headrace.options import Options
from headrace.planning.route import FILE_SYSTEM_RULES, SMALL_NBYTES, Amount, Choice, choose
from headrace.types import HOST, Device, Route
from tests.support import CUDA, make_facts, reason_of

MIB, GIB = 1 << 20, 1 << 30


def pick(
    device: Device,
    *,
    resident: bool | None = False,
    missing: int = GIB,
    forced: str | None = None,
    reuse: Any = "auto",
    strict: bool = False,
    block: int = 4 * MIB,
    policy: Any = "speed",
    mapped: int = 0,
    nbytes: int = GIB,
    **facts: Any,
) -> Choice:
    options = Options(
        reuse=reuse,
        strict=strict,
        block_nbytes=block,
        pinned_nbytes=256 * MIB,
        policy=policy,
        mapped_nbytes=mapped,
    )
    route = None if forced is None else Route(forced)
    amount = Amount(max(nbytes, missing), missing)
    return choose(resident, amount, device, make_facts(**facts), options, route)


@pytest.mark.parametrize(
    ("device", "situation", "route"),
    [
        (HOST, {"resident": True}, "host"),
        (HOST, {"resident": False}, "direct"),
        (HOST, {"resident": False, "gpu": False}, "direct"),
        (HOST, {"resident": False, "gpu": None}, "direct"),
        (HOST, {"resident": False, "missing": SMALL_NBYTES - 1}, "host"),
        (HOST, {"resident": False, "missing": SMALL_NBYTES}, "direct"),
        (HOST, {"resident": False, "direct": False}, "host"),
        (HOST, {"resident": False, "direct": None}, "host"),
        (HOST, {"resident": True, "direct": False, "strict": True}, "host"),
        (HOST, {"resident": False, "reuse": "many"}, "host"),
        (HOST, {"resident": False, "reuse": "many", "missing": 32 * GIB}, "host"),
        (HOST, {"resident": False, "reuse": "many", "missing": 32 * GIB + 1}, "direct"),
        (HOST, {"resident": False, "reuse": "many", "available": None}, "host"),
        (HOST, {"resident": False, "reuse": "many", "available": 0}, "direct"),
        (HOST, {"resident": False, "reuse": "once"}, "direct"),
        (HOST, {"resident": True, "reuse": "once"}, "host"),
        (HOST, {"resident": True, "forced": "host"}, "host"),
        (HOST, {"resident": True, "forced": "direct"}, "direct"),
        (HOST, {"resident": False, "forced": "host"}, "host"),
        (HOST, {"resident": False, "forced": "host", "direct": False, "strict": True}, "host"),
        (HOST, {"resident": False, "alignment": 8 * MIB}, "host"),
        (HOST, {"resident": False, "alignment": 4 * MIB}, "direct"),
        (HOST, {"resident": None}, "host"),
        (HOST, {"resident": None, "direct": False, "strict": True}, "host"),
        (CUDA, {"resident": None, "reuse": "once"}, "cached"),
        (CUDA, {"resident": True}, "cached"),
        (CUDA, {"resident": False}, "direct"),
        (CUDA, {"resident": False, "missing": SMALL_NBYTES - 1}, "cached"),
        (CUDA, {"resident": False, "direct": False}, "cached"),
        (CUDA, {"resident": False, "reuse": "many"}, "cached"),
        (CUDA, {"resident": False, "reuse": "many", "available": GIB}, "direct"),
        (CUDA, {"resident": True, "forced": "cached"}, "cached"),
        (CUDA, {"resident": True, "forced": "direct"}, "direct"),
        (CUDA, {"resident": True, "direct": False, "strict": True}, "cached"),
        (CUDA, {"resident": True, "mapping": True}, "cached"),
        (CUDA, {"resident": True, "mapping": True, "policy": "cpu"}, "mapped"),
        (CUDA, {"resident": True, "mapping": True, "policy": "auto"}, "cached"),
        (CUDA, {"resident": True, "mapping": True, "policy": "auto", "busy": True}, "mapped"),
        (CUDA, {"resident": True, "policy": "cpu"}, "cached"),
        (CUDA, {"resident": None, "mapping": True, "policy": "cpu"}, "cached"),
        (CUDA, {"resident": False, "mapping": True, "policy": "cpu"}, "direct"),
        (CUDA, {"resident": True, "mapping": True, "mapped": GIB, "missing": 0}, "mapped"),
        (CUDA, {"resident": True, "mapping": True, "mapped": GIB - 1, "missing": 0}, "cached"),
        (CUDA, {"resident": False, "mapping": True, "forced": "mapped"}, "mapped"),
        (CUDA, {"resident": False, "gds": True}, "gds"),
        (CUDA, {"resident": True, "gds": True}, "cached"),
        (CUDA, {"resident": False, "gds": True, "reuse": "many"}, "cached"),
        (CUDA, {"resident": False, "gds": True, "missing": 1}, "cached"),
        (CUDA, {"resident": True, "gds": True, "forced": "gds"}, "gds"),
        (HOST, {"resident": False, "gds": True, "mapping": True}, "direct"),
        (CUDA, {"resident": False, "file_system": "nfs4"}, "cached"),
        (CUDA, {"resident": False, "file_system": "fuse.sshfs"}, "cached"),
        (HOST, {"resident": False, "file_system": "cifs"}, "host"),
        (HOST, {"resident": False, "file_system": "nfs", "forced": "direct"}, "direct"),
        (CUDA, {"resident": False, "file_system": "lustre"}, "direct"),
        (CUDA, {"resident": False, "file_system": "lustre", "direct": False}, "cached"),
    ],
    ids=str,
)
def test_situation_has_its_route(device: Device, situation: dict[str, Any], route: str) -> None:
    choice = pick(device, **situation)
    assert choice.route == route
    assert choice.why


def test_reason_of_a_network_file_system_is_that_of_its_rule() -> None:
    for rule in FILE_SYSTEM_RULES:
        assert rule.why
        choice = pick(CUDA, file_system=rule.kinds[0].rstrip("."))
        assert choice.route == ("direct" if rule.direct else "cached")
        assert (rule.why in choice.why) == (not rule.direct)


def test_thrift_without_a_way_to_map_is_a_downgrade_that_says_why() -> None:
    choice = pick(CUDA, resident=True, policy="cpu")
    assert choice.downgrade is not None
    assert (choice.downgrade.route, choice.downgrade.remedy) == ("mapped", "MAPPING-REMEDY")
    assert "MAPPING-FOUND" in choice.why


SITUATIONS = [
    dict(
        zip(
            ("device", "resident", "missing", "direct", "gpu", "reuse", "forced"), each, strict=True
        )
    )
    for each in product(
        (HOST, CUDA),
        (True, False),
        (1, GIB),
        (True, False),
        (True, False),
        ("auto", "once", "many"),
        (None, *Route),
    )
]


@pytest.mark.parametrize("strict", [False, True])
def test_every_route_is_taken_or_rejected_with_a_reason_and_none_is_both(strict: bool) -> None:
    served = refused = 0
    for situation in SITUATIONS:
        impossible = impossible_routes(situation)
        choice = attempt(situation, strict)
        if isinstance(choice, str):
            refused += 1
            check_refusal(situation, choice, strict)
            continue
        served += 1
        assert choice.route not in impossible
        assert situation["forced"] in (None, choice.route)
        assert {each.route for each in choice.rejections} == set(Route) - {choice.route}
        assert len(choice.rejections) == len(Route) - 1
        assert all(each.why for each in choice.rejections)
        check_downgrade(situation, choice, strict)
    assert served > 100
    assert refused > 100


def attempt(situation: dict[str, Any], strict: bool) -> Choice | str:
    """The choice, or why there is none."""
    try:
        return pick(**situation, strict=strict)
    except RouteUnavailable as error:
        return str(error)


def impossible_routes(situation: dict[str, Any]) -> set[str]:
    """Routes that can serve in no way, by the facts alone."""
    routes = {"mapped", "gds"}
    if situation["device"] == HOST:
        routes.add("cached")
    else:
        routes.add("host")
        if not situation["gpu"]:
            routes |= {"cached", "direct"}
    return routes if situation["direct"] else routes | {"direct"}


def check_refusal(situation: dict[str, Any], message: str, strict: bool) -> None:
    impossible = impossible_routes(situation)
    forced = situation["forced"]
    if forced is not None:
        assert forced in impossible
        assert message.startswith(f"route {str(forced)!r} cannot serve: {forced}: ")
    if "direct" in impossible and strict and "strict=True" in message:
        assert "direct: DIRECT-FOUND (DIRECT-WHY) (DIRECT-REMEDY)" in message
        return
    for route in impossible:
        assert f"{route}: " in message
    if situation["device"] == CUDA and not situation["gpu"]:
        assert message.count("GPU-FOUND (GPU-WHY)") == 4
        assert message.count("GPU-REMEDY") == 4
    elif not situation["direct"]:
        assert "direct: DIRECT-FOUND (DIRECT-WHY) (DIRECT-REMEDY)" in message


def check_downgrade(situation: dict[str, Any], choice: Choice, strict: bool) -> None:
    """Only bytes that would have gone around the page cache are downgraded."""
    wants_direct = (
        situation["forced"] is None
        and not situation["resident"]
        and situation["missing"] == GIB
        and situation["reuse"] != "many"
    )
    if wants_direct and not situation["direct"]:
        assert not strict
        assert choice.downgrade is not None
        assert choice.downgrade in choice.rejections
        assert (choice.downgrade.route, choice.downgrade.remedy) == ("direct", "DIRECT-REMEDY")
        assert choice.downgrade.why in choice.why
    else:
        assert choice.downgrade is None
        assert (choice.route == "direct") == (wants_direct or situation["forced"] == "direct")


def test_forced_route_that_cannot_serve_names_all_reasons_and_remedies() -> None:
    message = reason_of(lambda: pick(CUDA, forced="direct", gpu=False, direct=False))
    assert message.startswith(
        "route 'direct' cannot serve: direct: CUDA device: GPU-FOUND (GPU-WHY)"
    )
    for part in (
        "GPU-REMEDY",
        "cached: CUDA device: GPU-FOUND",
        "host: the destination is cuda:0",
        "gds: ",
    ):
        assert part in message


def test_route_ruled_out_twice_says_both_reasons() -> None:
    message = reason_of(lambda: pick(CUDA, forced="direct", gpu=False, direct=False))
    assert "DIRECT-REMEDY" in message


def test_gpu_that_is_missing_rules_out_every_route_to_it() -> None:
    message = reason_of(lambda: pick(CUDA, gpu=False))
    assert message.startswith("no route can serve: ")
    assert [f"{route}: " in message for route in Route] == [True] * len(Route)
    assert message.count("GPU-REMEDY") == 4


def test_strict_refusal_says_which_route_is_missing_why_and_what_to_do() -> None:
    message = reason_of(lambda: pick(CUDA, direct=False, strict=True))
    assert message == (
        "strict=True forbids cached in place of direct: DIRECT-FOUND (DIRECT-WHY) (DIRECT-REMEDY)"
    )


def test_block_that_does_not_fit_the_alignment_says_what_would() -> None:
    message = reason_of(lambda: pick(HOST, forced="direct", block=4096, alignment=8192))
    assert "blocks of 4096 bytes are no multiple of the alignment, 8192 bytes" in message
    assert "set block_nbytes to a multiple of 8192" in message


def test_route_that_could_not_serve_is_not_called_merely_not_the_best() -> None:
    choice = pick(HOST, resident=True, direct=False)
    (direct,) = [each for each in choice.rejections if each.route == "direct"]
    assert "DIRECT-FOUND" in direct.why
    assert direct.remedy == "DIRECT-REMEDY"

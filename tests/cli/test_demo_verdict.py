from __future__ import annotations

from headrace.cli.demo_bench import COLD, RESIDENT, Row
from headrace.cli.demo_verdict import conclude


def row(
    method: str,
    rate: float | None,
    *,
    route: str = "",
    state: str = RESIDENT,
    observed: tuple[str, ...] = (),
    why: str = "",
) -> Row:
    return Row(method, route, state, rate, 0.1, observed, 0, why, matches=True)


def auto(rate: float | None, state: str = RESIDENT, why: str = "it is there") -> Row:
    return row("headrace auto", rate, route="auto", state=state, observed=("host",), why=why)


def test_a_win_is_a_factor_over_the_best_of_the_others() -> None:
    rows = [auto(6.0), row("np.fromfile", 3.0), row("safetensors load_file", 2.0)]
    assert conclude(rows) == (
        "In the page cache: headrace (host: it is there) reaches 6.00 GB/s, 2.0 times the best of "
        "today's ways, np.fromfile (3.00).",
    )


def test_a_defeat_is_said() -> None:
    (sentence,) = conclude([auto(2.0), row("np.fromfile", 5.0)])
    assert "the best here is np.fromfile (5.00, 2.5 times that)" in sentence


def test_a_difference_within_the_noise_is_a_draw() -> None:
    for theirs in (3.8, 4.0, 4.2):
        (sentence,) = conclude([auto(4.0), row("np.fromfile", theirs)])
        assert "level with" in sentence


def test_the_routes_not_taken_stand_beside_the_choice() -> None:
    rows = [
        auto(4.0),
        row("headrace host", 4.1, route="host"),
        row("headrace direct", 1.5, route="direct"),
        row("headrace cached", None, route="cached"),
    ]
    (sentence,) = conclude(rows)
    assert sentence.endswith("forced, it would be 1.50 by direct.")


def test_each_state_has_its_sentence() -> None:
    sentences = conclude([auto(4.0), auto(1.0, COLD)])
    assert [s.split(":")[0] for s in sentences] == ["In the page cache", "Not in the page cache"]


def test_a_state_without_figures_says_why() -> None:
    rows = [auto(None, COLD, "no cold figure: tmpfs keeps its files in memory")]
    assert conclude(rows) == (
        "Not in the page cache: no cold figure: tmpfs keeps its files in memory.",
    )


def test_a_mixed_route_is_told_by_its_parts() -> None:
    mixed = row(
        "headrace auto",
        2.0,
        route="auto",
        observed=("direct", "host"),
        why="direct 75%: a; host 25%: b",
    )
    assert conclude([mixed])[0].startswith(
        "In the page cache: headrace (direct 75%: a; host 25%: b)"
    )


def test_no_rows_give_no_sentence() -> None:
    assert conclude([]) == ()

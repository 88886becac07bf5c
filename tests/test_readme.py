"""The READMEs and references: their code runs, their commands exist, and both say the same."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from numpy.typing import NDArray
from safetensors.numpy import load_file as official_load_file
from safetensors.numpy import save_file

import headrace
from benchmarks.table import render_document
from headrace.cli.main import app
from headrace.planning.effort import choose_workers
from headrace.planning.plan import Rejection
from headrace.planning.route import FILE_SYSTEM_RULES
from headrace.report import ObservedRoute, PlannedRoute, Report
from headrace.types import HOST, Route
from tests.support import CUDA, make_facts

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.zh-CN.md")
REFERENCES = ("docs/reference.md", "docs/reference.zh-CN.md")
TRANSLATIONS = (READMES, REFERENCES)
IN_ENGLISH = (READMES[0], REFERENCES[0])
PAGES = (*READMES, *REFERENCES, "CONTRIBUTING.md")
COMMANDS = (
    "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/headrace demo",
    "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/python -m pytest",
)
DATA_NBYTES = 2 << 20

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RESULTS = re.compile(r"^<!-- results:begin -->\n(.*?)^<!-- results:end -->$", re.M | re.S)


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _blocks(page: str, language: str | None = None) -> list[tuple[str, str]]:
    """Language and content of each fenced block of a page."""
    found = [(block[1], block[2]) for block in _FENCE.finditer(_text(page))]
    return [block for block in found if language in (None, block[0])]


def _prose(page: str) -> str:
    """Give a page without its fenced blocks and its results."""
    return _FENCE.sub("", _RESULTS.sub("", _text(page)))


def _block(page: str, language: str) -> str:
    ((_, content),) = _blocks(page, language)
    return content


def _codes() -> list[str]:
    """Each Python block of the pages in English."""
    return [code for page in IN_ENGLISH for _, code in _blocks(page, "python")]


def _results(page: str) -> str:
    """What was pasted of reading, and of writing."""
    reading, writing = _RESULTS.findall(_text(page))
    return f"{reading}{writing}"


def _examples() -> list[Any]:
    """Each Python block; torch's blocks for a GPU also in host memory, if they have no streams."""
    examples = []
    for index, code in enumerate(_codes()):
        imported = re.search(r"(?:from headrace\.|import )(cupy|torch)", code)
        framework = imported[1] if imported else "numpy"
        on_gpu = framework == "cupy" or '"cuda"' in code
        marks = [pytest.mark.gpu] if on_gpu else []
        examples.append(pytest.param(framework, code, id=f"{index}-{framework}", marks=marks))
        if on_gpu and framework == "torch" and "torch.cuda" not in code:
            on_host = code.replace('"cuda"', '"cpu"')
            examples.append(pytest.param(framework, on_host, id=f"{index}-{framework}-host"))
    return examples


@pytest.fixture
def weights() -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(0)
    return {
        name: generator.random((64, 33), np.float32)
        for name in ("model.norm.weight", "model.layers.0.weight")
    }


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, NDArray[Any]]
) -> Path:
    """Make a working directory with the files that the examples name."""
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "checkpoint").mkdir()
    for number, (name, array) in enumerate(weights.items()):
        save_file({name: array}, tmp_path / "checkpoint" / f"model-{number}.safetensors")
    np.save(tmp_path / "embeddings.npy", weights["model.norm.weight"])
    content = np.random.default_rng(1).integers(0, 256, DATA_NBYTES, dtype=np.uint8)
    content.tofile(tmp_path / "data.bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _to_host(array: Any) -> NDArray[Any]:
    """Copy an array of any framework into NumPy."""
    for method in ("cpu", "get"):  # torch's, CuPy's
        if hasattr(array, method):
            array = getattr(array, method)()
    return np.asarray(array)


@pytest.mark.parametrize(("framework", "code"), _examples())
def test_example_runs_and_gives_the_right_bytes(
    framework: str, code: str, folder: Path, weights: dict[str, NDArray[Any]]
) -> None:
    pytest.importorskip(framework)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    for name in ("weights", "norm"):
        loaded = names.get(name, {})
        assert all(np.array_equal(_to_host(loaded[key]), weights[key]) for key in loaded)
    assert set(names.get("weights", weights)) == set(weights)
    assert set(names.get("norm", ["model.norm.weight"])) == {"model.norm.weight"}
    if "embeddings" in names:
        assert np.array_equal(_to_host(names["embeddings"]), np.load("embeddings.npy"))
    if "block" in names:
        assert names["block"].tobytes() == (folder / "data.bin").read_bytes()[4096:][: 1 << 20]
    if "buffer" in names:
        wanted = (folder / "data.bin").read_bytes()[4097 : 4097 + (1 << 20)]
        assert _to_host(names["buffer"]).tobytes() == wanted
        assert names["report"].nbytes == 1 << 20
    if "records" in names:
        written = bytes(4097) + _to_host(names["records"]).tobytes()
        assert (folder / "records.bin").read_bytes() == written
    saved = [official_load_file(path) for path in folder.rglob("*.safetensors")]
    assert all(np.array_equal(t[key], weights[key]) for t in saved for key in t)
    named = re.findall(r'"([\w-]+\.(?:safetensors|bin))"', code)
    assert all((folder / name).exists() for name in named)


def test_example_of_a_suite_passes(tmp_path: Path) -> None:
    (code,) = [code for code in _codes() if "EngineSuite" in code]
    (tmp_path / "test_mine.py").write_text(code, encoding="utf-8")
    command = (sys.executable, "-m", "pytest", "-q", "--color=no", "test_mine.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout)


@pytest.mark.parametrize("framework", ["torch", "cupy", "numpy"])
def test_each_framework_has_an_example(framework: str) -> None:
    imported = f"from headrace.{framework} import load_file, read, save_file"
    assert any(imported in code for code in _codes())


@pytest.mark.parametrize("page", READMES)
@pytest.mark.parametrize("command", COMMANDS)
def test_command_for_a_fresh_machine_stands_alone_in_a_block(page: str, command: str) -> None:
    assert [content for _, content in _blocks(page, "sh")].count(f"{command}\n") == 1


@pytest.mark.parametrize("pages", TRANSLATIONS)
def test_both_languages_have_the_same_code(pages: tuple[str, str]) -> None:
    assert _blocks(pages[0]) == _blocks(pages[1])


@pytest.mark.parametrize("pages", TRANSLATIONS)
def test_both_languages_have_the_same_outline(pages: tuple[str, str]) -> None:
    outlines = [re.findall(r"^(#+) |^(\|[-|]+\|)$", _prose(page), re.M) for page in pages]
    assert outlines[0]
    assert outlines[0] == outlines[1]


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_exist(page: str) -> None:
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", _prose(page)) if "://" not in t]
    for target in targets:
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path.read_text(encoding="utf-8")), target


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_named_in_code_spans_exist(page: str) -> None:
    named = re.findall(r"`((?:scripts|src|docs|tests|\.ci)/[\w./-]+)", _prose(page))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", READMES)
def test_commands_and_their_options_exist(page: str) -> None:
    commands = getattr(typer.main.get_command(app), "commands", {})
    spans = re.findall(r"`(headrace [a-z][^`\n]*)`", _prose(page))
    lines = [line for _, content in _blocks(page, "sh") for line in content.splitlines()]
    used = [*spans, *(line for line in lines if line.startswith("headrace "))]
    assert {shlex.split(line)[1] for line in used} == set(commands)
    for line in used:
        _, name, *words = shlex.split(line)
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def _is_error(name: str) -> bool:
    value = getattr(headrace, name)
    return isinstance(value, type) and issubclass(value, headrace.HeadraceError)


@pytest.mark.parametrize("page", READMES)
def test_tables_name_every_option_route_and_error(page: str) -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", _text(page), re.M))
    routes = {str(route) for route in Route}
    errors = {name for name in headrace.__all__ if _is_error(name)}
    assert {field.name for field in fields(headrace.Options)} <= rows
    assert routes <= rows
    assert errors <= rows


@pytest.mark.parametrize("page", REFERENCES)
def test_table_of_file_systems_is_the_planner_s(page: str) -> None:
    rows = re.findall(r"^\| \w+[^\w ] ?(`[^|]+`) \| ([^|]+) \|", _text(page), re.M)
    shown = {tuple(re.findall(r"`([^`*]+)\*?`", kinds)): "direct" in first for kinds, first in rows}
    assert shown == {rule.kinds: rule.direct for rule in FILE_SYSTEM_RULES}


@pytest.mark.parametrize("page", READMES)
def test_table_of_commands_names_every_command(page: str) -> None:
    rows = re.findall(r"^\| `headrace (\w+)` \|", _text(page), re.M)
    assert set(rows) == set(getattr(typer.main.get_command(app), "commands", {}))


@pytest.mark.parametrize("page", READMES)
def test_defaults_in_the_table_of_options_are_the_code_s(page: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", _text(page), re.M))
    for field in fields(headrace.Options):
        default = getattr(headrace.Options(), field.name)
        shown = f"`{default!r}`"
        if "nbytes" in field.name:
            shown = f"{default >> 20} MiB" if default else "0"
        assert rows[field.name] == shown.replace("'", '"')


@pytest.mark.parametrize("page", READMES)
def test_numbers_of_workers_are_the_code_s(page: str) -> None:
    (row,) = re.findall(r"^\| `workers` \| .+$", _text(page), re.M)
    machine, small = (make_facts(cpus=cpus).machine for cpus in (64, 1))
    options = headrace.Options()
    counts = (
        choose_workers(options, machine, CUDA, 1 << 30),
        choose_workers(options, machine, HOST, 1 << 30),
        choose_workers(options, machine, HOST, 1 << 20),
        choose_workers(options, small, HOST, 1 << 30),
    )
    assert [int(n) for n in re.findall(r"\d+", row) if n != "512"] == list(counts)


def _report_of(document: dict[str, Any]) -> Report:
    """Make a report from what `Report.to_dict` gives."""
    given = {field.name: document[field.name] for field in fields(Report)}
    return Report(
        **{
            **given,
            "planned": tuple(PlannedRoute(**part) for part in document["planned"]),
            "observed": tuple(ObservedRoute(**part) for part in document["observed"]),
            "rejected": tuple(Rejection(**part) for part in document["rejected"]),
        }
    )


def test_example_of_a_report_is_one_of_this_version(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"1234")
    made = headrace.read_into(bytearray(4), tmp_path / "data").to_dict()
    shown = json.loads(_block(REFERENCES[0], "json"))
    assert list(shown) == list(made)
    assert list(shown["stages"]) == list(made["stages"])
    load = _report_of(shown)
    save = replace(load, operation="write", rejected=(), durable=False, seconds=0.025685)
    assert [str(load), str(save)] == _block(READMES[0], "text").splitlines()


@pytest.mark.parametrize("page", REFERENCES)
def test_table_of_the_report_names_its_keys(page: str) -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", _text(page), re.M))
    plain = {"schema", "source", "device", "nbytes", "seconds", "gb_per_s"}
    assert set(json.loads(_block(page, "json"))) - plain <= rows


@pytest.mark.parametrize("page", READMES)
def test_results_come_from_a_committed_file(page: str) -> None:
    rows = [line for line in _results(page).splitlines() if line.startswith("|")]
    known: set[str] = set()
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for every in (False, True):
            known |= set(render_document(document, every_setting=every).splitlines())
    assert not [row for row in rows if row not in known]

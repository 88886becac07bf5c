"""The rules of the house that no linter knows; each failure names the file and the line."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import headrace

HOUSE = Path(headrace.__file__).parent
MOST_LINES_OF_A_FILE = 399
MOST_LINES_OF_A_FUNCTION = 40
ENVIRONMENT_IS_READ_IN = ("cli", "context.py")
ENVIRONMENT_IS_PASSED_ON_IN = ("cufile.py", "cufile_probe.py", "libcufile_child.py")
# libcufile takes its settings from the environment alone.
FOREIGN_CALLS_ARE_IN = ("bindings", "testing")
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_MAKERS = {
    *("list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"),
    *("WeakSet", "WeakKeyDictionary", "WeakValueDictionary"),
}


def files() -> list[Path]:
    found = sorted(HOUSE.rglob("*.py"))
    assert len(found) > 40, f"{HOUSE} is not the whole package"
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(HOUSE))


def is_in(path: Path, places: tuple[str, ...]) -> bool:
    return path.relative_to(HOUSE).parts[0] in places


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def where(path: Path, node: ast.AST) -> str:
    return f"{name_of(path)}:{getattr(node, 'lineno', 0)}"


def code_lines(source: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function with code on them: no docstring, comment or empty line counts."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    first = function.body[0]
    docstring: set[int] = set()
    if ast.get_docstring(function, clean=False) is not None:
        docstring = set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    whole = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    return len(lines.intersection(whole) - docstring)


def test_every_file_is_under_four_hundred_lines() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in files()}
    assert {n: lines for n, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE} == {}


def test_every_function_is_short() -> None:
    long = {}
    for path in files():
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = code_lines(source, node)
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long[f"{where(path, node)} {node.name}"] = lines
    assert long == {}


def test_no_function_rebinds_names_of_its_module() -> None:
    assert [where(p, node) for p, node in nodes() if isinstance(node, ast.Global)] == []


def test_environment_is_read_by_the_command_line_and_the_context_alone() -> None:
    readers = [
        where(path, node)
        for path, node in nodes()
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and {getattr(node, key, None) for key in ("attr", "id", "name")}
        & {"environ", "environb", "getenv", "putenv"}
        and not is_in(path, ENVIRONMENT_IS_READ_IN)
        and path.name not in ENVIRONMENT_IS_PASSED_ON_IN
    ]
    assert readers == []


def test_no_module_holds_mutable_state() -> None:
    held = []
    for path in files():
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            value = node.value
            made_by = value.func if isinstance(value, ast.Call) else None
            maker = getattr(made_by, "attr", getattr(made_by, "id", None))
            if names != {"__all__"} and (isinstance(value, MUTABLE) or maker in MUTABLE_MAKERS):
                held.append(where(path, node))
    assert held == []


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError|NotImplemented)\b")
    left = [
        f"{name_of(path)}:{number}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert left == []


def test_input_is_never_checked_by_assert() -> None:
    checks = [
        where(path, node)
        for path, node in nodes()
        if isinstance(node, ast.Assert) and not is_in(path, ("testing",))
    ]
    assert checks == []


def test_no_bare_exception_is_raised() -> None:
    bare = []
    for path, node in nodes():
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if getattr(raised, "id", None) in ("Exception", "BaseException"):
                bare.append(where(path, node))
    assert bare == []


def test_foreign_calls_are_made_in_the_bindings_alone() -> None:
    strays = []
    for path, node in nodes():
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        foreign = [m for m in modules if m.split(".")[0] in ("ctypes", "cffi", "fcntl", "cuda")]
        if foreign and not is_in(path, FOREIGN_CALLS_ARE_IN):
            strays.append(where(path, node))
    assert strays == []


def test_no_file_is_named_for_what_it_is_not() -> None:
    vague = re.compile(r"util|helper|manager|common|misc")
    assert [name_of(path) for path in files() if vague.search(path.stem)] == []

from __future__ import annotations

import errno
import logging

import pytest
import typer

from headrace.cli.failure import describe, report_failure
from headrace.errors import FormatError, RouteUnavailable, ShortRead, SourceChanged


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FormatError("m.safetensors: header ends early"), "m.safetensors: header ends early"),
        (
            RouteUnavailable("none can serve:\n  gds: no\n  host: no"),
            "none can serve: gds: no host: no",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
            "x: No such file or directory",
        ),
        (SourceChanged("x: it was rewritten"), "x: it was rewritten"),
        (KeyError("no tensor named w"), "no tensor named w"),
        (OSError(errno.EIO, "Input/output error"), "[Errno 5] Input/output error"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_expected_error_is_one_line_in_its_own_words(error: Exception, line: str) -> None:
    assert describe(error) == line


def test_an_unexpected_error_names_its_type_and_points_to_debug() -> None:
    line = describe(RuntimeError("odd"))
    assert line == "RuntimeError: odd (unexpected; --debug shows the traceback)"


@pytest.mark.parametrize("error", [ShortRead("ends at 3"), ValueError("bad"), RuntimeError("odd")])
def test_every_error_becomes_status_1(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, report_failure(debug=False):
        raise error
    assert left.value.exit_code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"headrace: {describe(error)}\n"


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), report_failure(debug=True):
        raise ShortRead("ends at 3")
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, report_failure(debug=False):
        raise KeyboardInterrupt
    assert left.value.exit_code == 130
    assert capsys.readouterr().err == "headrace: interrupted\n"


def test_a_closed_pipe_is_left_to_typer() -> None:
    with pytest.raises(BrokenPipeError), report_failure(debug=False):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("debug", [True, False])
def test_the_logger_is_left_as_it_was(debug: bool) -> None:
    logger = logging.getLogger("headrace")
    before = (list(logger.handlers), logger.level)
    with report_failure(debug):
        assert len(logger.handlers) == len(before[0]) + 1
    assert (list(logger.handlers), logger.level) == before


def test_warnings_of_the_log_stay_off_stderr_without_debug(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with report_failure(debug=False):
        logging.getLogger("headrace").warning("a downgrade")
    assert "a downgrade" not in capsys.readouterr().err

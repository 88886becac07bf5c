from __future__ import annotations

import io
import sys

import pytest

from headrace.cli.progress import format_rate, quiet, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress() as meter:
        assert meter is quiet
        meter("model", 1, 2)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_terminal_gets_a_bar_with_the_rate_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress() as meter:
        meter("[bold]model", 0, 0)
        meter("[bold]model", 3_000_000_000, 4_000_000_000)
    assert "[bold]model" in terminal.getvalue()
    assert "GB/s" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_the_rate_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress(rate=False) as meter:
        meter("resident", 3_000_000_000, 4_000_000_000)
    assert "GB/s" not in terminal.getvalue()


def test_a_rate_is_in_decimal_gigabytes_and_absent_before_the_first_byte() -> None:
    assert format_rate(5_000_000_000, 2.0) == "2.50 GB/s"
    assert format_rate(0, 2.0) == ""
    assert format_rate(1, 0.0) == ""

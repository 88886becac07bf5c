"""What a run is asked to do: the command line, as one frozen value."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SECTIONS = ("raw", "model", "kept", "neighbour", "gds", "first-call", "imports", "doctor")
"""Parts of a run, as ``--only`` names them."""

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """One run."""

    device: str
    """``"cuda"`` or ``"cpu"``."""
    raw_nbytes: int
    """Size of the raw file."""
    model_nbytes: int
    """Size that the model comes close to."""
    gds_nbytes: int
    """Bytes of the raw file that are read through cuFile."""
    directory: Path | None
    """Where the files are made; None takes the temporary directory."""
    zram: str | None
    """Block device for the cold place; None goes without."""
    repeats: int
    """Measured rounds, after one for warming up."""
    sections: tuple[str, ...]
    """Parts to run, of `SECTIONS`."""
    quick: bool
    """Whether this is a check that everything runs, not a measurement."""
    json_path: Path | None
    """Where the JSON goes; None writes none."""
    deadline_s: float
    """Seconds after which no new round starts."""
    budget_s: float
    """Seconds of readings after which a contestant leaves a place."""


def parse_nbytes(text: str) -> int:
    """Read a size such as ``8GiB``, ``7.85GB`` or ``4096``.

    Raises
    ------
    argparse.ArgumentTypeError
        The text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG]i?B)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8GiB, 7.85GB or 4096")
    return round(float(match[1]) * _UNITS[(match[2] or "").upper()])


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line.

    Parameters
    ----------
    arguments
        Words after the program's name; None takes the process's own.
    """
    parsed = _parser().parse_args(arguments)
    device = choose_device(parsed)
    default_raw, default_model = _default_sizes(device, parsed.quick)
    return Settings(
        device=device,
        raw_nbytes=parsed.nbytes or default_raw,
        model_nbytes=parsed.model_nbytes or default_model,
        gds_nbytes=min(parsed.gds_nbytes, parsed.nbytes or default_raw),
        directory=parsed.dir,
        zram=choose_zram(parsed, device),
        repeats=choose_repeats(parsed),
        sections=tuple(parsed.only or SECTIONS),
        quick=parsed.quick,
        json_path=parsed.json,
        deadline_s=parsed.deadline_s,
        budget_s=parsed.budget_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        description="Load a raw file and a model through headrace and its peers; compare bytes "
        "and speed. Give the page cache room for both files twice over.",
    )
    add = parser.add_argument
    add("--nbytes", type=parse_nbytes, help="raw file (8GiB; 1GiB without a GPU)")
    add("--model-nbytes", type=parse_nbytes, help="model (7.85GB; 1GB without a GPU)")
    add("--gds-nbytes", type=parse_nbytes, default=2 << 30, help="read through cuFile (2GiB)")
    add_shared_options(parser, SECTIONS, deadline_s=540.0, budget_s=8.0)
    return parser


def add_shared_options(
    parser: argparse.ArgumentParser,
    sections: Sequence[str],
    *,
    deadline_s: float,
    budget_s: float,
) -> None:
    """Add what every kind of run can be told."""
    add = parser.add_argument
    add("--dir", type=Path, help="where to make the files (the temporary directory)")
    add("--zram", help="idle zram device for a place, or 'none' (/dev/zram0 with a GPU)")
    add("--repeats", type=int, help="measured rounds (5)")
    add("--only", action="append", choices=sections, help="run this part; may be repeated")
    add("--quick", action="store_true", help="a few MiB, to see that everything runs")
    add("--json", type=Path, help="write the results there")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="of the arrays (auto)")
    after = f"no new round after this ({deadline_s:g})"
    add("--deadline-s", type=float, default=deadline_s, help=after)
    each = f"readings per contestant and place ({budget_s:g})"
    add("--budget-s", type=float, default=budget_s, help=each)


def choose_device(parsed: argparse.Namespace) -> str:
    """Give the device that was asked for, or the best one."""
    return _best_device() if parsed.device == "auto" else str(parsed.device)


def choose_zram(parsed: argparse.Namespace, device: str) -> str | None:
    """Give the block device; None goes without."""
    zram = parsed.zram or ("/dev/zram0" if device == "cuda" and not parsed.quick else "none")
    return None if zram == "none" else str(zram)


def choose_repeats(parsed: argparse.Namespace) -> int:
    """Give the measured rounds."""
    return parsed.repeats or (2 if parsed.quick else 5)


def _best_device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _default_sizes(device: str, quick: bool) -> tuple[int, int]:
    if quick:
        return 8 << 20, 6_000_000
    if device == "cuda":
        return 8 << 30, 7_850_000_000
    return 1 << 30, 1_000_000_000

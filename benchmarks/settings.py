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
    device = parsed.device if parsed.device != "auto" else _best_device()
    default_raw, default_model = _default_sizes(device, parsed.quick)
    zram = parsed.zram or ("/dev/zram0" if device == "cuda" and not parsed.quick else "none")
    return Settings(
        device=device,
        raw_nbytes=parsed.nbytes or default_raw,
        model_nbytes=parsed.model_nbytes or default_model,
        gds_nbytes=min(parsed.gds_nbytes, parsed.nbytes or default_raw),
        directory=parsed.dir,
        zram=None if zram == "none" else zram,
        repeats=parsed.repeats or (2 if parsed.quick else 5),
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
    add("--dir", type=Path, help="where to make the files (the temporary directory)")
    add("--zram", help="idle zram device for the cold place, or 'none' (/dev/zram0 with a GPU)")
    add("--repeats", type=int, help="measured rounds (5)")
    add("--only", action="append", choices=SECTIONS, help="run this part; may be repeated")
    add("--quick", action="store_true", help="a few MiB, to see that everything runs")
    add("--json", type=Path, help="write the results there")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="destination (auto)")
    add("--deadline-s", type=float, default=440.0, help="no new round after this (440)")
    add("--budget-s", type=float, default=8.0, help="readings per contestant and place (8)")
    return parser


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

"""What a run of saves is asked to do: the command line, as one frozen value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.settings import (
    add_shared_options,
    choose_device,
    choose_repeats,
    choose_zram,
    parse_nbytes,
)

SECTIONS = ("raw", "model", "async", "stream")
"""Parts of a run, as ``--only`` names them."""


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """One run."""

    device: str
    """``"cuda"`` or ``"cpu"``."""
    raw_nbytes: int
    """Bytes that are written to tmpfs."""
    zram_nbytes: int
    """Bytes that are written to the zram place."""
    disk_nbytes: int
    """Bytes that are written to the disk."""
    model_nbytes: int
    """Size that the model comes close to."""
    stream_nbytes: int
    """Size of the file that is read in stream order."""
    directory: Path | None
    """Where the files are made; None takes the temporary directory."""
    zram: str | None
    """Block device for the zram place; None goes without."""
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


def parse_settings(arguments: Sequence[str] | None = None) -> SaveSettings:
    """Read the command line.

    Parameters
    ----------
    arguments
        Words after the program's name; None takes the process's own.
    """
    parsed = _parser().parse_args(arguments)
    device = choose_device(parsed)
    raw, model, stream = _default_sizes(device, parsed.quick)
    raw = parsed.nbytes or raw
    # Reads in stream order need a GPU; without one that part runs only where it is asked for.
    sections = SECTIONS if device == "cuda" else SECTIONS[:-1]
    return SaveSettings(
        device=device,
        raw_nbytes=raw,
        zram_nbytes=min(parsed.zram_nbytes or raw // 2, raw),
        disk_nbytes=min(parsed.disk_nbytes or raw // 4, raw),
        model_nbytes=parsed.model_nbytes or model,
        stream_nbytes=parsed.stream_nbytes or stream,
        directory=parsed.dir,
        zram=choose_zram(parsed, device),
        repeats=choose_repeats(parsed),
        sections=tuple(parsed.only or sections),
        quick=parsed.quick,
        json_path=parsed.json,
        deadline_s=parsed.deadline_s,
        budget_s=parsed.budget_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save",
        description="Write raw bytes and a model through headrace and its peers, save in the "
        "background, and read in stream order; compare bytes and speed. tmpfs wants room for the "
        "raw bytes twice and the model three times.",
    )
    add = parser.add_argument
    add("--nbytes", type=parse_nbytes, help="to tmpfs (4GiB; 256MiB without a GPU)")
    add("--zram-nbytes", type=parse_nbytes, help="to the zram place (half of that)")
    add("--disk-nbytes", type=parse_nbytes, help="to the disk (a quarter of that)")
    add("--model-nbytes", type=parse_nbytes, help="model (7.85GB; 256MB without a GPU)")
    add("--stream-nbytes", type=parse_nbytes, help="read in stream order (1GiB)")
    add_shared_options(parser, SECTIONS, deadline_s=280.0, budget_s=12.0)
    return parser


def _default_sizes(device: str, quick: bool) -> tuple[int, int, int]:
    if quick:
        return 8 << 20, 6_000_000, 8 << 20
    if device == "cuda":
        return 4 << 30, 7_850_000_000, 1 << 30
    return 256 << 20, 256_000_000, 256 << 20

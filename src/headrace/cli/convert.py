"""``headrace convert``, also called ``headrace save``: a checkpoint into aligned safetensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import typer

import headrace
from headrace.cli.progress import Meter, quiet
from headrace.context import read_cufile_environment
from headrace.conversion.convert import DEFAULT_SHARD_NBYTES, convert
from headrace.conversion.outcome import Conversion
from headrace.conversion.targets import is_file_target
from headrace.options import Options
from headrace.saving import Manner


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """What to convert, and how."""

    source: str
    """A safetensors file, a directory or an index of them, or a ``.npz`` file."""
    target: str
    """A file, if it ends in ``.safetensors``, else a directory."""
    manner: Manner = field(default_factory=lambda: Manner(align=True))
    """How to write."""
    max_shard_nbytes: int = DEFAULT_SHARD_NBYTES
    """Most bytes of tensors in a shard of a directory."""
    verify: bool = False
    """Compare what is read with the checksums that the source stores; new ones imply it."""
    options: Options = field(default_factory=Options)
    """How transfers are made."""


def collect(request: ConvertRequest, meter: Meter = quiet) -> Conversion:
    """Convert.

    Raises
    ------
    HeadraceError, OSError, ValueError, ImportError
        As `headrace.conversion.convert.convert` does.
    """
    progress = None
    if meter is not quiet:

        def show(done: headrace.Progress) -> None:
            meter(request.source, done.nbytes, done.total_nbytes)

        progress = show
    meter(request.source, 0, 0)
    with headrace.Context(request.options, cufile_environment=read_cufile_environment()) as context:
        return convert(
            request.source,
            request.target,
            manner=request.manner,
            max_shard_nbytes=request.max_shard_nbytes,
            verify=request.verify,
            progress=progress,
            context=context,
        )


def check_shard_size(target: str, nbytes: int | None) -> int:
    """Most bytes of a shard; None for the default.

    Raises
    ------
    typer.BadParameter
        There are no shards, or it is no size for one.
    """
    if nbytes is None:
        return DEFAULT_SHARD_NBYTES
    if is_file_target(target):
        raise typer.BadParameter(f"--max-shard is for a directory, and {target} is one file")
    if nbytes < 1:
        raise typer.BadParameter(f"--max-shard is {nbytes} bytes; it must be 1 or more")
    return nbytes

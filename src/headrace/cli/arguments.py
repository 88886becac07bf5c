"""Arguments that several commands share: their types, their checks and their help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from headrace.options import Options, Policy, Reuse
from headrace.types import Route, parse_device

ROUTES = ("auto", *(str(route) for route in Route))
"""What ``--route`` accepts."""
FRAMEWORKS = ("numpy", "torch", "cupy")
"""What ``--framework`` accepts."""
POLICIES: tuple[Policy, ...] = get_args(Policy)
"""What ``--policy`` accepts."""
REUSES: tuple[Reuse, ...] = get_args(Reuse)
"""What ``--reuse`` accepts."""

_Text = TypeVar("_Text", bound=str)

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)


def parse_size(value: object) -> int:
    """Read a number of bytes.

    Parameters
    ----------
    value
        An integer, or text: ``"4096"``, ``"4MiB"``, ``"4M"`` (the same, as in fio and dd),
        ``"4MB"`` (4 000 000), ``"1.5GiB"``.

    Raises
    ------
    typer.BadParameter
        The text is no size.
    """
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise typer.BadParameter(f"{value!r} is not a size such as 4096, 4MiB or 1.5GB")
    number, prefix, suffix = match.groups()
    base = 1000 if suffix.lower() == "b" else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))


def device_name(value: str) -> str:
    """Check a device name; `typer.BadParameter` when it names none."""
    try:
        parse_device(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value


def route_name(value: str) -> str:
    """Check a route; `typer.BadParameter` when there is no such route."""
    return _one_of(ROUTES, value)


def framework_name(value: str) -> str:
    """Check a framework; `typer.BadParameter` when headrace has no namespace for it."""
    return _one_of(FRAMEWORKS, value)


def policy_name(value: str) -> Policy:
    """Check a policy; `typer.BadParameter` when there is no such policy."""
    return _one_of(POLICIES, value)


def reuse_name(value: str) -> Reuse:
    """Check a reuse; `typer.BadParameter` when there is no such reuse."""
    return _one_of(REUSES, value)


def _one_of(choices: tuple[_Text, ...], value: str) -> _Text:
    for choice in choices:
        if choice == value:
            return choice
    raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")


def make_options(
    workers: int | None,
    block_nbytes: int | None,
    pinned_nbytes: int | None,
    policy: str,
    reuse: str,
    strict: bool,
    mapped_nbytes: int | None = None,
) -> Options:
    """Options of a transfer from the command line's; None keeps a default.

    Raises
    ------
    typer.BadParameter
        A value is out of the range that `headrace.Options` names.
    """
    defaults = Options()
    try:
        return Options(
            workers=workers,
            block_nbytes=defaults.block_nbytes if block_nbytes is None else block_nbytes,
            pinned_nbytes=defaults.pinned_nbytes if pinned_nbytes is None else pinned_nbytes,
            policy=policy_name(policy),
            reuse=reuse_name(reuse),
            strict=strict,
            mapped_nbytes=mapped_nbytes or 0,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        parser=device_name,
        metavar="cpu|cuda|cuda:N",
        help="Where the bytes go. Default: cuda if there is one that torch or cupy can use.",
    ),
]
RouteOption = Annotated[
    str,
    typer.Option(
        "--route",
        parser=route_name,
        metavar="|".join(ROUTES),
        help="Way of the bytes; a forced route that cannot serve is an error.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Log to standard error, with a traceback on failure.")
]
FrameworkOption = Annotated[
    str | None,
    typer.Option(
        "--framework",
        parser=framework_name,
        metavar="|".join(FRAMEWORKS),
        help="Whose arrays. Default: numpy for the cpu; for a GPU torch, else cupy.",
    ),
]
SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="safetensors file, directory or index; .npy; with --raw any file. Each is one load.",
    ),
]
SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="safetensors file, directory or index; or .npy.")
]
PathArgument = Annotated[
    str | None,
    typer.Argument(metavar="PATH", help="File or folder whose volume is looked at too."),
]
NamesOption = Annotated[
    list[str] | None,
    typer.Option("--names", metavar="NAME|GLOB", help="Only these tensors; repeatable."),
]
RawOption = Annotated[bool, typer.Option("--raw", help="Take files as plain bytes.")]
LoadRepeatOption = Annotated[int, typer.Option("--repeat", min=1, help="Loads of each source.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Most threads of one transfer.")
]
BlockOption = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        parser=parse_size,
        metavar="SIZE",
        help="Bytes per read or write. Default: 4MiB.",
    ),
]
MappedOption = Annotated[
    int | None,
    typer.Option(
        "--mapped",
        parser=parse_size,
        metavar="SIZE",
        help="Most resident file bytes that stay registered with the GPU between loads. "
        "Default: 0.",
    ),
]
PinnedOption = Annotated[
    int | None,
    typer.Option(
        "--pinned",
        parser=parse_size,
        metavar="SIZE",
        help="Most page-locked memory. Default: 256MiB.",
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy", parser=policy_name, metavar="|".join(POLICIES), help="What to spend less of."
    ),
]
ReuseOption = Annotated[
    str,
    typer.Option(
        "--reuse",
        parser=reuse_name,
        metavar="|".join(REUSES),
        help="Whether the page cache should keep the bytes: once, no; many, yes.",
    ),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Fail rather than take a second-choice route.")
]
ConvertSourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="safetensors file, directory or index; or .npz.")
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A file, if it ends in .safetensors; else a directory for shards and an index.",
    ),
]
MaxShardOption = Annotated[
    int | None,
    typer.Option(
        "--max-shard",
        parser=parse_size,
        metavar="SIZE",
        help="Most bytes of tensors in a shard of a directory. Default: 5GB.",
    ),
]
NoAlignOption = Annotated[
    bool, typer.Option("--no-align", help="Leave out the padding and order that speed up loads.")
]
ChecksumOption = Annotated[
    bool,
    typer.Option(
        "--checksum",
        help="Store a checksum of each tensor, and --verify SOURCE (extra: checksum).",
    ),
]
NoFsyncOption = Annotated[
    bool, typer.Option("--no-fsync", help="Do not wait until storage has the new files.")
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify", help="Compare what is read with the checksums that it stores, if it does."
    ),
]
TensorsOption = Annotated[bool, typer.Option("--tensors", help="List the tensors too.")]
SizeOption = Annotated[
    int,
    typer.Option(
        "--size", parser=parse_size, metavar="SIZE", show_default="256MiB", help="Size of the file."
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="PATH",
        help="Where the temporary folder goes. Default: the system's place for them.",
    ),
]
DemoRepeatOption = Annotated[
    int, typer.Option("--repeat", min=1, help="Timed runs of each method in each state.")
]

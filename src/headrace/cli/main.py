"""The ``headrace`` command: its commands, its exit statuses and its one error handler."""

from __future__ import annotations

import io
import json
import sys
from typing import Annotated, Any

import typer

import headrace
from headrace.cli import arguments as arg
from headrace.cli.failure import report_failure
from headrace.cli.progress import show_progress

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names are bytes: one that is not UTF-8 must not stop the report on it.
            stream.reconfigure(errors="backslashreplace")
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def _headrace(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 (its callback acts)
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Version, and exit."),
    ] = False,
    debug: arg.DebugOption = False,
) -> None:
    """Carry bytes from storage to host or GPU memory by the fastest route, and say which."""
    context.obj = debug


@app.command()
def demo(
    context: typer.Context,
    size: arg.SizeOption = 256 << 20,
    folder: arg.FolderOption = None,
    device: arg.DeviceOption = None,
    repeat: arg.DemoRepeatOption = 3,
    as_json: arg.JsonOption = False,
    debug: arg.DebugOption = False,
) -> None:
    """Load a file in every way that this machine has, beside what people do today."""
    from headrace.cli import demo as command
    from headrace.cli.demo_model import SMALLEST_NBYTES

    if size < SMALLEST_NBYTES:
        raise typer.BadParameter(f"--size is {size} bytes; it must be at least 1MiB")
    with report_failure(debug or context.obj):
        request = command.DemoRequest(size, folder, device, repeat)
        with show_progress(rate=False) as meter:
            result = command.collect(request, meter)
        _show(as_json, result.to_dict(), "demo", result)
        command.require_right_bytes(result)


@app.command()
def load(
    context: typer.Context,
    sources: arg.SourcesArgument,
    device: arg.DeviceOption = None,
    framework: arg.FrameworkOption = None,
    route: arg.RouteOption = "auto",
    names: arg.NamesOption = None,
    raw: arg.RawOption = False,
    verify: arg.VerifyOption = False,
    repeat: arg.LoadRepeatOption = 1,
    workers: arg.WorkersOption = None,
    block_size: arg.BlockOption = None,
    pinned: arg.PinnedOption = None,
    mapped: arg.MappedOption = None,
    policy: arg.PolicyOption = "speed",
    reuse: arg.ReuseOption = "auto",
    strict: arg.StrictOption = False,
    as_json: arg.JsonOption = False,
    debug: arg.DebugOption = False,
) -> None:
    """Load weights or arrays, and say which way the bytes went and why."""
    from headrace.cli import load as command

    options = arg.make_options(workers, block_size, pinned, policy, reuse, strict, mapped)
    with report_failure(debug or context.obj):
        request = command.LoadRequest(
            tuple(sources),
            device,
            framework,
            route,
            tuple(names or ()),
            raw,
            repeat,
            options,
            verify,
        )
        with show_progress() as meter:
            result = command.collect(request, meter)
        _show(as_json, result.to_json(), "load", result)


@app.command()
def convert(
    context: typer.Context,
    source: arg.ConvertSourceArgument,
    target: arg.TargetArgument,
    max_shard: arg.MaxShardOption = None,
    no_align: arg.NoAlignOption = False,
    checksum: arg.ChecksumOption = False,
    no_fsync: arg.NoFsyncOption = False,
    verify: arg.VerifyOption = False,
    route: arg.RouteOption = "auto",
    workers: arg.WorkersOption = None,
    block_size: arg.BlockOption = None,
    policy: arg.PolicyOption = "speed",
    reuse: arg.ReuseOption = "auto",
    strict: arg.StrictOption = False,
    as_json: arg.JsonOption = False,
    debug: arg.DebugOption = False,
) -> None:
    """Copy a checkpoint into aligned safetensors, bit for bit: headrace save is the same command.

    TARGET appears, or is replaced, whole or not at all, also where it is SOURCE itself. Tensors and
    their metadata are copied, no other files. Host memory holds 1 GiB of tensors at a time, or the
    largest tensor.
    """
    from headrace.cli import convert as command
    from headrace.saving import Manner

    options = arg.make_options(workers, block_size, None, policy, reuse, strict)
    max_shard_nbytes = command.check_shard_size(target, max_shard)
    manner = Manner(not no_align, checksum, not no_fsync, route)
    with report_failure(debug or context.obj):
        request = command.ConvertRequest(source, target, manner, max_shard_nbytes, verify, options)
        with show_progress() as meter:
            result = command.collect(request, meter)
        _show(as_json, result.to_dict(), "conversion", result)


app.command("save", help="Another name of headrace convert, with the same options.")(convert)


@app.command()
def explain(
    context: typer.Context,
    source: arg.SourceArgument,
    device: arg.DeviceOption = None,
    route: arg.RouteOption = "auto",
    names: arg.NamesOption = None,
    raw: arg.RawOption = False,
    tensors: arg.TensorsOption = False,
    as_json: arg.JsonOption = False,
    debug: arg.DebugOption = False,
) -> None:
    """Say what a load would do, and why; reads headers and facts, no payload."""
    from headrace.cli import explain as command

    with report_failure(debug or context.obj):
        request = command.ExplainRequest(source, device, route, raw, tuple(names or ()))
        result = command.collect(request)
        _show(as_json, result.to_dict(), "explanation", result, tensors=tensors)


@app.command()
def doctor(
    context: typer.Context,
    path: arg.PathArgument = None,
    as_json: arg.JsonOption = False,
    debug: arg.DebugOption = False,
) -> None:
    """Say what this machine, and the volume under PATH, can do, and what would change it."""
    from headrace.cli import doctor as command
    from headrace.cli import render

    with report_failure(debug or context.obj):
        diagnosis = command.collect(command.DoctorRequest(path))
        if as_json:
            typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
        else:
            command.render(diagnosis, render.make_console())
    if not diagnosis.works:
        raise typer.Exit(1)


def _show(as_json: bool, document: Any, kind: str, result: Any, **how: Any) -> None:
    """Print a result: one JSON document, or tables."""
    try:
        if as_json:
            typer.echo(json.dumps(document, indent=2))
            return
        from headrace.cli import render

        getattr(render, f"render_{kind}")(result, render.make_console(), **how)
    except BrokenPipeError:
        raise
    except OSError as error:  # the result is there, and only cannot be shown
        error.filename = error.filename or "standard output"
        raise

"""Stream order on a real GPU: a stream that is held up, and what comes before and after."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

import headrace as hr
from tests.support import TIMEOUT_S, folder_with_direct, run_python

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE = 24 * MIB + 4096
DELAY = 200_000_000
"""Clock cycles of a GPU: a tenth of a second."""
LONG_DELAY = 10 * DELAY

each_way = pytest.mark.parametrize("submit", [False, True], ids=["now", "submitted"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = folder_with_direct(tmp_path_factory.mktemp("order")) / "file"
    made.write_bytes(os.urandom(SIZE))
    return made


@pytest.fixture(scope="module")
def expected(path: Path) -> torch.Tensor:
    """The file's bytes; and every kernel that the tests need is loaded, which waits for the GPU."""
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).cuda()
    torch.cuda._sleep(1)
    assert torch.equal(content.clone().fill_(1), torch.ones_like(content))
    torch.cuda.synchronize()
    return content


@pytest.fixture
def context() -> Iterator[hr.Context]:
    with hr.Context(hr.Options(mapped_nbytes=2 << 30)) as made:
        yield made


@pytest.fixture
def plain() -> Iterator[hr.Context]:
    """A context that keeps no registrations."""
    with hr.Context() as made:
        yield made


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def hold(stream: torch.cuda.Stream, buffer: torch.Tensor, value: int) -> None:
    """Queue a delay, and then work that overwrites a buffer."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        buffer.fill_(value)
    assert not stream.query()


def same(buffer: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare on a stream that has waited for nothing."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return bool(torch.equal(buffer, expected))


def read(context: hr.Context, submit: bool, buffer: Any, path: Path, **arguments: Any) -> hr.Report:
    if submit:
        return context.submit_read(buffer, path, **arguments).result(TIMEOUT_S)
    return hr.read_into(buffer, path, context=context, **arguments)


@each_way
@pytest.mark.parametrize("route", ["cached", "direct", "mapped", "auto"])
def test_read_comes_after_what_is_queued(
    plain: hr.Context,
    side: torch.cuda.Stream,
    path: Path,
    expected: torch.Tensor,
    route: str,
    submit: bool,
) -> None:
    buffer = torch.zeros_like(expected)
    torch.cuda.synchronize()
    hold(side, buffer, 7)
    read(plain, submit, buffer, path, route=route, stream=side)
    assert same(buffer, expected)
    torch.cuda.synchronize()
    assert same(buffer, expected)


@each_way
@pytest.mark.parametrize("route", ["cached", "direct", "mapped"])
def test_read_without_a_stream_comes_after_what_torch_has_queued(
    plain: hr.Context,
    side: torch.cuda.Stream,
    path: Path,
    expected: torch.Tensor,
    route: str,
    submit: bool,
) -> None:
    buffer = torch.zeros_like(expected)
    torch.cuda.synchronize()
    hold(side, buffer, 7)
    with torch.cuda.stream(side):
        read(plain, submit, buffer, path, route=route)
    assert same(buffer, expected)
    torch.cuda.synchronize()
    assert same(buffer, expected)


@pytest.mark.parametrize("route", ["cached", "direct"])
def test_submitted_read_does_not_wait_for_what_is_queued_later(
    plain: hr.Context, side: torch.cuda.Stream, path: Path, expected: torch.Tensor, route: str
) -> None:
    buffer = torch.zeros_like(expected)
    torch.cuda.synchronize()
    hold(side, buffer, 7)
    future = plain.submit_read(buffer, path, route=route, stream=side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_DELAY)
    future.result(TIMEOUT_S)
    assert not side.query()
    assert same(buffer, expected)
    torch.cuda.synchronize()


@each_way
@pytest.mark.parametrize("route", ["cached", "direct", "auto"])
def test_write_takes_what_is_queued_before(
    plain: hr.Context, side: torch.cuda.Stream, tmp_path: Path, route: str, submit: bool
) -> None:
    buffer = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    target = folder_with_direct(tmp_path) / "new"
    for with_stream, value in ((True, 7), (False, 9)):
        hold(side, buffer, value)
        arguments: dict[str, Any] = {"route": route} | ({"stream": side} if with_stream else {})
        with contextlib.nullcontext() if with_stream else torch.cuda.stream(side):
            if submit:
                plain.submit_write(buffer, target, **arguments).result(TIMEOUT_S)
            else:
                hr.write_from(buffer, target, context=plain, **arguments)
        assert target.read_bytes() == bytes([value]) * SIZE


def test_default_stream_orders_a_read(
    plain: hr.Context, path: Path, expected: torch.Tensor
) -> None:
    buffer = torch.zeros_like(expected)
    for stream in (0, torch.cuda.default_stream()):
        hold(torch.cuda.default_stream(), buffer, 7)
        hr.read_into(buffer, path, stream=stream, context=plain)
        assert same(buffer, expected)
        torch.cuda.synchronize()
        assert same(buffer, expected)


def test_host_memory_waits_for_the_stream(
    plain: hr.Context, side: torch.cuda.Stream, tmp_path: Path
) -> None:
    device = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    host = torch.zeros(SIZE, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    hold(side, device, 7)
    with torch.cuda.stream(side):
        host.copy_(device, non_blocking=True)
    hr.write_from(host, tmp_path / "new", stream=side, context=plain)
    assert (tmp_path / "new").read_bytes() == bytes([7]) * SIZE


# Kept registrations.


def warm_up(context: hr.Context, path: Path, side: torch.cuda.Stream) -> None:
    buffer = torch.empty(path.stat().st_size, dtype=torch.uint8, device="cuda")
    path.read_bytes()  # so that it is resident
    for _ in range(2):
        report = hr.read_into(buffer, path, stream=side, context=context)
    side.synchronize()
    assert [str(each.route) for each in report.observed] == ["mapped"]
    assert "not waited for" in report.observed[0].evidence


def test_kept_read_returns_while_the_stream_is_held_and_later_work_sees_the_bytes(
    context: hr.Context, side: torch.cuda.Stream, path: Path, expected: torch.Tensor
) -> None:
    warm_up(context, path, side)
    buffer = torch.zeros_like(expected)
    with torch.cuda.stream(side):
        seen = torch.zeros_like(expected)
    torch.cuda.synchronize()
    hold(side, buffer, 7)
    hr.read_into(buffer, path, stream=side, context=context)
    assert not side.query()
    with torch.cuda.stream(side):
        seen.copy_(buffer)
        buffer.fill_(9)
    assert not side.query()
    side.synchronize()
    assert same(seen, expected)
    assert bool((buffer == 9).all())


def test_closing_waits_for_the_copies_of_a_kept_read(
    side: torch.cuda.Stream, path: Path, expected: torch.Tensor
) -> None:
    buffer = torch.zeros_like(expected)
    with hr.Context(hr.Options(mapped_nbytes=2 << 30)) as context:
        warm_up(context, path, side)
        hold(side, buffer, 7)
        hr.read_into(buffer, path, stream=side, context=context)
        assert not side.query()
    assert same(buffer, expected)


def test_submitted_read_from_kept_registrations_is_complete(
    context: hr.Context, side: torch.cuda.Stream, path: Path, expected: torch.Tensor
) -> None:
    warm_up(context, path, side)
    buffer = torch.zeros_like(expected)
    torch.cuda.synchronize()
    hold(side, buffer, 7)
    context.submit_read(buffer, path, stream=side).result(TIMEOUT_S)
    assert same(buffer, expected)


HOW_SOON = """
import sys, time
import torch
import headrace as hr

path = sys.argv[1]
buffer, side = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
kept, submitted = [], []
with hr.Context(hr.Options(mapped_nbytes=2 << 30)) as context:
    for _ in range(30):
        began = time.perf_counter()
        hr.read_into(buffer, path, stream=side, context=context)
        kept.append(time.perf_counter() - began)
        side.synchronize()
        began = time.perf_counter()
        future = context.submit_read(buffer, path, stream=side)
        submitted.append(time.perf_counter() - began)
        future.result(60)
print(min(kept), min(submitted))
"""


def test_kept_read_and_submitting_return_within_a_millisecond(tmp_path: Path) -> None:
    """In a process of its own: caches that other tests have filled would be measured here."""
    path = tmp_path / "GiB"
    block = os.urandom(64 * MIB)
    with path.open("wb") as file:
        for _ in range(16):
            file.write(block)
    kept, submitted = map(float, run_python(HOW_SOON, str(path)).split())
    assert (kept < 0.001, submitted < 0.001) == (True, True), (kept, submitted)


# CuPy.


@each_way
@pytest.mark.parametrize("kept", [False, True], ids=["cached", "kept"])
def test_streams_of_cupy_order_reads(path: Path, kept: bool, submit: bool) -> None:
    cupy = pytest.importorskip("cupy")
    side = cupy.cuda.Stream(non_blocking=True)
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles)'
        "{ long long began = clock64(); while (clock64() - began < cycles) {} }",
        "spin",
    )
    expected = cupy.asarray(np.fromfile(path, np.uint8))
    buffer, seen = cupy.zeros_like(expected), cupy.zeros_like(expected)
    with side:
        spin((1,), (1,), (1,))
        buffer.fill(1)
        cupy.copyto(seen, buffer)
    cupy.cuda.Device().synchronize()
    with hr.Context(hr.Options(mapped_nbytes=(2 << 30) if kept else 0)) as context:
        for stream in (side, None, side):
            with side:
                spin((1,), (1,), (DELAY,))
                buffer.fill(7)
                read(context, submit, buffer, path, stream=stream)
                cupy.copyto(seen, buffer)
            side.synchronize()
            assert bool((seen == expected).all())
            assert bool((buffer == expected).all())

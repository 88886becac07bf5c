"""The real cuFile on a real GPU, over the testbed of ``scripts/zram-testbed``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings.cufile")

from headrace.bindings.cuda import LEGACY_STREAM, CudaRuntime
from headrace.bindings.cufile_probe import probe_cufile
from headrace.bindings.cufile_values import BatchEvent, BatchRequest
from headrace.engines.base import Cargo, Stats
from headrace.engines.gds import GdsEngine
from headrace.engines.gds_session import GdsLease, process_session
from headrace.engines.lanes import Lanes
from headrace.errors import DeviceError, RouteUnavailable, ShortRead
from headrace.memory.buffer import Buffer, buffer_from
from headrace.planning.plan import Piece, Transfer
from headrace.types import Route
from tests.support import never_asked, open_source, run_python, write_random
from tests.testbed import mounted_testbed, run_testbed

pytestmark = [pytest.mark.gpu, pytest.mark.root]

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted_testbed(tmp_path_factory.mktemp("gds")) as mount:
        yield mount


@pytest.fixture(scope="module")
def content(folder: Path) -> bytes:
    return write_random(folder / "file", 100 * MIB + 777)


@pytest.fixture(scope="module")
def lease(folder: Path) -> Iterator[GdsLease]:
    lease = process_session().lease()
    yield lease
    lease.close()


def _tensor(nbytes: int) -> Any:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cuda")


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.cpu().numpy())


def _run(
    lease: GdsLease, path: Path, buffer: Buffer, pieces: list[Piece], **options: Any
) -> tuple[GdsEngine, Stats]:
    cuda = CudaRuntime()
    lanes = Lanes(cuda)
    engine = GdsEngine(lease.cufile, cuda, lanes, **options)
    transfers = [Transfer(0, Route.GDS, "", tuple(pieces))]
    fence = lanes.fence(0, (buffer.stream or LEGACY_STREAM,))
    with open_source(path) as source:
        try:
            return engine, engine.run(Cargo(transfers, [source], [buffer], 8, 4 * MIB, fence=fence))
        finally:
            lanes.forget(fence)
            lanes.close()


@pytest.mark.parametrize(
    ("file_offset", "nbytes", "into"),
    [
        (0, 64 * MIB, 0),
        (0, 100 * MIB + 777, 0),
        (4096, 4096, 4096),
        (513, 1, 3),
        (1, 40 * MIB + 13, 5),
        (100 * MIB, 777, 0),
    ],
)
def test_bytes_are_right_and_the_counters_say_which_way_they_came(
    lease: GdsLease,
    folder: Path,
    content: bytes,
    file_offset: int,
    nbytes: int,
    into: int,
) -> None:
    tensor = _tensor(into + nbytes + 9)
    buffer = buffer_from(tensor, never_asked)
    before = lease.cufile.read_counters()
    pieces = [Piece(file_offset, nbytes, 0, into)]
    engine, stats = _run(lease, folder / "file", buffer, pieces)
    after = lease.cufile.read_counters()
    got = _bytes(tensor)
    assert got[into : into + nbytes] == content[file_offset : file_offset + nbytes]
    assert set(got[:into] + got[into + nbytes :]) == {0xA5}
    assert before is not None
    assert after is not None
    done = after - before
    assert done.posix_reads
    assert (done.p2p_reads, done.nvfs_reads) == (0, 0)
    assert done.read_nbytes == nbytes
    assert engine.compatibility
    assert stats.evidence.startswith("gds (cuFile compatibility mode)")


def test_many_pieces_with_gaps_land_in_their_places(
    lease: GdsLease, folder: Path, content: bytes
) -> None:
    pieces = [Piece(n * 300_007, 200_001, 0, n * 200_003) for n in range(100)]
    tensor = _tensor(100 * 200_003)
    _run(lease, folder / "file", buffer_from(tensor, never_asked), pieces)
    got = _bytes(tensor)
    for piece in pieces:
        stop = piece.buffer_offset + piece.nbytes
        assert got[piece.buffer_offset : stop] == content[piece.file_offset : piece.file_stop]


def test_registered_buffer_gets_the_same_bytes_and_is_forgotten_with_its_tensor(
    lease: GdsLease, folder: Path, content: bytes
) -> None:
    tensor = _tensor(64 * MIB)
    buffer, registrations = buffer_from(tensor, never_asked), lease.registrations
    with registrations.borrow(tensor.data_ptr(), 64 * MIB, tensor) as held:
        assert held, registrations.failure
        _run(lease, folder / "file", buffer, [Piece(5, 64 * MIB, 0, 0)])
    assert _bytes(tensor) == content[5 : 5 + 64 * MIB]
    assert registrations.nbytes == 64 * MIB
    del tensor, buffer
    assert registrations.nbytes == 0


def test_work_of_the_buffers_stream_comes_first(
    lease: GdsLease, folder: Path, content: bytes
) -> None:
    tensor = _tensor(64 * MIB)
    for _ in range(50):
        tensor.add_(1)
    buffer = buffer_from(tensor, never_asked)
    _run(lease, folder / "file", buffer, [Piece(0, 64 * MIB, 0, 0)])
    assert _bytes(tensor) == content[: 64 * MIB]


def test_past_the_end_the_count_is_short_and_the_engine_says_so(
    lease: GdsLease, folder: Path, content: bytes
) -> None:
    tensor = _tensor(MIB)
    fd = os.open(folder / "file", os.O_RDONLY | os.O_DIRECT)
    handle = lease.cufile.register_handle(fd)
    pointer = tensor.data_ptr()
    assert lease.cufile.read(handle, pointer, MIB, 100 * MIB) == 777
    assert lease.cufile.read(handle, pointer, MIB, 101 * MIB) == 0
    lease.cufile.deregister_handle(handle)
    os.close(fd)
    buffer = buffer_from(tensor, never_asked)
    with pytest.raises(ShortRead):
        _run(lease, folder / "file", buffer, [Piece(100 * MIB, 778, 0, 0)])


def test_strict_does_not_take_compatibility_mode(lease: GdsLease, folder: Path) -> None:
    buffer = buffer_from(_tensor(MIB), never_asked)
    with pytest.raises(RouteUnavailable, match="compatibility mode"):
        _run(lease, folder / "file", buffer, [Piece(0, MIB, 0, 0)], strict=True)


def test_write_batch_and_stream_order_move_the_right_bytes(lease: GdsLease, folder: Path) -> None:
    cufile, cuda, path = lease.cufile, CudaRuntime(), folder / "written"
    tensor = torch.arange(MIB, device="cuda").to(torch.uint8)
    torch.cuda.synchronize()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    handle = cufile.register_handle(fd)
    assert cufile.write(handle, tensor.data_ptr(), MIB, 0) == MIB
    other = _tensor(MIB)
    torch.cuda.synchronize()
    half = MIB // 2
    batch = cufile.create_batch(2)
    cufile.submit_batch(
        batch,
        [BatchRequest(handle, other.data_ptr(), half, n * half, n * half) for n in range(2)],
    )
    events: list[BatchEvent] = []
    while len(events) < 2:
        events += cufile.batch_events(batch, 1, 5.0)
    assert [event.result() for event in events] == [half, half]
    cufile.destroy_batch(batch)
    assert torch.equal(tensor, other)
    other.zero_()
    torch.cuda.synchronize()
    stream = cuda.create_stream()
    cufile.register_stream(stream)
    count = cufile.read_async(handle, other.data_ptr(), MIB, 0, stream)
    cuda.synchronize_stream(stream)
    assert count.result() == MIB
    assert torch.equal(tensor, other)
    cufile.deregister_stream(stream)
    cuda.destroy_stream(stream)
    cufile.deregister_handle(handle)
    os.close(fd)


def test_buffer_registered_twice_is_told_apart(lease: GdsLease) -> None:
    tensor = _tensor(MIB)
    lease.cufile.register_buffer(tensor.data_ptr(), MIB)
    with pytest.raises(DeviceError, match="5023"):
        lease.cufile.register_buffer(tensor.data_ptr(), MIB)
    lease.cufile.deregister_buffer(tensor.data_ptr())


_LIFE = """
import os, sys
from headrace.engines.gds_session import process_session
from headrace.errors import RouteUnavailable

stdin, here = os.fstat(0), sorted(os.listdir("."))
session = process_session()
first, second = session.lease(), session.lease()
assert os.fstat(0) == stdin
child = os.fork()
if not child:
    try:
        session.lease()
    except RouteUnavailable as error:
        os._exit(0 if "forked" in str(error) else 3)
    os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
first.close()
second.close()
session.lease().close()
assert os.fstat(0) == stdin
assert sorted(os.listdir(".")) == here
print("alive")
"""


def test_driver_opens_twice_and_again_keeps_descriptor_0_and_leaves_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(__file__).parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", f"{source}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    assert run_python(_LIFE, timeout_s=120) == "alive\n"
    assert os.listdir(tmp_path) == []


def test_probe_in_a_child_reads_a_page_and_knows_the_way(folder: Path, content: bytes) -> None:
    found = probe_cufile(str(folder / "file"), device=0, timeout_s=60)
    assert found.works, found.why
    assert found.served == "posix"


def test_without_a_udev_record_the_reason_names_it(folder: Path, content: bytes) -> None:
    run_testbed("hide", str(folder))
    try:
        found = probe_cufile(str(folder / "file"), device=0, timeout_s=60)
    finally:
        run_testbed("show", str(folder))
    assert not found.works
    assert "udev" in found.why
    assert "5027" in found.why

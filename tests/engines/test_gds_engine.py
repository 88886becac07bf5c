from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bindings.cuda import LEGACY_STREAM
from headrace.bindings.cufile_errors import CuFileError
from headrace.engines.base import Cargo, Stats
from headrace.engines.gds import GdsEngine
from headrace.engines.gds_session import GdsSession
from headrace.engines.lanes import Lanes
from headrace.errors import HeadraceError, RouteUnavailable, ShortRead, SourceChanged
from headrace.memory.buffer import Buffer
from headrace.planning.plan import Piece, Transfer
from headrace.storage.source import Source
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.testing.fake_cuda import POISON
from headrace.testing.fake_cufile import FakeCuFile
from headrace.types import Device, Route
from tests.support import no_workers_left, write_random

BLOCK = 4096
MIB = 1 << 20


@dataclass(slots=True)
class Rig:
    """An engine for one file, and what it stands on."""

    path: Path
    files: FaultyFiles = field(default_factory=FaultyFiles)
    cuda: FakeCuda = field(default_factory=FakeCuda)
    options: Mapping[str, Any] = field(default_factory=dict)
    register: bool = False
    device: int = 0
    engine: GdsEngine | None = None
    cufile: FakeCuFile = field(init=False)

    def __post_init__(self) -> None:
        self.cufile = FakeCuFile(self.cuda, self.files)

    def array(self, nbytes: int, stream: int | None = None) -> FakeDeviceArray:
        return FakeDeviceArray(self.cuda, nbytes, self.device, stream)

    def run(
        self, array: FakeDeviceArray, pieces: list[Piece], *, workers: int = 3, block: int = BLOCK
    ) -> Stats:
        """Move pieces into one array, and check that nothing is left behind."""
        pointer, device = array.pointer, Device("cuda", self.device)
        buffer = Buffer(pointer, array.nbytes, device, array, array.stream)
        source, lanes = Source(str(self.path), self.files), Lanes(self.cuda)
        with contextlib.suppress(OSError):  # as it is found by an engine
            source.open_direct()
        lease = GdsSession(self.cufile).lease()
        registrations = lease.registrations if self.register else None
        self.engine = GdsEngine(
            lease.cufile, self.cuda, lanes, registrations=registrations, **self.options
        )
        transfers = [Transfer(0, Route.GDS, "", tuple(pieces))]
        fence = lanes.fence(self.device, (buffer.stream or LEGACY_STREAM,))
        try:
            return self.engine.run(
                Cargo(transfers, [source], [buffer], workers, block, fence=fence)
            )
        finally:
            lanes.forget(fence)
            lease.close()
            lanes.close()
            source.close()
            assert (self.cufile.handles, self.cufile.buffers) == ({}, {})
            assert (self.cufile.driver_uses, self.cufile.errors, self.cuda.errors) == (0, [], [])
            assert (self.cuda.live_streams, self.cuda.live_events) == (0, 0)
            assert not self.files.open_descriptors
            assert no_workers_left()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    write_random(path, 20 * BLOCK + 7)
    return path


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[Piece], int]:
    """Draw the size of a file, pieces of it, and the size of the buffer that takes them."""
    pieces, file_offset, buffer_offset = [], draw(st.integers(0, 5000)), draw(st.integers(0, 9))
    for _ in range(draw(st.integers(1, 4))):
        nbytes = draw(st.integers(1, 3 * BLOCK))
        pieces.append(Piece(file_offset, nbytes, 0, buffer_offset))
        file_offset += nbytes + draw(st.integers(0, BLOCK))
        buffer_offset += nbytes + draw(st.integers(0, 9))
    return file_offset, pieces, buffer_offset


@settings(deadline=None, max_examples=60)
@given(
    layout=layouts(),
    short=st.sampled_from([None, 1000, BLOCK]),
    workers=st.integers(1, 4),
    mode=st.sampled_from(["p2p", "nvfs", "compat"]),
    register=st.booleans(),
)
def test_pieces_arrive_and_nothing_beside_them_changes(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[int, list[Piece], int],
    short: int | None,
    workers: int,
    mode: Any,
    register: bool,
) -> None:
    file_nbytes, pieces, buffer_nbytes = layout
    path = tmp_path_factory.getbasetemp() / "pieces"
    content = write_random(path, file_nbytes)
    rig = Rig(path, register=register, options={"request_nbytes": 2 * BLOCK})
    rig.cufile.mode, rig.cufile.short_reads = mode, short
    array = rig.array(buffer_nbytes)
    stats = rig.run(array, pieces, workers=workers)
    expected = bytearray([POISON]) * buffer_nbytes
    for piece in pieces:
        stop = piece.buffer_offset + piece.nbytes
        expected[piece.buffer_offset : stop] = content[piece.file_offset : piece.file_stop]
    assert array.tobytes() == expected
    assert stats.nbytes == sum(piece.nbytes for piece in pieces)
    assert rig.engine is not None
    assert rig.engine.compatibility is (mode == "compat")


@pytest.mark.parametrize(
    ("mode", "told", "compatibility"),
    [
        ("p2p", "5 p2p, 0 nvfs, 0 posix, 0 unaligned reads", False),
        ("nvfs", "0 p2p, 5 nvfs, 0 posix, 0 unaligned reads", False),
        ("compat", "0 p2p, 0 nvfs, 5 posix, 0 unaligned reads", True),
    ],
)
def test_evidence_is_what_the_statistics_say(
    path: Path, mode: Any, told: str, compatibility: bool
) -> None:
    rig = Rig(path, options={"request_nbytes": 4 * BLOCK})
    rig.cufile.mode = mode
    array = rig.array(20 * BLOCK)
    stats = rig.run(array, [Piece(0, 20 * BLOCK, 0, 0)], workers=1)
    assert rig.engine is not None
    assert f"cuFile statistics: {told}" in stats.evidence
    assert (rig.engine.compatibility, len(rig.engine.downgrades)) == (compatibility, compatibility)
    assert stats.evidence.startswith("gds (cuFile compatibility mode)") is compatibility


def test_without_statistics_the_evidence_says_that_nobody_counts(path: Path) -> None:
    rig = Rig(path)
    rig.cufile.statistics = False
    stats = rig.run(rig.array(BLOCK), [Piece(0, BLOCK, 0, 0)])
    assert "nobody counts" in stats.evidence


def test_unaligned_reads_are_counted(path: Path) -> None:
    rig = Rig(path)
    stats = rig.run(rig.array(BLOCK), [Piece(3, 100, 0, 1)])
    assert "1 unaligned" in stats.evidence


def test_strict_raises_where_cufile_reads_through_host_memory(path: Path) -> None:
    rig = Rig(path, options={"strict": True})
    rig.cufile.mode = "compat"
    with pytest.raises(RouteUnavailable, match="compatibility mode"):
        rig.run(rig.array(BLOCK), [Piece(0, BLOCK, 0, 0)])


def test_requests_are_large_but_leave_work_for_every_worker(path: Path) -> None:
    for workers, reads in ((1, 1), (4, 4), (20, 20), (30, 20)):
        rig = Rig(path)
        stats = rig.run(rig.array(20 * BLOCK), [Piece(0, 20 * BLOCK, 0, 0)], workers=workers)
        assert f"{reads} p2p" in stats.evidence


def test_large_buffers_are_registered_once_and_small_ones_never(tmp_path: Path) -> None:
    path = tmp_path / "large"
    content = write_random(path, 2 * MIB)
    for nbytes, held in ((2 * MIB, 2 * MIB), (MIB // 2, 0)):
        rig = Rig(path, register=True)
        array = rig.array(nbytes)
        rig.run(array, [Piece(0, nbytes, 0, 0)], block=BLOCK)
        assert array.tobytes() == content[:nbytes]
        assert rig.cufile.peak_registered_nbytes == held


def test_nothing_is_registered_once_all_reads_went_through_host_memory(tmp_path: Path) -> None:
    path = tmp_path / "large"
    write_random(path, 2 * MIB)
    rig = Rig(path, register=True)
    rig.cufile.mode = "compat"
    rig.run(rig.array(2 * MIB), [Piece(0, 2 * MIB, 0, 0)])
    assert rig.cufile.peak_registered_nbytes
    rig.cufile.peak_registered_nbytes = 0
    rig.run(rig.array(2 * MIB), [Piece(0, 2 * MIB, 0, 0)])
    assert not rig.cufile.peak_registered_nbytes


@pytest.mark.parametrize("code", [5016, 5036])
def test_no_room_to_register_is_a_stated_downgrade_or_strict_an_error(
    tmp_path: Path, code: int
) -> None:
    path = tmp_path / "large"
    content = write_random(path, 2 * MIB)
    rig = Rig(path, register=True)
    rig.cufile.codes["cuFileBufRegister"] = code
    array = rig.array(2 * MIB)
    rig.run(array, [Piece(0, 2 * MIB, 0, 0)])
    assert array.tobytes() == content
    assert rig.engine is not None
    (downgrade,) = rig.engine.downgrades
    assert str(code) in downgrade.why
    rig.options = {"strict": True}
    with pytest.raises(RouteUnavailable, match=str(code)):
        rig.run(array, [Piece(0, 2 * MIB, 0, 0)])


@pytest.mark.parametrize("stream", [None, 1])
def test_work_queued_before_on_the_buffers_stream_ends_before_the_first_read(
    path: Path, stream: int | None
) -> None:
    rig = Rig(path)
    own = rig.cuda.create_stream() if stream is None else stream
    array = rig.array(20 * BLOCK, own)
    rig.cuda.enqueue_on(own, lambda: array.fill(0))
    if stream is None:
        rig.cuda.enqueue_on(own, lambda: rig.cuda.destroy_stream(own))
    rig.run(array, [Piece(0, 20 * BLOCK, 0, 0)])
    assert array.tobytes() == path.read_bytes()[: 20 * BLOCK]


def test_second_device_is_served_and_the_callers_device_stays_current(path: Path) -> None:
    rig = Rig(path, cuda=FakeCuda(devices=2), device=1)
    array = rig.array(20 * BLOCK)
    rig.run(array, [Piece(0, 20 * BLOCK, 0, 0)])
    assert array.tobytes() == path.read_bytes()[: 20 * BLOCK]
    assert rig.cuda.current_device() == 0


@pytest.mark.parametrize("call", ["cuFileHandleRegister", "cuFileRead"])
@pytest.mark.parametrize("code", [5001, 5008, 5013, 5027])
def test_code_of_cufile_is_a_device_error_that_leaves_nothing_behind(
    path: Path, call: str, code: int
) -> None:
    rig = Rig(path)
    rig.cufile.codes[call] = code
    with pytest.raises((CuFileError, RouteUnavailable), match=rf"{call} failed: .*\({code}\)"):
        rig.run(rig.array(20 * BLOCK), [Piece(0, 20 * BLOCK, 0, 0)])


def test_read_error_stays_itself_with_the_name_of_the_file(path: Path) -> None:
    rig = Rig(path, FaultyFiles(eio_at=5 * BLOCK))
    with pytest.raises(OSError, match="EIO") as caught:
        rig.run(rig.array(20 * BLOCK), [Piece(0, 20 * BLOCK, 0, 0)])
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert not isinstance(caught.value, HeadraceError)


@pytest.mark.parametrize(
    "faults", [{"eintr_every": 2}, {"short_reads": 1000}, {"refuse_direct": True}], ids=str
)
def test_fault_that_can_be_overcome_changes_no_bytes(path: Path, faults: dict[str, Any]) -> None:
    rig = Rig(path, FaultyFiles(**faults))
    array = rig.array(19 * BLOCK)
    rig.run(array, [Piece(3, 19 * BLOCK, 0, 0)])
    assert array.tobytes() == path.read_bytes()[3 : 3 + 19 * BLOCK]


def test_file_that_ends_too_soon_is_a_short_read_with_both_numbers(path: Path) -> None:
    rig = Rig(path)
    with pytest.raises(ShortRead, match=rf"at byte {20 * BLOCK + 7}.* up to {30 * BLOCK} "):
        rig.run(rig.array(30 * BLOCK), [Piece(0, 30 * BLOCK, 0, 0)], workers=1)


def test_file_that_was_truncated_meanwhile_is_told_apart(path: Path) -> None:
    files = FaultyFiles(truncate_after=2 * BLOCK, to=BLOCK + 7)
    rig = Rig(path, files, options={"request_nbytes": BLOCK})
    with pytest.raises(SourceChanged, match="size went from"):
        rig.run(rig.array(20 * BLOCK), [Piece(0, 20 * BLOCK, 0, 0)], workers=1)


def test_progress_reaches_the_end(path: Path) -> None:
    rig = Rig(path)
    moved: list[int] = []
    array = rig.array(20 * BLOCK)
    source, lanes = Source(str(path), rig.files), Lanes(rig.cuda)
    lease = GdsSession(rig.cufile).lease()
    buffer = Buffer(array.pointer, array.nbytes, Device("cuda", 0), array)
    transfers = [Transfer(0, Route.GDS, "", (Piece(0, 20 * BLOCK, 0, 0),))]
    cargo = Cargo(transfers, [source], [buffer], 2, BLOCK, on_progress=moved.append)
    GdsEngine(lease.cufile, rig.cuda, lanes).run(cargo)
    assert moved[-1] == 20 * BLOCK
    lease.close()
    source.close()

"""Writing: from buffers to bytes in files, and a report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.bindings.sysfs import read_mounts
from headrace.engines.lanes import Fence
from headrace.memory.buffer import Buffer
from headrace.planning.plan import Piece, Plan, Rejection, Transfer
from headrace.planning.route import Facts
from headrace.planning.write_plan import FileToWrite, make_write_plan
from headrace.probing.machine import MachineFacts
from headrace.probing.volume import probe_volume
from headrace.progress import OnProgress
from headrace.report import Report, Snapshot, Stopwatch, make_report
from headrace.storage.sink import Sink
from headrace.transfers import Order, Transfers, first_gpu
from headrace.types import HOST, Route


@dataclass(frozen=True, slots=True)
class Delivery:
    """What to write, and where."""

    label: str
    """What people call the target, for reports."""
    sinks: Sequence[Sink]
    """Open files."""
    pieces: Sequence[tuple[Piece, ...]]
    """What goes into each: by rising file offset, not overlapping."""
    buffers: Sequence[Buffer]
    """Where the bytes are, by `Piece.buffer`; on any devices."""
    fence: Fence | None = None
    """The write comes after it; None for what is queued on the buffers' streams now."""
    finish: Callable[[], None] | None = None
    """Makes the files last; called once all bytes are written."""
    durable: bool = False
    """Whether `finish` waits until storage has them."""
    snapshot: Snapshot | None = None
    """What the buffers are a copy of."""
    watch: Stopwatch | None = None
    """What has timed the call so far; None where it begins with the write."""


class WriteTransfers(Transfers):
    """Plans writes and lets the engines do them."""

    def run(
        self, delivery: Delivery, forced: Route | None, progress: OnProgress | None
    ) -> tuple[Report, tuple[Rejection, ...]]:
        """Write everything; the report, and the downgrades to warn of.

        See `headrace.context.Context.deliver` for errors.
        """
        watch = delivery.watch or Stopwatch()
        devices = [buffer.device for buffer in delivery.buffers]
        with watch.stage("plan"):
            machine = MachineFacts(self._equipment.bindings.system)
            files = self._survey(delivery, machine, forced)
            plan = make_write_plan(files, devices, self._options, forced)
            plan = self._prepare(plan, dict.fromkeys(devices))
        with watch.stage("allocate"):
            _reserve(plan, delivery.sinks)
        with watch.stage("transfer"), self._after(delivery.fence, delivery.buffers) as fence:
            nbytes = sum(transfer.nbytes for transfer in plan.transfers)
            cargo = self._load_cargo(delivery.buffers, nbytes, machine, fence, sinks=delivery.sinks)
            order = Order(
                cargo,
                [file.facts.volume for file in files],
                forced,
                functools.partial(self._equipment.writer, forced=forced is not None),
            )
            stats, plan = self._dispatch(plan, order, progress)
            for transfer in plan.transfers:
                _check(transfer, delivery.sinks, files)
        if delivery.finish is not None:
            with watch.stage("sync"):
                delivery.finish()
        held = (self._equipment.pinned_nbytes, self._equipment.mapped_nbytes)
        where = ", ".join(dict.fromkeys(map(str, devices))) or str(HOST)
        report = make_report(delivery.label, where, plan, stats, watch, held, "write")
        report = replace(report, durable=delivery.durable, snapshot=delivery.snapshot)
        return report, plan.downgrades

    def _survey(
        self, delivery: Delivery, machine: MachineFacts, forced: Route | None
    ) -> list[FileToWrite]:
        """Gather the facts of each file."""
        probes = self._probes(first_gpu(delivery.buffers), forced)
        mounts = read_mounts(self._equipment.bindings.system)
        return [
            FileToWrite(
                pieces,
                Facts(
                    machine,
                    probe_volume(sink, mounts),
                    probes.device,
                    probes.mapping,
                    probes.probe_gds(sink.path),
                ),
            )
            for sink, pieces in zip(delivery.sinks, delivery.pieces, strict=True)
        ]


def _reserve(plan: Plan, sinks: Sequence[Sink]) -> None:
    """Have the file systems set aside what the files grow by, where they can.

    So a full disk is met before the first byte, and blocks lie together. Not where the GPU will
    write into the pages of the file itself: it has them backed as it goes.
    """
    for transfer in plan.transfers:
        sink, wanted = sinks[transfer.source], transfer.file_range
        start = max(wanted.start, sink.nbytes)
        if transfer.route is not Route.MAPPED and start < wanted.stop:
            sink.allocate(start, wanted.stop)
        sink.expect(wanted.stop)


def _check(transfer: Transfer, sinks: Sequence[Sink], files: Sequence[FileToWrite]) -> None:
    """Check that readers of the path find what was written."""
    sink, written = sinks[transfer.source], transfer.file_range
    sink.check_holds(written.stop)
    kind = files[transfer.source].facts.volume.file_system
    sink.check_whole(written.start, written.stop, kind)

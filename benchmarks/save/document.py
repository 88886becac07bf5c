"""The JSON of a run of saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.document import describe_run, scrub_document
from benchmarks.rounds import HANG_S, ONCE_S, SLOW_ROUNDS
from benchmarks.save.targets import SaveFindings, save_targets
from benchmarks.save.writing import SLOW_S

if TYPE_CHECKING:
    from benchmarks.save.run import SaveRun

METHOD = (
    "All contestants of a place run in one process, once a round; the order rotates, and every "
    "other round goes backwards. Before the first round each writes the first 256 MiB, or about "
    "so much of the model (all of it in the background), which is compared but is no reading.",
    "Every write makes a new file: the one before is deleted, which drops its pages, and the "
    "folder synced. KvikIO writes a file of 128 MiB before each of its readings, which starts its "
    "threads, since its settings change; the file is deleted before the reading.",
    "'seconds' is until the call returned, 'synced_seconds' until fsync of the file, called right "
    "after, returned too.",
    "After each write the file is read back with plain reads and compared byte for byte with the "
    "file that the bytes were loaded from, and of a model with what the official library wrote; "
    "where its layout is another (align, checksum), the official library loads it and the tensors "
    "are compared. A file left beside it is a fault.",
    "The sizes differ by place, the same for all contestants there: the disk is slow.",
    "GB/s is the payload in 10**9 bytes over wall time; CPU is user and system time of the process "
    "(getrusage) per GB until the call returned. Figures are medians of the measured rounds.",
    f"A contestant leaves a place when its readings there have used up its budget; one whose "
    f"warm-up takes over {ONCE_S:g} s is not measured; a call of over {HANG_S:g} s ends the run. "
    f"Contestants whose writes take over {SLOW_S:g} s have {SLOW_ROUNDS} measured rounds; "
    "headrace's default call has all.",
    "Background: the arrays are overwritten as soon as the call returns, and the file is compared "
    "with what they were before. 'free_seconds' is until the call returned, 'seconds' until the "
    "result was there. The report tells which snapshot was taken.",
    "Host memory: in a fresh process with the model on its device, one save; the growth of its "
    "anonymous resident memory (RssAnon, page-locked blocks included, no page of any file), read "
    "every 2 ms by another process.",
    "Stream order: a resident file of the disk is read into memory that the stream overwrites just "
    "before, delayed or not; a copy that is queued behind is compared. 'free_seconds' is until "
    "the call returned, 'seconds' until the stream had done the copy.",
)
"""How figures were taken, in sentences."""


def build_document(run: SaveRun) -> dict[str, Any]:
    """Everything that a run, finished or not, has found so far, ready for JSON."""
    on_gpu = run.memory.device != "cpu"
    targets = save_targets(SaveFindings(run.rows, run.host_memory)) if on_gpu else []
    document = {
        **describe_run(run),
        "benchmark": "save",
        "parameters": _parameters(run),
        "method": list(METHOD),
        "rows": [row.to_dict() for row in run.rows],
        "host_memory": [found.to_dict() for found in run.host_memory],
        "targets": [target.to_dict() for target in targets],
    }
    return scrub_document(document, run)


def _parameters(run: SaveRun) -> dict[str, Any]:
    settings = run.settings
    return {
        "device": run.memory.device,
        "framework": run.memory.framework,
        "raw_nbytes": settings.raw_nbytes,
        "zram_nbytes": settings.zram_nbytes,
        "disk_nbytes": settings.disk_nbytes,
        "model_nbytes": settings.model_nbytes,
        "stream_nbytes": settings.stream_nbytes,
        "repeats": settings.repeats,
        "sections": list(settings.sections),
        "quick": settings.quick,
        "deadline_s": settings.deadline_s,
        "budget_s": settings.budget_s,
    }

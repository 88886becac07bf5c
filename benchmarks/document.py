"""The JSON of a run: everything found, without the names of this machine's directories."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import collect_versions, cuda_version, describe_machine
from benchmarks.result import SCHEMA, Target
from benchmarks.rounds import FAMILY_FINALISTS, HANG_S, ONCE_S, SLOW_ROUNDS, SLOW_S
from benchmarks.targets import Findings, gpu_targets, host_targets

if TYPE_CHECKING:
    from benchmarks.run import Run
    from benchmarks.state import RunState

METHOD = (
    "All contestants of a place run in one process, once a round; the order rotates, and every "
    "other round goes backwards. Round 0 warms up and is recorded as 'first'.",
    "Timed is the whole call with opening, planning, allocation of the result and "
    "torch.cuda.synchronize(); contestants that read into given memory get it from outside.",
    "After each reading the result is compared with the official loader's, byte for byte, on "
    "the destination; then its memory, and memory to be read into, is overwritten with 0xA5.",
    "Results are freed after each reading and torch.cuda.empty_cache() is never called, so "
    "every allocator is warm from the second round on.",
    "Before each reading cachestat counts the resident bytes: all of them at warm places, none "
    "at cold ones, where POSIX_FADV_DONTNEED drops these files alone.",
    "GB/s is the payload in 10**9 bytes over wall time; CPU is user and system time of the "
    "process (getrusage) per GB. Figures are medians of the measured rounds.",
    f"A contestant leaves a place when its readings there have used up its budget; one whose "
    f"first reading takes over {ONCE_S:g} s is run once; a call of over {HANG_S:g} s ends the run.",
    f"Contestants whose readings take over {SLOW_S:g} s (below 5 GB/s for 7.85 GB) have "
    f"{SLOW_ROUNDS} measured rounds; headrace's default call has all.",
    f"Of the settings of one library the {FAMILY_FINALISTS} fastest of the first measured round "
    "go on; the best is reported and all are here.",
    "Kept: one context loads the model again and again and keeps its pages registered; 'first' is "
    "the load that registers them. The context is closed before the next part.",
    "cuFile: in a process of its own, with a udev record for the zram device while it runs; the "
    "first bytes of the raw file, cold. The reports say which way cuFile took.",
    "Neighbour: beside a process per core that counts loops, loads of the resident raw file in "
    "turns, each followed by as long an interval without; CPU taken is the loading process's "
    "(getrusage), and the loops lost are those of the interval less those of the load.",
)
"""How figures were taken, in sentences."""


def build_document(run: Run) -> dict[str, Any]:
    """Everything that a run, finished or not, has found so far, ready for JSON."""
    document = {
        **describe_run(run),
        "parameters": _parameters(run),
        "method": list(METHOD),
        "rows": [row.to_dict() for row in run.rows],
        "first_calls": [found.to_dict() for found in run.first_calls],
        "imports": [found.to_dict() for found in run.imports],
        "neighbour": [row.to_dict() for row in run.beside],
        "doctor": run.doctor,
        "targets": [target.to_dict() for target in _targets(run)],
    }
    return scrub_document(document, run)


def describe_run(run: RunState) -> dict[str, Any]:
    """Give what the JSON of every kind of run begins with: when, where, with what, and how far."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "finished": run.finished,
        "took_s": {**run.took_s, "total": time.perf_counter() - run.start},
        "machine": run.machine or describe_machine([]),
        "versions": {**collect_versions(), "cuda": cuda_version()},
        "places": [{"key": p.key, "title": p.title, "cold": p.cold} for p in run.places.values()],
        "absent_places": [{"key": p.key, "why": p.why} for p in run.absent_places],
    }


def scrub_document(document: Mapping[str, Any], run: RunState) -> dict[str, Any]:
    """Give a document of a run without the names of this machine's directories."""
    scrubbed: dict[str, Any] = json.loads(scrub(json.dumps(document), _private_names(run)))
    return scrubbed


def write_json(document: Mapping[str, Any], path: Path) -> None:
    """Write the document in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def scrub(text: str, names: Mapping[str, str]) -> str:
    """Replace directories of this machine in a text, the longest first."""
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    return text


def _private_names(run: RunState) -> dict[str, str]:
    names = {str(Path(entry).resolve()): "<site>" for entry in sys.path if entry}
    names |= {entry: "<site>" for entry in sys.path if entry.startswith("/")}
    names |= {str(Path(__file__).parent.parent): "<repository>", sys.prefix: "<python>"}
    names |= {str(run.work): "<dir>", run.work.name: "inputs", os.path.expanduser("~"): "<home>"}
    return {name: label for name, label in names.items() if len(name) > len("/xx")}


def _targets(run: Run) -> list[Target]:
    findings = Findings(run.rows, run.first_calls, run.imports, _pinned_limit(), run.beside)
    return host_targets(findings) if run.memory.device == "cpu" else gpu_targets(findings)


def _parameters(run: Run) -> dict[str, Any]:
    settings = run.settings
    return {
        "device": run.memory.device,
        "framework": run.memory.framework,
        "raw_nbytes": settings.raw_nbytes,
        "model_nbytes": run.model_nbytes or settings.model_nbytes,
        "gds_nbytes": settings.gds_nbytes,
        "repeats": settings.repeats,
        "sections": list(settings.sections),
        "quick": settings.quick,
        "deadline_s": settings.deadline_s,
        "budget_s": settings.budget_s,
    }


def _pinned_limit() -> int | None:
    import headrace

    return headrace.Options().pinned_nbytes

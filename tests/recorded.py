"""Machines that are not at hand: recorded trees of /proc and /sys, and a doctor for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.bindings.posix import DirectAlignment, PosixFiles
from headrace.diagnosis import Diagnosis, doctor
from headrace.probing.examination import Instruments
from headrace.probing.fact import Fact
from headrace.probing.verdict import RouteVerdict
from headrace.testing import FakeCuda
from tests.support import RecordedSystem

TREES = Path(__file__).parent / "trees"
LIBRARY = {"bindings": "13.3.1", "version": "1.20.0"}


class DirectFiles(PosixFiles):
    """Real files that open with O_DIRECT, whatever the file system of the tests is."""

    def open(self, path: str, *, direct: bool = False) -> int:
        return super().open(path)

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        return DirectAlignment(512, 512)


def load_tree(name: str, at: Path) -> RecordedSystem:
    """A recorded machine, whose volume ``/mnt/data`` is the folder `at`."""
    texts: dict[str, str] = {}
    links: dict[str, str] = {}
    recorded = (TREES / f"{name}.txt").read_text().replace("/mnt/data", str(at))
    for section in recorded.split("\n== ")[1:]:
        path, _, text = section.partition("\n")
        path, arrow, target = path.partition(" -> ")
        if arrow:
            links[path] = target
        else:
            texts[path] = text + "\n"
    return RecordedSystem(texts, 16, 0.0, links)


def change_tree(tree: RecordedSystem, changes: Mapping[str, str | None]) -> RecordedSystem:
    """The same machine with other texts; None takes a file, and what is below it, away."""
    texts = dict(tree.texts)
    for path, text in changes.items():
        texts = {known: texts[known] for known in texts if not f"{known}/".startswith(f"{path}/")}
        if text is not None:
            texts[path] = text
    return RecordedSystem(texts, tree.cpu_count, tree.load, tree.links)


def diagnose(
    tree: RecordedSystem,
    path: Path | None,
    *,
    cuda: FakeCuda | None = None,
    library: Mapping[str, str] = LIBRARY,
    environment: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Let the doctor look at a recorded machine with one GPU."""
    used = cuda or FakeCuda()
    instruments = Instruments(
        tree,
        DirectFiles(),
        lambda: used,
        environment or {},
        (),
        lambda _: library,
        lambda: 0,
    )
    return doctor(path, instruments=instruments)


def verdict_of(diagnosis: Diagnosis, route: str) -> RouteVerdict:
    (verdict,) = (each for each in diagnosis.routes if each.route == route)
    return verdict


def fact_of(diagnosis: Diagnosis, name: str) -> Fact:
    (fact,) = (each for each in diagnosis.facts if each.name == name)
    return fact

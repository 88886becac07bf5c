"""Peers are called as their manuals say, where they can be tried without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.contestants import Contestant
from benchmarks.files import write_model
from benchmarks.memory import NumpyMemory
from benchmarks.peers import Fastsafetensors, SafetensorsPrefetch, model_peers
from benchmarks.raw_peers import KVIKIO_TUNED, Kvikio, raw_peers
from benchmarks.result import Role


class FakeKvikio(ModuleType):
    """As much of KvikIO as the contestant uses; remembers its settings at each read."""

    CompatMode = type("CompatMode", (), {"ON": "on", "OFF": "off"})

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.settings: dict[str, Any] = {"num_threads": 1}
        self.reads: list[tuple[dict[str, Any], int]] = []
        self.missing = 0
        self.defaults = ModuleType("kvikio.defaults")
        self.defaults.set = self._set  # type: ignore[attr-defined]

    def _set(self, settings: dict[str, Any]) -> AbstractContextManager[None]:
        before, self.settings = self.settings, {**self.settings, **settings}

        @contextmanager
        def undo() -> Iterator[None]:
            yield
            self.settings = before

        return undo()

    def CuFile(self, path: Path, flags: str) -> AbstractContextManager[Any]:  # noqa: N802
        assert flags == "r"
        data = np.fromfile(path, np.uint8)

        def read(buffer: Any, size: int | None = None) -> int:
            count = len(buffer) if size is None else size
            buffer[:count] = data[:count]
            self.reads.append((dict(self.settings), count))
            return count - self.missing

        return nullcontext(SimpleNamespace(read=read))


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> FakeKvikio:
    fake = FakeKvikio()
    monkeypatch.setitem(sys.modules, "kvikio", fake)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", fake.defaults)
    return fake


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "raw"
    path.write_bytes(bytes(range(256)) * 4)
    return path


def test_tuned_kvikio_reads_under_its_settings_and_puts_them_back(
    kvikio: FakeKvikio, raw: Path
) -> None:
    target = np.zeros(1024, np.uint8)
    contestant = Kvikio(target, (8, 4))
    with contestant.session(raw):
        assert contestant.load(raw)[""].tobytes() == raw.read_bytes()
    settings, count = kvikio.reads[-1]
    assert settings == {"num_threads": 8, "task_size": 4 << 20, "compat_mode": "on"}
    assert count == 1024
    assert kvikio.settings == {"num_threads": 1}


def test_kvikio_through_cufile_is_no_setting_of_the_tuned_family(
    kvikio: FakeKvikio, raw: Path
) -> None:
    contestant = Kvikio(np.zeros(512, np.uint8), (8, 16), compat="OFF")
    with contestant.session(raw):
        assert contestant.load(raw)[""].tobytes() == raw.read_bytes()[:512]
    settings, _ = kvikio.reads[-1]
    assert settings == {"num_threads": 8, "task_size": 16 << 20, "compat_mode": "off"}
    assert (contestant.family, contestant.role) == (None, Role.PEER_TUNED)
    assert contestant.name == "KvikIO, compat mode OFF, 8 threads x 16 MiB"


def test_default_kvikio_changes_no_setting(kvikio: FakeKvikio, raw: Path) -> None:
    contestant = Kvikio(np.zeros(1024, np.uint8))
    with contestant.session(raw):
        contestant.load(raw)
    assert [settings for settings, _ in kvikio.reads] == [{"num_threads": 1}] * 2


def test_short_read_of_kvikio_is_an_error(kvikio: FakeKvikio, raw: Path) -> None:
    kvikio.missing = 1
    with pytest.raises(EOFError, match="1023 of 1024"):
        Kvikio(np.zeros(1024, np.uint8)).load(raw)


def test_module_that_fails_to_import_makes_a_contestant_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_peer.py").write_text("raise KeyError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    contestant = Contestant("broken", ("broken_peer",))
    assert not contestant.is_available()
    assert contestant.why_absent() == "cannot import broken_peer: KeyError: 'no driver'"


def test_old_safetensors_makes_prefetch_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetensors.safe_open", object)
    why = SafetensorsPrefetch("cpu", together=True).why_absent()
    assert why is not None
    assert "has no prefetch; 0.9 has" in why


def test_environment_of_a_tuned_peer_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", "1")
    with Fastsafetensors("cpu", buffered=True).session(tmp_path):
        assert os.environ["FASTSAFETENSORS_ODIRECT"] == "0"
    with Fastsafetensors("cpu").session(tmp_path):
        assert "FASTSAFETENSORS_ODIRECT" not in os.environ
    assert os.environ["FASTSAFETENSORS_ODIRECT"] == "1"


def test_names_of_contestants_are_unique() -> None:
    torch_memory = NumpyMemory()
    torch_memory.framework = "torch"
    for contestants in (model_peers(torch_memory), raw_peers(torch_memory, None)):
        names = [contestant.name for contestant in contestants]
        assert len(set(names)) == len(names)


def test_tuned_kvikio_is_one_family_of_nine_settings() -> None:
    torch_memory = NumpyMemory()
    torch_memory.framework = "torch"
    tuned = [c for c in raw_peers(torch_memory, None) if c.family == KVIKIO_TUNED]
    assert len(tuned) == 9
    assert {contestant.role for contestant in tuned} == {Role.PEER_TUNED}


@pytest.mark.parametrize("name", ["fastsafetensors (nogds)", "runai-model-streamer"])
def test_peer_that_can_load_without_a_gpu_gives_the_official_bytes(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from benchmarks.memory import TorchMemory

    memory = TorchMemory("cpu")
    peer = next(peer for peer in model_peers(memory) if peer.name == name)
    if why := peer.why_absent():
        pytest.skip(why)
    write_model(tmp_path / "model", 700_000)
    reference = memory.load_reference(tmp_path / "model")
    with peer.session(tmp_path / "model"):
        assert memory.find_difference(peer.load(tmp_path / "model"), reference) is None

"""Other libraries on a model: every tensor of every shard, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.memory import Arrays, Memory, shards_of
from benchmarks.result import Role


class SafetensorsLoadFile(Contestant):
    """``load_file`` of the official library, one shard after the other."""

    package = "safetensors"

    def __init__(self, memory: Memory) -> None:
        super().__init__("safetensors load_file", (f"safetensors.{memory.framework}",))
        self._memory = memory

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        return self._memory.load_reference(source)


class SafetensorsPrefetch(Contestant):
    """``safe_open(...).prefetch()`` of safetensors 0.9.

    Parameters
    ----------
    device
        Destination.
    together
        Whether all files are loaded at the same time, with a thread for each.
    """

    package = "safetensors"

    def __init__(self, device: str, *, together: bool) -> None:
        order = "all files at once" if together else "one file after the other"
        super().__init__(f"safetensors prefetch, {order}", ("safetensors",))
        self._device = device
        self._together = together

    def why_absent(self) -> str | None:
        """See `Contestant.why_absent`."""
        if why := super().why_absent():
            return why
        import safetensors

        if not hasattr(safetensors.safe_open, "prefetch"):
            return f"safetensors {safetensors.__version__} has no prefetch; 0.9 has"
        return None

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        shards = shards_of(source)
        if not self._together:
            return _merge(self._load_shard(shard) for shard in shards)
        with ThreadPoolExecutor(len(shards)) as pool:
            return _merge(pool.map(self._load_shard, shards))

    def _load_shard(self, shard: Path) -> dict[str, Any]:
        from safetensors import safe_open

        with (
            safe_open(shard, framework="pt", device=self._device) as file,
            file.prefetch() as loader,
        ):
            return dict(loader)


class Fastsafetensors(Contestant):
    """fastsafetensors without GPUDirect Storage, which these machines lack.

    Parameters
    ----------
    device
        Destination.
    buffered
        Whether to go through the page cache, as its environment variable allows.
    """

    package = "fastsafetensors"

    def __init__(self, device: str, *, buffered: bool = False) -> None:
        name = "fastsafetensors (nogds)"
        role = Role.PEER_TUNED if buffered else Role.PEER
        super().__init__(f"{name}, buffered" if buffered else name, ("fastsafetensors",), role)
        self._device = device
        self._buffered = buffered

    def session(self, path: Path) -> Any:
        """See `Participant.session`."""
        from benchmarks.environment import variable

        del path
        return variable("FASTSAFETENSORS_ODIRECT", "0" if self._buffered else None)

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, self._device, nogds=True)
        try:
            loader.add_filenames({0: [str(shard) for shard in shards_of(source)]})
            buffers = loader.copy_files_to_device()
            try:
                return {name: buffers.get_tensor(name) for name in loader.get_keys()}
            finally:
                buffers.close()
        finally:
            loader.close()


class InstantTensor(Contestant):
    """InstantTensor, all files in one call as its manual advises.

    Parameters
    ----------
    device
        Destination.
    buffered
        Whether to ask for its buffered back end, which it advises for files loaded repeatedly.
    """

    package = "instanttensor"

    def __init__(self, device: str, *, buffered: bool = False) -> None:
        role = Role.PEER_TUNED if buffered else Role.PEER
        name = "InstantTensor, backend=BUFFERED" if buffered else "InstantTensor"
        super().__init__(name, ("instanttensor",), role)
        self._device = device
        self._buffered = buffered

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        from instanttensor import BackendPolicy, safe_open

        paths = [str(shard) for shard in shards_of(source)]
        given: dict[str, Any] = {"backend": BackendPolicy.BUFFERED} if self._buffered else {}
        with safe_open(paths, framework="pt", device=self._device, **given) as file:
            return dict(file.tensors())


class RunaiModelStreamer(Contestant):
    """The Run:ai model streamer, all files in one call, straight to the device."""

    package = "runai-model-streamer"

    def __init__(self, device: str) -> None:
        super().__init__("runai-model-streamer", ("runai_model_streamer",))
        self._device = device

    def load(self, source: Path) -> Arrays:
        """See `Contestant.load`."""
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            paths = [str(shard) for shard in shards_of(source)]
            streamer.stream_files(paths, device=self._device)
            return dict(streamer.get_tensors())


def model_peers(memory: Memory) -> Sequence[Contestant]:
    """Every peer that loads a model into this memory."""
    official = SafetensorsLoadFile(memory)
    if memory.framework != "torch":
        return (official,)
    device = memory.device
    return (
        official,
        SafetensorsPrefetch(device, together=False),
        SafetensorsPrefetch(device, together=True),
        Fastsafetensors(device),
        Fastsafetensors(device, buffered=True),
        InstantTensor(device),
        InstantTensor(device, buffered=True),
        RunaiModelStreamer(device),
    )


def _merge(shards: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: tensor for shard in shards for name, tensor in shard.items()}

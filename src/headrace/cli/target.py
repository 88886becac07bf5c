"""Where a load goes: the device and the framework, by what was asked and what is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

from headrace.context import Context
from headrace.errors import DeviceError
from headrace.probing.fact import Fact
from headrace.types import parse_device

GPU_FRAMEWORKS = ("torch", "cupy")
"""Frameworks whose arrays can live on a GPU, the preferred one first."""


class Namespace(Protocol):
    """What every framework namespace offers: ``headrace.numpy``, ``headrace.torch``, ..."""

    def load(self, source: str, **options: Any) -> dict[str, Any]:
        """Load the tensors of a source."""

    def read(self, path: str, **options: Any) -> Any:
        """Read raw bytes or a ``.npy`` file."""


@dataclass(frozen=True, slots=True)
class Target:
    """Device and framework of a load."""

    device: str
    """``"cpu"``, ``"cuda"`` or ``"cuda:N"``."""
    framework: str
    """``"numpy"``, ``"torch"`` or ``"cupy"``."""
    why: str
    """What decided the device; "" when it was asked for."""

    @property
    def is_host(self) -> bool:
        """Whether the bytes stay in host memory."""
        return parse_device(self.device).is_host

    def namespace(self) -> Namespace:
        """Import the framework's namespace.

        Raises
        ------
        ValueError
            The framework is not installed.
        """
        try:
            return cast(Namespace, import_module(f"headrace.{self.framework}"))
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--framework {self.framework}: {error}; install headrace with its extra "
                f"[{self.framework}], or choose another framework"
            ) from error


def find_target(device: str | None, framework: str | None, context: Context) -> Target:
    """Choose device and framework on this machine; see `choose_target`."""
    return choose_target(device, framework, context.gpu_fact(), gpu_obstacle)


def choose_target(
    device: str | None, framework: str | None, gpu: Fact, obstacle: Callable[[str], str]
) -> Target:
    """Choose device and framework.

    A device of None takes the GPU if `gpu` holds, else the host. A framework of None takes NumPy
    for the host and, for a GPU, the first of `GPU_FRAMEWORKS` against which there is no obstacle.

    Raises
    ------
    DeviceError
        A GPU was asked for, and it or a framework for it is missing.
    ValueError
        The framework cannot hold arrays on that device.
    """
    if framework == "numpy" or (device is not None and parse_device(device).is_host):
        return _host_target(device, framework)
    reasons = [] if gpu.holds else [_describe(gpu)]
    for name in ((framework,) if framework else GPU_FRAMEWORKS) if gpu.holds else ():
        why = obstacle(name)
        if not why:
            return Target(device or "cuda", name, f"{gpu.name}: {gpu.found}")
        reasons.append(why)
    if device is not None or framework == "cupy":
        raise DeviceError(f"{device or framework}: no GPU can be used: {'; '.join(reasons)}")
    return Target("cpu", framework or "numpy", "; ".join(reasons))


def _host_target(device: str | None, framework: str | None) -> Target:
    """Host memory, as asked."""
    if device is not None and not parse_device(device).is_host:
        raise ValueError(f"numpy cannot hold arrays on {device}: use torch or cupy, or cpu")
    if framework == "cupy":
        raise ValueError("cupy holds arrays on a GPU only: use numpy or torch for the cpu")
    return Target("cpu", framework or "numpy", "")


def _describe(fact: Fact) -> str:
    """Put a fact that does not hold into words."""
    return f"{fact.why} ({fact.remedy})" if fact.remedy else fact.why


def gpu_obstacle(framework: str) -> str:
    """Why torch or cupy cannot reach the GPU; "" when it can. Imports the framework."""
    if find_spec(framework) is None:
        return f"{framework} is not installed"
    try:
        module = import_module(framework)
    except (ImportError, OSError) as error:
        return f"{framework} cannot be imported: {error}"
    if module.cuda.is_available():
        return ""
    return f"{framework} {module.__version__} sees no CUDA device (is it a build with CUDA?)"

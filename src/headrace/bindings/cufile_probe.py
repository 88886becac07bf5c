"""Opening cuFile for the first time, in a child process, because it can hang or crash."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.bindings.cufile import CuFile, CuFileLibrary
from headrace.bindings.cufile_errors import logged_reason
from headrace.bindings.pymemory import address_of, map_pages
from headrace.errors import HeadraceError

TIMEOUT_S = 10.0
"""How long the child may take; opening the driver was seen to take 2 s."""

_LOG = "cufile.log"
_PROBE_NBYTES = 4096
_DYING_S = 2.0  # a child that the kernel does not let go is left behind
_MODULES = "/proc/modules"  # libcufile 1.16 to 1.20 spin without it
_CHILD = """
import json, sys
question = json.loads(sys.argv[1])
sys.path = question.pop("sys_path")
from headrace.bindings.cufile_probe import answer
print(json.dumps(answer(**question)))
"""


@dataclass(frozen=True, slots=True)
class CuFileProbe:
    """What became of cuFile in a child process."""

    works: bool
    """Whether all that was tried succeeded."""
    why: str
    """What was tried, or what failed and for which reason."""
    version: int | None = None
    """Version of libcufile: 1200 for 1.20; None where it did not get that far."""
    served: str | None = None
    """Which way the read went: "p2p", "nvfs" or "posix"; None where nobody counted it."""


def probe_cufile(
    path: str | None = None,
    *,
    device: int | None = None,
    config_path: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> CuFileProbe:
    """Try cuFile in a child process; never hangs, crashes or leaves a file behind.

    Parameters
    ----------
    path
        A file to register and to read a page of; None only opens the driver.
    device
        CUDA device to read to; None for host memory, which libcufile takes since 1.20.
    config_path
        A ``cufile.json`` to use instead of the system's.
    timeout_s
        How long to wait for an answer.
    """
    if not sys.executable:
        return CuFileProbe(False, "there is no Python interpreter to probe cuFile with")
    question = {"path": path and os.path.abspath(path), "device": device, "sys_path": sys.path}
    with tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True) as folder:
        child = _start(question, folder, config_path)
        return _wait_for(child, Path(folder, _LOG), timeout_s)


def _start(
    question: Mapping[str, object], folder: str, config_path: str | None
) -> subprocess.Popen[bytes]:
    # The one place that hands on the whole environment: the child is this process's double.
    environment = {**os.environ, "CUFILE_LOGFILE_PATH": os.path.join(folder, _LOG)}
    if config_path is not None:
        environment["CUFILE_ENV_PATH_JSON"] = os.path.abspath(config_path)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _CHILD, json.dumps(question)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,  # where cuFile would leave a log whatever it was told
        env=environment,
        start_new_session=True,
    )


def _wait_for(child: subprocess.Popen[bytes], log: Path, timeout_s: float) -> CuFileProbe:
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_DYING_S)
        hint = "" if os.path.exists(_MODULES) else f"; it spins where {_MODULES} does not exist"
        why = f"cuFile did not answer within {timeout_s:g} s{hint}{_said(log)}"
        return CuFileProbe(False, why)
    except BaseException:
        child.kill()
        raise
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return CuFileProbe(False, f"cuFile killed its process with {name}{_said(log)}")
    try:
        return CuFileProbe(**json.loads(out.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        last = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        status = child.returncode
        return CuFileProbe(False, f"the probe of cuFile ended with status {status}: {last}")


def _said(log: Path) -> str:
    """What the log gives as a reason, to be added to a sentence."""
    with contextlib.suppress(OSError):
        reason = logged_reason(log.read_text(errors="replace"))
        return f" (its log: {reason})" if reason else ""
    return ""


def answer(path: str | None, device: int | None) -> dict[str, object]:
    """Body of the child: `CuFileProbe` as a dictionary."""
    version: int | None = None
    try:
        cufile = CuFileLibrary()
        version = cufile.version()
        cufile.open_driver(os.environ["CUFILE_LOGFILE_PATH"])
        served = None if path is None else _read_page(cufile, path, device)
    except (ImportError, HeadraceError, OSError) as error:
        return asdict(CuFileProbe(False, str(error), version))
    tried = "the driver opens" + (f", and {path} can be read" if path else "")
    return asdict(CuFileProbe(True, tried, version, served))


def _read_page(cufile: CuFile, path: str, device: int | None) -> str | None:
    """Read the first page of a file; which way it went."""
    with _open_direct(path) as fd, _memory(device) as pointer:
        handle = cufile.register_handle(fd)
        try:
            before = cufile.read_counters()
            count = cufile.read(handle, pointer, _PROBE_NBYTES, 0)
            after = cufile.read_counters()
        finally:
            cufile.deregister_handle(handle)
        wanted = min(_PROBE_NBYTES, os.fstat(fd).st_size)
        if count != wanted:
            raise OSError(f"cuFileRead gave {count} bytes of {path}, not {wanted}")
    if before is None or after is None:
        return None
    done = after - before
    ways = {"p2p": done.p2p_reads, "nvfs": done.nvfs_reads, "posix": done.posix_reads}
    return next((way for way, reads in ways.items() if reads), None)


@contextlib.contextmanager
def _open_direct(path: str) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _memory(device: int | None) -> Iterator[int]:
    """Make a page of memory; on a device, it lives as long as the child."""
    if device is None:
        pointer, anchor = address_of(map_pages(_PROBE_NBYTES))
        yield pointer
        del anchor
        return
    from cuda.bindings import runtime

    runtime.cudaSetDevice(device)
    code, pointer = runtime.cudaMalloc(_PROBE_NBYTES)
    if code != runtime.cudaError_t.cudaSuccess:
        raise OSError(f"cudaMalloc on device {device} failed: {code.name} ({int(code)})")
    yield pointer

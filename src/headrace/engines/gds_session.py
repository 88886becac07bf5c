"""The session with cuFile: one driver for the process, shared by its contexts.

The driver is opened when the first lease is taken and closed with the last one. Before the first
opening a child process tries it, because it can hang or crash. After a fork its state is undefined:
a process that inherited an open driver is refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator

from headrace.bindings.cufile import CuFile, CuFileLibrary
from headrace.bindings.cufile_probe import CuFileProbe, probe_cufile
from headrace.errors import DeviceError, RouteUnavailable
from headrace.memory.registrations import Registrations

REGISTERED_NBYTES = 16 << 30
"""Most bytes registered at a time; BAR1 of data-centre GPUs holds all of their memory."""

Probe = Callable[[], CuFileProbe]
"""Tries cuFile where it can do no harm."""


class GdsLease:
    """The right to use the driver, until `close`.

    Attributes
    ----------
    cufile : CuFile
        The calls, on an open driver.
    registrations : Registrations
        Buffers registered with it, of all leases.
    """

    def __init__(
        self, cufile: CuFile, registrations: Registrations, release: Callable[[], None]
    ) -> None:
        self.cufile = cufile
        self.registrations = registrations
        # Also for a context that nobody closed, and at the end of the process.
        self._release = weakref.finalize(self, release)

    def close(self) -> None:
        """Give the driver back; the last one closes it. Safe to call again."""
        self._release()


class GdsSession:
    """cuFile's driver, opened on demand and counted.

    Parameters
    ----------
    cufile
        The calls to make; None for the real ones, which are loaded with the first lease.
    probe
        Tries cuFile before the first opening; None opens it at once, for a fake.
    registered_nbytes
        Budget of the registrations.
    """

    def __init__(
        self,
        cufile: CuFile | None = None,
        probe: Probe | None = None,
        *,
        registered_nbytes: int = REGISTERED_NBYTES,
    ) -> None:
        self._cufile = cufile
        self._probe = probe
        self._registered_nbytes = registered_nbytes
        self._probed: CuFileProbe | None = None
        self._registrations: Registrations | None = None
        self._folder: str | None = None
        self._opened_by: int | None = None
        self._leases = 0
        # Collecting a lease takes it, which can happen at any moment, also while it is held.
        self._lock = threading.RLock()

    @property
    def leases(self) -> int:
        """Leases that were taken and not closed."""
        return self._leases

    def refusal(self) -> str | None:
        """Why this process may not use the driver, as far as is known without trying it."""
        if self._opened_by not in (None, os.getpid()):
            return (
                f"process {os.getpid()} was forked from {self._opened_by}, which had opened "
                "cuFile; its state is undefined here (start workers by spawn, or use "
                "another route)"
            )
        if self._probed is not None and not self._probed.works:
            return self._probed.why
        return None

    def lease(self) -> GdsLease:
        """Open the driver, if it is not open, and take part in it.

        Raises
        ------
        RouteUnavailable
            The process was forked after the driver was opened; or the probe or the driver failed.
        """
        self._refuse_if_known()  # before the lock, which a fork may have copied while it was held
        with self._lock:
            self._leases += 1  # first: a lease that is collected meanwhile is then not the last
            try:
                if self._registrations is None:
                    self._registrations = self._open()
            except BaseException:
                self._leases -= 1
                raise
            return GdsLease(self._require(), self._registrations, self._release)

    def _refuse_if_known(self) -> None:
        reason = self.refusal()
        if reason is not None:
            raise RouteUnavailable(f"route 'gds' cannot serve: {reason}")

    def _require(self) -> CuFile:
        if self._cufile is None:
            self._cufile = CuFileLibrary()
        return self._cufile

    def _open(self) -> Registrations:
        if self._probe is not None and self._probed is None:
            self._probed = self._probe()
            self._refuse_if_known()
        if self._folder is None:
            self._folder = _make_folder(self)
        try:
            cufile = self._require()
            with _descriptor_0_kept():
                cufile.open_driver(os.path.join(self._folder, "cufile.log"))
        except (ImportError, DeviceError) as error:
            raise RouteUnavailable(f"route 'gds' cannot serve: {error}") from error
        self._opened_by = os.getpid()
        return Registrations(cufile, self._registered_nbytes)

    def _release(self) -> None:
        if self._opened_by != os.getpid():
            return  # in a forked child: nothing of the driver may be touched
        with self._lock:
            self._leases -= 1
            if self._leases or self._registrations is None:
                return
            registrations, self._registrations = self._registrations, None
            registrations.close()
            self._require().close_driver()


@functools.cache
def process_session() -> GdsSession:
    """The session of this process with the real cuFile; nothing is opened yet."""
    return GdsSession(probe=probe_cufile)


def _make_folder(session: GdsSession) -> str:
    """Make a folder for cuFile's log, which goes when the session or the process does."""
    folder = tempfile.mkdtemp(prefix="headrace-")
    weakref.finalize(session, _remove_folder, folder, os.getpid())
    return folder


def _remove_folder(folder: str, maker: int) -> None:
    if os.getpid() == maker:  # a forked child ends too, and the folder is not its own
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _descriptor_0_kept() -> Iterator[None]:
    """Put descriptor 0 back: cuFileDriverOpen closes it where nvidia-fs is absent."""
    try:
        saved = os.dup(0)
    except OSError:  # it was not open before either
        yield
        return
    try:
        yield
    finally:
        if not _is_same_file(0, saved):
            os.dup2(saved, 0)
        os.close(saved)


def _is_same_file(fd: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(fd, other)
    except OSError:
        return False

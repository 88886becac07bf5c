from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest

from headrace.bindings.cufile_probe import CuFileProbe
from headrace.engines.gds_session import GdsSession, process_session
from headrace.errors import RouteUnavailable
from headrace.testing import FakeCuda
from headrace.testing.fake_cufile import FakeCuFile
from tests.support import run_python


class Noisy(FakeCuFile):
    """Does to the process, while the driver opens, what it is told to."""

    disturb: Callable[[], object] = staticmethod(lambda: None)
    log_paths: tuple[str, ...] = ()

    def open_driver(self, log_path: str) -> None:
        super().open_driver(log_path)
        self.log_paths = (*self.log_paths, log_path)
        self.disturb()


@pytest.fixture
def cufile() -> Noisy:
    return Noisy(FakeCuda())


def test_nothing_is_opened_before_the_first_lease(cufile: Noisy) -> None:
    assert GdsSession(cufile).refusal() is None
    assert cufile.driver_uses == 0


def test_leases_share_one_driver_and_the_last_one_closes_it(cufile: Noisy) -> None:
    session = GdsSession(cufile)
    first, second = session.lease(), session.lease()
    assert first.registrations is second.registrations
    first.close()
    first.close()
    assert (cufile.driver_uses, session.leases) == (1, 1)
    second.close()
    assert (cufile.driver_uses, session.leases) == (0, 0)
    session.lease().close()
    assert len(cufile.log_paths) == 2


def test_threads_that_come_at_once_open_one_driver(cufile: Noisy) -> None:
    session = GdsSession(cufile)
    leases = []
    threads = [threading.Thread(target=lambda: leases.append(session.lease())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (cufile.driver_uses, session.leases, len(leases)) == (1, 8, 8)
    for lease in leases:
        lease.close()
    assert cufile.driver_uses == 0


def test_lease_that_nobody_closed_ends_when_it_is_collected(cufile: Noisy) -> None:
    session = GdsSession(cufile)
    session.lease()
    gc.collect()
    assert cufile.driver_uses == 0


def test_buffers_are_deregistered_before_the_driver_closes(cufile: Noisy) -> None:
    cuda = FakeCuda()
    cufile = Noisy(cuda)
    lease = GdsSession(cufile).lease()
    pointer = cuda.device_alloc(4096)
    with lease.registrations.borrow(pointer, 4096, lease):
        pass
    assert cufile.buffers
    lease.close()
    assert (cufile.buffers, cufile.errors) == ({}, [])


def test_probe_that_fails_refuses_with_its_reason_and_is_not_repeated(cufile: Noisy) -> None:
    calls = []

    def probe() -> CuFileProbe:
        calls.append(1)
        return CuFileProbe(False, "it hung")

    session = GdsSession(cufile, probe)
    for _ in range(2):
        with pytest.raises(RouteUnavailable, match="it hung"):
            session.lease()
    assert (len(calls), cufile.driver_uses, session.leases) == (1, 0, 0)
    assert session.refusal() == "it hung"


def test_probe_that_succeeds_comes_before_the_driver_and_only_once(cufile: Noisy) -> None:
    seen = []

    def probe() -> CuFileProbe:
        seen.append(cufile.driver_uses)
        return CuFileProbe(True, "")

    session = GdsSession(cufile, probe)
    session.lease().close()
    session.lease().close()
    assert seen == [0]


def test_driver_that_does_not_open_is_unavailable_with_its_code(cufile: Noisy) -> None:
    cufile.codes["cuFileDriverOpen"] = 5033
    session = GdsSession(cufile)
    with pytest.raises(RouteUnavailable, match="5033"):
        session.lease()
    del cufile.codes["cuFileDriverOpen"]
    session.lease().close()
    assert cufile.driver_uses == 0


def test_log_goes_to_a_folder_that_ends_with_the_session(cufile: Noisy) -> None:
    session = GdsSession(cufile)
    lease = session.lease()
    folder = os.path.dirname(cufile.log_paths[0])
    assert os.path.isdir(folder)
    assert folder != os.getcwd()
    lease.close()
    del lease, session
    gc.collect()
    assert not os.path.exists(folder)


def test_forked_child_is_refused_with_a_reason_and_touches_nothing(
    cufile: Noisy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = GdsSession(cufile)
    lease = session.lease()
    parent = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(RouteUnavailable, match=f"forked from {parent}"):
            session.lease()
        assert "forked" in str(session.refusal())
        other = GdsSession(cufile)
        assert other.refusal() is None
    lease.close()
    assert cufile.errors == []


_STDIN = """
import os, sys
from headrace.engines.gds_session import GdsSession
from headrace.testing import FakeCuda, FakeCuFile

class Closing(FakeCuFile):
    def open_driver(self, log_path):
        super().open_driver(log_path)
        os.close(0)
        if "reuse" in sys.argv:
            os.open("/dev/zero", os.O_RDONLY)

if "closed" in sys.argv:
    os.close(0)
    Closing.open_driver = FakeCuFile.open_driver
before = os.fstat(0) if "closed" not in sys.argv else None
count = len(os.listdir("/proc/self/fd"))
lease = GdsSession(Closing(FakeCuda())).lease()
after = os.fstat(0) if "closed" not in sys.argv else None
assert before == after, (before, after)
assert len(os.listdir("/proc/self/fd")) == count
assert before is None or os.get_inheritable(0)
print("same")
"""


@pytest.mark.parametrize("how", ["", "reuse", "closed"])
def test_descriptor_0_survives_the_opening(how: str) -> None:
    assert run_python(_STDIN, how) == "same\n"


def test_session_of_the_process_is_one_and_opens_nothing() -> None:
    assert process_session() is process_session()
    assert process_session().leases == 0

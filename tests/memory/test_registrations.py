from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from headrace.bindings.cufile_errors import CuFileError
from headrace.memory.registrations import Registrations
from headrace.testing import FakeCuda, FakeDeviceArray
from headrace.testing.fake_cufile import FakeCuFile

NBYTES = 4096


class Rig:
    """A cache for two arrays, and what it stands on."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.cufile = FakeCuFile(self.cuda)
        self.cufile.open_driver("")
        self.cache = Registrations(self.cufile, 2 * NBYTES)

    def array(self, nbytes: int = NBYTES) -> FakeDeviceArray:
        return FakeDeviceArray(self.cuda, nbytes)

    def use(self, array: FakeDeviceArray, owner: object = None) -> bool:
        with self.cache.borrow(array.pointer, array.nbytes, owner or array) as held:
            assert (array.pointer in self.cufile.buffers) is held
            return held


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.cache.close()
    assert rig.cufile.buffers == {}
    assert rig.cufile.errors == []


def test_buffer_stays_registered_until_the_cache_is_closed(rig: Rig) -> None:
    array = rig.array()
    assert rig.use(array)
    assert rig.use(array)
    assert (list(rig.cufile.buffers), rig.cache.nbytes, len(rig.cache)) == (
        [array.pointer],
        NBYTES,
        1,
    )
    rig.cache.close()
    assert rig.cufile.buffers == {}


def test_least_recently_used_buffer_goes_when_the_budget_is_full(rig: Rig) -> None:
    arrays = [rig.array() for _ in range(3)]
    for index in (0, 1, 0, 2):
        assert rig.use(arrays[index])
    assert set(rig.cufile.buffers) == {arrays[0].pointer, arrays[2].pointer}
    assert rig.cufile.peak_registered_nbytes == 2 * NBYTES


def test_number_of_buffers_is_bounded_too(rig: Rig) -> None:
    rig.cache = Registrations(rig.cufile, 1 << 30, limit=2)
    arrays = [rig.array() for _ in range(5)]
    assert [rig.use(array) for array in arrays] == [True] * 5
    assert len(rig.cache) == 2


def test_buffers_in_use_are_not_taken_away(rig: Rig) -> None:
    first, second, third = (rig.array() for _ in range(3))
    with (
        rig.cache.borrow(first.pointer, NBYTES, first),
        rig.cache.borrow(second.pointer, NBYTES, second),
    ):
        assert not rig.use(third)
        assert set(rig.cufile.buffers) == {first.pointer, second.pointer}
    assert rig.use(third)
    assert rig.cache.failure is None


def test_buffer_above_the_budget_is_not_registered(rig: Rig) -> None:
    assert not rig.use(rig.array(3 * NBYTES))


def test_longer_buffer_at_the_same_address_is_registered_anew(rig: Rig) -> None:
    array = rig.array(2 * NBYTES)
    assert rig.use(array.view(0, NBYTES), array)
    assert rig.use(array)
    assert rig.cufile.buffers == {array.pointer: 2 * NBYTES}
    assert rig.use(array.view(0, NBYTES), array)
    with rig.cache.borrow(array.pointer, NBYTES, array) as held:
        assert held
    assert rig.cufile.buffers == {array.pointer: 2 * NBYTES}


def test_registration_goes_with_the_object_that_owns_the_memory(rig: Rig) -> None:
    array = rig.array()
    assert rig.use(array)
    del array
    gc.collect()
    assert rig.cufile.buffers == {}


def test_owner_that_dies_while_the_buffer_is_in_use_is_followed_afterwards(rig: Rig) -> None:
    array = rig.array()
    pointer = array.pointer
    with rig.cache.borrow(pointer, NBYTES, array):
        del array
        gc.collect()
        assert pointer in rig.cufile.buffers
    assert rig.cufile.buffers == {}


def test_owner_without_weak_references_is_registered_for_the_transfer_only(rig: Rig) -> None:
    array = rig.array()
    assert rig.use(array, (array, "capsule"))
    assert rig.cufile.buffers == {}


@pytest.mark.parametrize("code", [5016, 5036])
def test_gpu_without_room_leaves_the_buffer_unregistered_and_says_why(rig: Rig, code: int) -> None:
    rig.cufile.codes["cuFileBufRegister"] = code
    array = rig.array()
    assert not rig.use(array)
    assert str(code) in str(rig.cache.failure)
    del rig.cufile.codes["cuFileBufRegister"]
    assert rig.use(array)
    assert rig.cache.failure is None


def test_buffer_that_the_program_registered_itself_is_left_to_it(rig: Rig) -> None:
    array = rig.array()
    rig.cufile.register_buffer(array.pointer, NBYTES)
    with rig.cache.borrow(array.pointer, NBYTES, array) as held:
        assert not held
    assert rig.cache.failure is None
    rig.cufile.errors.clear()
    rig.cufile.deregister_buffer(array.pointer)


def test_other_failure_is_an_error(rig: Rig) -> None:
    rig.cufile.codes["cuFileBufRegister"] = 5013
    with pytest.raises(CuFileError, match="5013"):
        rig.use(rig.array())


def test_forked_child_leaves_cufile_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    array = rig.array()
    assert rig.use(array)
    child = Registrations(rig.cufile, NBYTES)
    other = rig.array()
    with child.borrow(other.pointer, NBYTES, other):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        child.close()
    assert other.pointer in rig.cufile.buffers
    rig.cufile.deregister_buffer(other.pointer)

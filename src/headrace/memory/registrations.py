"""Buffers that are registered with cuFile: few, within a budget, and never longer than they live.

A registration pins memory of the GPU in its BAR1 window, which is small on many GPUs, so what was
used least recently goes first. It must not outlive the memory either: another buffer may get the
same address. It is therefore kept between transfers only while the object that owns the memory
is alive, which a weak reference tells.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.bindings.cufile import CuFile
from headrace.bindings.cufile_errors import ALREADY_REGISTERED, PINNING_FAILED, CuFileError
from headrace.errors import DeviceError


@dataclass(slots=True, eq=False)
class _Registration:
    pointer: int
    nbytes: int
    users: int = 0
    owner: weakref.ref[Any] | None = None
    is_orphan: bool = False


class Registrations:
    """A bounded cache of buffers that are registered with cuFile.

    Parameters
    ----------
    cufile
        The calls to make; its driver is open.
    budget_nbytes
        Most bytes that may be registered at a time; what does not fit is not registered.
    limit
        Most buffers.
    """

    def __init__(self, cufile: CuFile, budget_nbytes: int, limit: int = 256) -> None:
        self._cufile = cufile
        self._budget = budget_nbytes
        self._limit = limit
        self._known: OrderedDict[int, _Registration] = OrderedDict()
        # A weak reference calls at any moment, also in a thread that holds the lock.
        self._orphans: deque[_Registration] = deque()
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes that are registered now."""
        with self._lock:
            return self._nbytes()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def failure(self) -> str | None:
        """Why the last buffer that should have been registered was not; None if it was."""
        return self._failure

    @contextlib.contextmanager
    def borrow(self, pointer: int, nbytes: int, owner: object) -> Iterator[bool]:
        """Register a buffer, or find it registered, for the length of a transfer.

        Parameters
        ----------
        pointer, nbytes
            The buffer.
        owner
            Keeps the memory alive. The registration lasts as long, or, where there can be no weak
            reference to it, until the block ends.

        Yields
        ------
        bool
            Whether it is registered. If not, cuFile bounces; `failure` has the reason.

        Raises
        ------
        DeviceError
            It could not be registered for another reason than want of room.
        """
        with self._lock:
            self._drop_orphans()
            held = self._take(pointer, nbytes, owner)
        try:
            yield held is not None
        finally:
            if held is not None:
                with self._lock:
                    self._give_back(held)

    def close(self) -> None:
        """Deregister all; no transfer may be under way. Safe to call again."""
        with self._lock:
            while self._known:
                self._remove(next(iter(self._known.values())))
            self._orphans.clear()

    def _drop_orphan(self, held: _Registration) -> None:
        """Deregister a buffer before its memory is freed; soon after, if the cache is busy."""
        self._orphans.append(held)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_orphans()
            finally:
                self._lock.release()

    def _take(self, pointer: int, nbytes: int, owner: object) -> _Registration | None:
        held = self._known.get(pointer)
        if held is not None and held.nbytes < nbytes and not held.users:
            self._remove(held)
            held = None
        if held is None:
            held = self._register(pointer, nbytes, owner)
        elif held.nbytes < nbytes:
            return None  # a smaller one at the same address is in use
        if held is not None:
            held.users += 1
            self._known.move_to_end(pointer)
        return held

    def _register(self, pointer: int, nbytes: int, owner: object) -> _Registration | None:
        if not self._make_room(nbytes):
            return None
        try:
            self._cufile.register_buffer(pointer, nbytes)
        except CuFileError as error:
            if error.code == ALREADY_REGISTERED:
                return None  # by the program itself: cuFile uses that, and it is not ours to undo
            if error.code not in PINNING_FAILED:
                raise
            self._failure = str(error)
            return None
        self._failure = None
        held = self._known[pointer] = _Registration(pointer, nbytes)
        held.owner = self._watch(owner, held)
        return held

    def _watch(self, owner: object, held: _Registration) -> weakref.ref[Any] | None:
        cache = weakref.ref(self)  # the owner must not keep the cache alive

        def orphan(_: object) -> None:
            held.is_orphan = True
            registrations = cache()
            if registrations is not None:
                registrations._drop_orphan(held)  # noqa: SLF001 (a method in all but place)

        try:
            return weakref.ref(owner, orphan)
        except TypeError:
            return None

    def _make_room(self, nbytes: int) -> bool:
        """Deregister what is idle, the oldest first, for more room; False if there is none."""
        if nbytes > self._budget:
            return False
        idle = [held for held in self._known.values() if not held.users]
        while self._nbytes() + nbytes > self._budget or len(self._known) >= self._limit:
            if not idle:
                return False
            self._remove(idle.pop(0))
        return True

    def _give_back(self, held: _Registration) -> None:
        held.users -= 1
        if not held.users and (held.owner is None or held.is_orphan):
            self._remove(held)
        self._drop_orphans()

    def _drop_orphans(self) -> None:
        while self._orphans:
            held = self._orphans.popleft()
            if not held.users:
                self._remove(held)

    def _remove(self, held: _Registration) -> None:
        if self._known.get(held.pointer) is not held:
            return
        del self._known[held.pointer]
        if os.getpid() != self._pid:
            return  # in a forked child cuFile's state is undefined
        # Memory that was freed meanwhile took its registration along, on some drivers.
        with contextlib.suppress(DeviceError):
            self._cufile.deregister_buffer(held.pointer)

    def _nbytes(self) -> int:
        return sum(held.nbytes for held in self._known.values())

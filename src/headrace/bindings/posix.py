"""Files: the Protocol that every read and write goes through, and the real one over Linux."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

_CACHESTAT = 451  # the same number on every architecture; Linux 6.5
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_DIO_OFFSETS = 0x98  # offset of stx_dio_mem_align and stx_dio_offset_align in struct statx
_MADV_POPULATE_WRITE = 23
_STATX_NR = MappingProxyType({"x86_64": 332, "aarch64": 291})


class FileStatus(NamedTuple):
    """What tells whether a file is still the same file with the same bytes.

    A tuple: several are made for each transfer, compared, and looked up by.
    """

    device: int
    """``st_dev``."""
    inode: int
    """``st_ino``."""
    nbytes: int
    """``st_size``, in bytes."""
    mtime_ns: int
    """Time of the last change of the bytes, in nanoseconds."""
    ctime_ns: int
    """Time of the last change of bytes or attributes, in nanoseconds; nobody can set it."""
    mode: int
    """``st_mode``: kind and permissions."""
    uid: int
    """Owner."""

    def is_same_file(self, other: FileStatus) -> bool:
        """Whether both are of one file, in whatever state."""
        return (self.device, self.inode) == (other.device, other.inode)


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """What O_DIRECT demands on one file (statx(2), STATX_DIOALIGN)."""

    memory: int
    """Alignment of the memory address, in bytes."""
    offset: int
    """Alignment of the file offset and of the length, in bytes."""


class Mapping:
    """A shared mapping of a file, for the GPU to read or, if it is writable, to write.

    The CPU must not touch it: the process would be killed if the file were truncated meanwhile.
    """

    def __init__(self, fd: int, file_offset: int, nbytes: int, *, writable: bool = False) -> None:
        flags, prot = mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(fd, nbytes, flags=flags, prot=prot, offset=file_offset)
        view = np.frombuffer(self._mapping, np.uint8)
        self.pointer = int(view.__array_interface__["data"][0])
        self.nbytes = nbytes

    def close(self) -> None:
        """Unmap; safe to call again."""
        self._mapping.close()


class Files(Protocol):
    """The calls on files that headrace makes; `headrace.testing.FaultyFiles` breaks them."""

    def open(self, path: str, *, direct: bool = False) -> int:
        """Open for reading and return the descriptor; with `direct`, using O_DIRECT."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""

    def status(self, fd: int) -> FileStatus:
        """Status of an open file (fstat)."""

    def path_status(self, path: str) -> FileStatus:
        """Status of what the path names now (stat)."""

    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        """Read into `views` one after the other; bytes read, possibly fewer, 0 at the end."""

    def forget(self, fd: int, file_offset: int, nbytes: int) -> None:
        """Drop clean pages of the range from the page cache (POSIX_FADV_DONTNEED)."""

    def expect_random(self, fd: int) -> None:
        """Read nothing ahead of what is asked for through this descriptor (POSIX_FADV_RANDOM)."""

    def is_cached(self, fd: int, file_offset: int) -> bool:
        """Whether one byte can be had without storage (preadv2, RWF_NOWAIT); OSError if untold."""

    def cached_pages(self, fd: int, file_offset: int, nbytes: int) -> int:
        """Pages of the range in the page cache (cachestat); OSError where it cannot be told."""

    def mapped_pages(self, fd: int, file_offset: int, nbytes: int) -> int:
        """Pages of the range in the page cache (mincore on a mapping; page-aligned offset)."""

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        """What O_DIRECT demands here; None where the kernel does not say."""

    def map_shared(self, fd: int, file_offset: int, nbytes: int) -> Mapping:
        """Map a page-aligned range for reading; ValueError or OSError past the end of the file."""

    def map_for_writing(self, fd: int, file_offset: int, nbytes: int) -> Mapping:
        """Map a page-aligned range and back it with pages (MADV_POPULATE_WRITE, Linux 5.14).

        OSError where there is no room (ENOSPC), or the kernel cannot (EINVAL); ValueError past the
        end of the file.
        """

    def open_write(self, path: str, *, direct: bool = False, create: bool = False) -> int:
        """Open for reading and writing, as it is; with `create`, made if it is missing."""

    def create(self, path: str, mode: int) -> int:
        """Make a new file, less the umask, and open it; FileExistsError for a link as well."""

    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        """Write `views` one after the other; bytes written, possibly fewer."""

    def allocate(self, fd: int, file_offset: int, nbytes: int) -> None:
        """Reserve space, and grow the file to the range's end; EOPNOTSUPP where it cannot be."""

    def resize(self, fd: int, nbytes: int) -> None:
        """Cut the file, or extend it by a hole (ftruncate)."""

    def next_data(self, fd: int, file_offset: int) -> int | None:
        """First byte at or after an offset that is in no hole (SEEK_DATA); None for none."""

    def stored_nbytes(self, fd: int) -> int:
        """Bytes that the file takes where it is kept: fewer than its size if it has holes."""

    def next_hole(self, fd: int, file_offset: int) -> int | None:
        """First byte at or after an offset that is in a hole, or the file's end (SEEK_HOLE).

        None for an offset behind the end.
        """

    def sync(self, fd: int) -> None:
        """Wait until storage has the file's bytes and attributes (fsync)."""

    def sync_directory(self, path: str) -> None:
        """Wait until storage has the directory's names (fsync)."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what has that name."""

    def remove(self, path: str) -> None:
        """Remove a name (unlink)."""

    def lock(self, fd: int) -> bool:
        """Lock until it is closed (flock), without waiting; False if somebody else holds it."""

    def unlock(self, fd: int) -> None:
        """Give up the lock, also for processes that were forked meanwhile."""

    def set_mode(self, fd: int, mode: int) -> None:
        """Set the permissions (fchmod)."""

    def list_directory(self, path: str) -> list[str]:
        """Names in a directory, in no order."""


class PosixFiles:
    """`Files` over the Linux system calls."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
        offset = ctypes.c_int64
        self._libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, offset, offset)

    def open(self, path: str, *, direct: bool = False) -> int:
        """See `Files.open`."""
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        return os.open(path, flags)

    def close(self, fd: int) -> None:
        """See `Files.close`."""
        os.close(fd)

    def status(self, fd: int) -> FileStatus:
        """See `Files.status`."""
        return _file_status(os.fstat(fd))

    def path_status(self, path: str) -> FileStatus:
        """See `Files.path_status`."""
        return _file_status(os.stat(path))

    def preadv(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        """See `Files.preadv`."""
        return os.preadv(fd, views, file_offset)

    def forget(self, fd: int, file_offset: int, nbytes: int) -> None:
        """See `Files.forget`."""
        os.posix_fadvise(fd, file_offset, nbytes, os.POSIX_FADV_DONTNEED)

    def expect_random(self, fd: int) -> None:
        """See `Files.expect_random`."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def is_cached(self, fd: int, file_offset: int) -> bool:
        """See `Files.is_cached`."""
        try:
            return os.preadv(fd, [bytearray(1)], file_offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False

    def cached_pages(self, fd: int, file_offset: int, nbytes: int) -> int:
        """See `Files.cached_pages`."""
        wanted = (ctypes.c_uint64 * 2)(file_offset, nbytes)
        found = (ctypes.c_uint64 * 5)()
        self._syscall("cachestat", _CACHESTAT, ctypes.c_uint(fd), wanted, found, ctypes.c_uint(0))
        return int(found[0])

    def mapped_pages(self, fd: int, file_offset: int, nbytes: int) -> int:
        """See `Files.mapped_pages`."""
        pages = -(-nbytes // mmap.PAGESIZE)
        resident = ctypes.create_string_buffer(pages)
        with mmap.mmap(
            fd,
            nbytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=file_offset,
        ) as mapping:
            anchor = ctypes.c_char.from_buffer(mapping)
            try:
                rc = self._libc.mincore(ctypes.addressof(anchor), nbytes, resident)
            finally:
                del anchor  # the mapping cannot close while ctypes points into it
            _check("mincore", rc)
        return sum(byte & 1 for byte in resident.raw)

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        """See `Files.direct_alignment`."""
        number = _STATX_NR.get(os.uname().machine)
        if number is None:
            return None
        record = ctypes.create_string_buffer(256)
        self._syscall(
            "statx",
            number,
            ctypes.c_int(fd),
            ctypes.c_char_p(b""),
            ctypes.c_int(_AT_EMPTY_PATH),
            ctypes.c_uint(_STATX_DIOALIGN),
            record,
        )
        answered = struct.unpack_from("I", record, 0)[0] & _STATX_DIOALIGN
        memory, offset = struct.unpack_from("II", record, _STATX_DIO_OFFSETS)
        return DirectAlignment(memory, offset) if answered and memory and offset else None

    def map_shared(self, fd: int, file_offset: int, nbytes: int) -> Mapping:
        """See `Files.map_shared`."""
        return Mapping(fd, file_offset, nbytes)

    def map_for_writing(self, fd: int, file_offset: int, nbytes: int) -> Mapping:
        """See `Files.map_for_writing`."""
        mapping = Mapping(fd, file_offset, nbytes, writable=True)
        try:
            _check("madvise", self._libc.madvise(mapping.pointer, nbytes, _MADV_POPULATE_WRITE))
        except OSError as error:
            mapping.close()
            if error.errno == errno.EFAULT:  # where a touch would be answered with a signal
                full = OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (or it was truncated)")
                raise full from error
            raise
        return mapping

    def open_write(self, path: str, *, direct: bool = False, create: bool = False) -> int:
        """See `Files.open_write`."""
        flags = os.O_RDWR | os.O_CLOEXEC
        flags |= (os.O_DIRECT if direct else 0) | (os.O_CREAT if create else 0)
        return os.open(path, flags, 0o666)

    def create(self, path: str, mode: int) -> int:
        """See `Files.create`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, mode)

    def pwritev(self, fd: int, views: Sequence[memoryview], file_offset: int) -> int:
        """See `Files.pwritev`."""
        return os.pwritev(fd, views, file_offset)

    def allocate(self, fd: int, file_offset: int, nbytes: int) -> None:
        """See `Files.allocate`."""
        # Not posix_fallocate, which writes the whole range where the file system cannot reserve.
        _check("fallocate", self._libc.fallocate(fd, 0, file_offset, nbytes))

    def resize(self, fd: int, nbytes: int) -> None:
        """See `Files.resize`."""
        os.ftruncate(fd, nbytes)

    def next_data(self, fd: int, file_offset: int) -> int | None:
        """See `Files.next_data`."""
        return _seek(fd, file_offset, os.SEEK_DATA)

    def stored_nbytes(self, fd: int) -> int:
        """See `Files.stored_nbytes`."""
        return os.fstat(fd).st_blocks * 512  # whatever the block size of the file system

    def next_hole(self, fd: int, file_offset: int) -> int | None:
        """See `Files.next_hole`."""
        return _seek(fd, file_offset, os.SEEK_HOLE)

    def sync(self, fd: int) -> None:
        """See `Files.sync`."""
        os.fsync(fd)

    def sync_directory(self, path: str) -> None:
        """See `Files.sync_directory`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """See `Files.rename`."""
        os.rename(old, new)

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        os.unlink(path)

    def lock(self, fd: int) -> bool:
        """See `Files.lock`."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """See `Files.unlock`."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def set_mode(self, fd: int, mode: int) -> None:
        """See `Files.set_mode`."""
        os.fchmod(fd, mode)

    def list_directory(self, path: str) -> list[str]:
        """See `Files.list_directory`."""
        return os.listdir(path)

    def _syscall(self, name: str, number: int, *arguments: object) -> None:
        _check(name, self._libc.syscall(ctypes.c_long(number), *arguments))


def _check(name: str, rc: int) -> None:
    """Raise the OSError of a C call that returned -1."""
    if rc == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {errno.errorcode.get(code, code)}: {os.strerror(code)}")


def _seek(fd: int, file_offset: int, whence: int) -> int | None:
    """Look for data or a hole; nothing here depends on the position that this leaves."""
    try:
        return os.lseek(fd, file_offset, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


def _file_status(status: os.stat_result) -> FileStatus:
    return FileStatus(
        device=status.st_dev,
        inode=status.st_ino,
        nbytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        mode=status.st_mode,
        uid=status.st_uid,
    )

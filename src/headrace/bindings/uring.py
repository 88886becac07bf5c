"""io_uring: whether this process may make a ring."""

from __future__ import annotations

import ctypes
import errno

_IO_URING_SETUP = 425  # the same number on every architecture


def io_uring_errno() -> int:
    """What the kernel says to a request for a ring; 0 where it would make one.

    The request names no parameters, so that no ring comes of it: a kernel that would make one
    answers EFAULT. Others answer ENOSYS (before Linux 5.1, or built without it) or EPERM
    (switched off by ``kernel.io_uring_disabled``, or by the filter of a container).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), None)
    code = ctypes.get_errno()
    return 0 if code == errno.EFAULT else code

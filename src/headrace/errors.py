"""The exception tree of headrace.

::

    HeadraceError
    ├── FormatError       (ValueError)    a file is not what its format demands
    ├── RouteUnavailable  (RuntimeError)  a forced route cannot serve; carries every rejection
    ├── ShortRead         (EOFError)      fewer bytes exist than were asked for
    ├── SourceChanged     (OSError)       a file was truncated, rewritten or replaced meanwhile
    ├── DeviceError       (RuntimeError)  a call to the GPU driver failed
    └── BufferMismatch    (ValueError)    a buffer is not what the transfer needs

Errors of the operating system stay themselves: ``FileNotFoundError``, ``PermissionError``,
``IsADirectoryError``, ``OSError``. Each error here is also the builtin that people already catch.
"""


class HeadraceError(Exception):
    """Root of every error that headrace itself raises."""


class FormatError(HeadraceError, ValueError):
    """A file is not what its format demands: truncated, malformed, inconsistent."""


class RouteUnavailable(HeadraceError, RuntimeError):  # noqa: N818 (name fixed by the public API)
    """A forced route, or every route, cannot serve; the message lists each reason and remedy."""


class ShortRead(HeadraceError, EOFError):  # noqa: N818 (name fixed by the public API)
    """The file holds fewer bytes than were asked for."""


class SourceChanged(HeadraceError, OSError):  # noqa: N818 (name fixed by the public API)
    """The file was truncated, rewritten or replaced while it was read; the result is void."""


class DeviceError(HeadraceError, RuntimeError):
    """A call to the GPU driver failed; the message has the call, its code and its name."""


class BufferMismatch(HeadraceError, ValueError):  # noqa: N818 (name fixed by the public API)
    """A buffer is too small, read-only, not contiguous, or on the wrong device."""

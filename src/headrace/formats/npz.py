"""NumPy's .npz: a zip archive of .npy files, which NumPy itself reads."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.formats.catalog import TensorSpec
from headrace.formats.npy import HEAD_NBYTES, read_spec
from headrace.formats.raw import guess_kind, open_regular

_MEMBER = ".npy"
_HEAD_NBYTES = 64
_REST_NBYTES = 1 << 20
_REFUSALS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)
"""What zipfile and NumPy raise on an archive that is damaged, encrypted or packed otherwise."""


class Archive:
    """An open .npz file; a context manager, which closes it.

    Parameters
    ----------
    path
        The file, compressed or not. Nothing in it is unpickled.

    Raises
    ------
    FormatError
        It is no sound zip archive, or a member is no .npy file, is malformed, or holds Python
        objects.
    FileNotFoundError, PermissionError, IsADirectoryError
        As the operating system says.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        """The file."""
        self._members: dict[str, zipfile.ZipInfo] = {}
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_regular(path))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            try:
                self._zip = stack.enter_context(zipfile.ZipFile(file))
            except _REFUSALS as error:
                file.seek(0)
                raise FormatError(
                    f"{path} is no valid .npz file: {error}; {guess_kind(file.read(_HEAD_NBYTES))}"
                ) from error
            self.tensors = tuple(self._describe(info) for info in self._zip.infolist())
            """Its arrays; each range is one of the unpacked member."""
            self._open = stack.pop_all()

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def read(self, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Read arrays whole, and compare each member with the CRC-32 in the archive.

        Raises
        ------
        FormatError
            A member is damaged.
        OSError, MemoryError
            As the operating system says.
        """
        arrays = {}
        for name in names:
            with self._refusing(self._members[name]) as member:
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
                while member.read(_REST_NBYTES):  # the CRC-32 is compared at the very end
                    pass
        return arrays

    def _describe(self, info: zipfile.ZipInfo) -> TensorSpec:
        label, name = f"{self.path}, member {info.filename!r}", info.filename.removesuffix(_MEMBER)
        if name == info.filename:
            raise FormatError(f"{label} is no {_MEMBER} file; save the arrays with numpy.savez")
        if name in self._members:
            raise FormatError(f"{label} occurs twice; save the arrays with numpy.savez")
        self._members[name] = info
        with self._refusing(info) as member:
            head = member.read(HEAD_NBYTES)
        return read_spec(name, label, head, info.file_size)

    @contextlib.contextmanager
    def _refusing(self, info: zipfile.ZipInfo) -> Iterator[Any]:
        """Open a member, and turn what is raised on bad input into `FormatError`."""
        try:
            with self._zip.open(info) as member:
                yield member
        except _REFUSALS as error:
            raise FormatError(
                f"{self.path}, member {info.filename!r} cannot be read: {error}; "
                "download or write the archive again"
            ) from error

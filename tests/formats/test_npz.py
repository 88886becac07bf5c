from __future__ import annotations

import errno
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import FormatError
from headrace.formats.npz import Archive
from tests.support import open_descriptors

ARRAYS = {
    "weight": np.arange(100_000, dtype=np.float32).reshape(100, 1000),
    "layers/0.bias": np.asfortranarray(np.arange(12, dtype=">i2").reshape(3, 4)),
    "scalar": np.array(7, np.uint8),
    "empty": np.zeros((0, 3), np.float64),
}


def member(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def pack(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_array_is_described_and_read_as_numpy_does(save: object, tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    save(path, **ARRAYS)  # type: ignore[operator]
    with Archive(str(path)) as archive:
        described = {spec.name: (spec.dtype, spec.shape) for spec in archive.tensors}
        found = archive.read(list(ARRAYS))
    assert described == {
        "weight": ("F32", (100, 1000)),
        "layers/0.bias": (">i2", (3, 4)),
        "scalar": ("U8", ()),
        "empty": ("F64", (0, 3)),
    }
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_an_archive_without_arrays_is_empty(tmp_path: Path) -> None:
    with Archive(str(pack(tmp_path / "none.npz", {}))) as archive:
        assert archive.tensors == ()


def test_arrays_of_objects_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "objects.npz"
    np.savez(path, fine=np.ones(3), bad=np.array([{}, None], dtype=object))
    with pytest.raises(FormatError, match=r"member 'bad\.npy'.*Python objects"):
        Archive(str(path))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x00" * 400, b"\x93NUMPY\x01\x00v"])
def test_what_is_no_archive_is_a_format_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    before = open_descriptors()
    with pytest.raises(FormatError, match=r"bad\.npz is no valid \.npz file"):
        Archive(str(path))
    assert open_descriptors() == before


def test_a_pickle_in_place_of_an_archive_is_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "pickled.npz"
    np.array([1], dtype=object).dump(path)
    with pytest.raises(FormatError, match="is no valid"):
        Archive(str(path))


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"notes.txt": b"text"}, "is no .npy file"),
        ({"a.npy": b"no header"}, "is no valid .npy file"),
        ({"a.npy": member(np.ones(1000))[:-8]}, "promises an array of 8000 bytes"),
    ],
)
def test_members_that_are_no_arrays_are_named(
    members: dict[str, bytes], why: str, tmp_path: Path
) -> None:
    path = pack(tmp_path / "odd.npz", members)
    with pytest.raises(FormatError, match=rf"member '{next(iter(members))}'.*{why}"):
        Archive(str(path))


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "twice.npz", "w") as archive:
        archive.writestr("a.npy", member(np.ones(2)))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.npy", member(np.ones(3)))
    with pytest.raises(FormatError, match="occurs twice"):
        Archive(str(tmp_path / "twice.npz"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.99])
def test_a_damaged_member_is_a_format_error(save: object, fraction: float, tmp_path: Path) -> None:
    path = tmp_path / "damaged.npz"
    array = np.random.default_rng(0).integers(0, 7, 100_000, dtype=np.uint8)
    save(path, a=array)  # type: ignore[operator]
    with zipfile.ZipFile(path) as archive:
        stop = archive.infolist()[0].compress_size
    whole = bytearray(path.read_bytes())
    whole[int(stop * fraction)] ^= 0xFF
    path.write_bytes(whole)
    with Archive(str(path)) as archive, pytest.raises(FormatError, match=r"member 'a\.npy'"):
        archive.read(["a"])


def test_bytes_after_the_array_are_compared_with_the_checksum_too(tmp_path: Path) -> None:
    mark = b"the end of the member"
    path = pack(tmp_path / "trailing.npz", {"a.npy": member(np.ones(10)) + bytes(1 << 17) + mark})
    path.write_bytes(path.read_bytes().replace(mark, mark.upper()))
    with Archive(str(path)) as archive, pytest.raises(FormatError, match="CRC-32"):
        archive.read(["a"])


def test_a_missing_archive_and_a_directory_are_errors_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Archive(str(tmp_path / "absent.npz"))
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        Archive(str(tmp_path / "folder.npz"))
    assert caught.value.errno == errno.EISDIR
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(FormatError, match="no regular file"):
        Archive(str(tmp_path / "pipe.npz"))

"""FormatSuite: what every format reader must do, as tests to inherit.

::

    class TestMine(FormatSuite):
        def write(self, path, arrays): my_format.save(path, arrays)
        def read_catalog(self, path): return my_reader.read_catalog(path)

Import it as ``from headrace.testing import FormatSuite``: failures then show their values.
"""

# ruff: noqa: D102 (the names of tests are sentences and stand for docstrings)

from __future__ import annotations

import math
import os
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headrace.errors import FormatError
from headrace.formats.catalog import Catalog, TensorSpec
from headrace.formats.dtypes import dtype_name, itembits, numpy_dtype

_NOBODY = 65_534  # the user without rights on every Linux

# Each subclass runs the same test functions, which Hypothesis would otherwise take for a mistake.
_property = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.differing_executors]
)


class FormatSuite(ABC):
    """Tests that a reader of a format must pass; a subclass says how to write and read it."""

    __test__ = False

    dtypes: ClassVar[tuple[str, ...]] = (
        *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
        *("F16", "F32", "F64", "C64", "BF16", "F8_E4M3", "F8_E5M2"),
    )
    """Element types that the format holds, as `TensorSpec.dtype` names them."""
    holds_one_unnamed: ClassVar[bool] = False
    """Whether a file holds exactly one array, whose name is ""."""
    holds_fortran: ClassVar[bool] = False
    """Whether arrays in Fortran order keep it in the file."""
    accepts_trailing_bytes: ClassVar[bool] = False
    """Whether bytes behind the last array are allowed."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let pytest collect the subclass, unless that says otherwise itself."""
        super().__init_subclass__(**options)
        if "__test__" not in cls.__dict__:
            cls.__test__ = True

    @abstractmethod
    def write(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a file with the format's own library; one array named "" if it has no names."""

    @abstractmethod
    def read_catalog(self, path: str) -> Catalog:
        """Call the reader under test."""

    @_property
    @given(data=st.data())
    def test_file_ranges_hold_the_bytes_of_the_arrays(self, data: st.DataObject) -> None:
        arrays = data.draw(self._draw_arrays())
        with _fresh_path() as path:
            self.write(path, arrays)
            catalog = self.read_catalog(str(path))
            assert {spec.name for spec in catalog.tensors} == set(arrays)
            assert len(catalog.tensors) == len(arrays)
            for spec in catalog.tensors:
                array = arrays[spec.name]
                assert spec.shape == array.shape
                assert spec.dtype == dtype_name(array.dtype)
                assert numpy_dtype(spec.dtype) == array.dtype
                assert _pread(path, spec) == array.tobytes(order=spec.order)

    @_property
    @given(data=st.data())
    def test_tensors_are_in_file_order_and_do_not_overlap(self, data: st.DataObject) -> None:
        arrays = data.draw(self._draw_arrays())
        with _fresh_path() as path:
            self.write(path, arrays)
            ranges = [spec.file_range for spec in self.read_catalog(str(path)).tensors]
            bounds = [bound for span in ranges for bound in (span.start, span.stop)]
            assert bounds == sorted(bounds)
            assert all(0 <= bound <= path.stat().st_size for bound in bounds)

    @_property
    @given(data=st.data())
    def test_damaged_header_is_a_format_error_or_stays_in_bounds(self, data: st.DataObject) -> None:
        with _fresh_path() as path:
            self.write(path, self._small_arrays())
            content = bytearray(path.read_bytes())
            specs = self.read_catalog(str(path)).tensors
            header_nbytes = min(spec.file_range.start for spec in specs)
            damage = st.tuples(st.integers(0, header_nbytes - 1), st.integers(0, 255))
            for place, byte in data.draw(st.lists(damage, min_size=1, max_size=4)):
                content[place] = byte
            path.write_bytes(content)
            self._read_damaged(path)

    @_property
    @given(content=st.binary(max_size=200), keep=st.integers(0, 64))
    def test_noise_is_a_format_error_or_stays_in_bounds(self, content: bytes, keep: int) -> None:
        with _fresh_path() as path:
            self.write(path, self._small_arrays())
            path.write_bytes(path.read_bytes()[:keep] + content)
            self._read_damaged(path)

    def test_file_cut_short_at_any_length_is_a_format_error(self, tmp_path: Path) -> None:
        path = tmp_path / "cut"
        self.write(path, self._small_arrays())
        content = path.read_bytes()
        for nbytes in range(len(content)):
            path.write_bytes(content[:nbytes])
            with pytest.raises(FormatError) as caught:
                self.read_catalog(str(path))
            assert str(path) in str(caught.value)

    def test_trailing_bytes_are_judged_as_the_format_says(self, tmp_path: Path) -> None:
        path = tmp_path / "long"
        self.write(path, self._small_arrays())
        before = self.read_catalog(str(path))
        path.write_bytes(path.read_bytes() + b"more")
        if self.accepts_trailing_bytes:
            assert self.read_catalog(str(path)) == before
        else:
            with pytest.raises(FormatError):
                self.read_catalog(str(path))

    def test_catalog_names_its_file_and_has_text_metadata(self, tmp_path: Path) -> None:
        path = tmp_path / "named"
        self.write(path, self._small_arrays())
        catalog = self.read_catalog(str(path))
        assert catalog.path == str(path)
        assert all(isinstance(text, str) for pair in catalog.metadata.items() for text in pair)

    def test_path_that_is_no_utf8_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "plain"
        self.write(path, self._small_arrays())
        odd = tmp_path / os.fsdecode(b"\xff\xfe odd")
        try:
            path.rename(odd)
        except OSError:
            pytest.skip("this file system takes only UTF-8 names")
        assert self.read_catalog(str(odd)).tensors

    def test_missing_file_is_a_file_not_found_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            self.read_catalog(str(tmp_path / "missing"))

    def test_directory_is_an_is_a_directory_error(self, tmp_path: Path) -> None:
        with pytest.raises(IsADirectoryError):
            self.read_catalog(str(tmp_path))

    def test_file_without_read_permission_is_a_permission_error(self, tmp_path: Path) -> None:
        path = tmp_path / "locked"
        self.write(path, self._small_arrays())
        path.chmod(0)
        with _ordinary_user(), pytest.raises(PermissionError):
            self.read_catalog(str(path))

    def test_pipe_is_a_format_error_and_does_not_block(self, tmp_path: Path) -> None:
        path = tmp_path / "pipe"
        os.mkfifo(path)
        with pytest.raises(FormatError, match="no regular file"):
            self.read_catalog(str(path))

    def test_git_lfs_pointer_says_what_to_run(self, tmp_path: Path) -> None:
        path = tmp_path / "pointer"
        path.write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
        )
        with pytest.raises(FormatError, match="git lfs pull"):
            self.read_catalog(str(path))

    def test_no_descriptor_stays_open(self, tmp_path: Path) -> None:
        path = tmp_path / "sound"
        self.write(path, self._small_arrays())
        broken = tmp_path / "broken"
        broken.write_bytes(path.read_bytes()[:-1])
        before = os.listdir("/proc/self/fd")
        self.read_catalog(str(path))
        with pytest.raises(FormatError):
            self.read_catalog(str(broken))
        assert os.listdir("/proc/self/fd") == before

    def _read_damaged(self, path: Path) -> None:
        """Read a file that may be anything; whatever is described must be possible."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of headers that Python 2 wrote
            try:
                specs = self.read_catalog(str(path)).tensors
            except FormatError:
                return
            for spec in specs:
                assert 0 <= spec.file_range.start <= spec.file_range.stop <= path.stat().st_size
                bits = math.prod(spec.shape) * itembits(spec.dtype)
                assert spec.file_range.nbytes * 8 == bits

    def _small_arrays(self) -> dict[str, np.ndarray]:
        """Arrays whose last byte is at the end of the file, so that each lost byte is missed."""
        array = np.arange(1, 7, dtype=numpy_dtype("I32")).reshape(2, 3)
        return {"": array} if self.holds_one_unnamed else {"first": array, "second": array + 1}

    def _draw_arrays(self) -> st.SearchStrategy[dict[str, np.ndarray]]:
        one = st.sampled_from(self.dtypes).flatmap(_arrays)
        if self.holds_fortran:
            one = st.one_of(one, one.map(np.asfortranarray))
        if self.holds_one_unnamed:
            return one.map(lambda array: {"": array})
        letters = st.characters(exclude_categories=["Cs"])  # no UTF-8 for lone surrogates
        names = st.text(letters, max_size=8).filter(lambda name: name != "__metadata__")
        return st.dictionaries(names, one, max_size=6)


def _arrays(name: str) -> st.SearchStrategy[np.ndarray]:
    """Arrays of any content and shape, 0-d and empty ones too."""
    dtype = numpy_dtype(name)
    shapes = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)

    def fill(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
        nbytes = math.prod(shape) * dtype.itemsize
        seeds = st.integers(0, 2**32 - 1)
        return seeds.map(
            lambda seed: np.frombuffer(
                np.random.default_rng(seed).bytes(nbytes), dtype, count=math.prod(shape)
            ).reshape(shape)
        )

    return shapes.flatmap(fill)


def _pread(path: Path, spec: TensorSpec) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, spec.file_range.nbytes, spec.file_range.start)
    finally:
        os.close(fd)


@contextmanager
def _fresh_path() -> Iterator[Path]:
    """Give a path for one Hypothesis example; `tmp_path` would be shared by all examples."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "file")


@contextmanager
def _ordinary_user() -> Iterator[None]:
    """Give up the right of root to read every file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(user)

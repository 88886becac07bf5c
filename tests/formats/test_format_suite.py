from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import FormatError
from headrace.formats import npy
from headrace.formats.catalog import Catalog
from headrace.testing import FormatSuite
from headrace.types import ByteRange


class NpySuite(FormatSuite):
    __test__ = False
    dtypes = ("F32", "U8")
    holds_one_unnamed = True
    holds_fortran = True
    accepts_trailing_bytes = True

    def write(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        with path.open("wb") as file:
            np.save(file, arrays[""])

    def read_catalog(self, path: str) -> Catalog:
        return npy.read_catalog(path)


class OffByOne(NpySuite):
    __test__ = False

    def read_catalog(self, path: str) -> Catalog:
        catalog = npy.read_catalog(path)
        (spec,) = catalog.tensors
        span = ByteRange(spec.file_range.start - 1, spec.file_range.stop - 1)
        return replace(catalog, tensors=(replace(spec, file_range=span),))


class ForgetsTheOrder(NpySuite):
    __test__ = False

    def read_catalog(self, path: str) -> Catalog:
        catalog = npy.read_catalog(path)
        return replace(catalog, tensors=(replace(catalog.tensors[0], order="C"),))


class LetsErrorsThrough(NpySuite):
    __test__ = False

    def read_catalog(self, path: str) -> Catalog:
        try:
            return npy.read_catalog(path)
        except FormatError as error:
            raise KeyError("what the library raised") from error


class KeepsFilesOpen(NpySuite):
    __test__ = False
    kept: list[object]

    def read_catalog(self, path: str) -> Catalog:
        self.kept = [*getattr(self, "kept", ()), open(path, "rb")]  # noqa: SIM115
        return npy.read_catalog(path)


def fails(test: Callable[..., None], *arguments: object) -> bool:
    """Whether a test of the suite finds the fault, which may take more than one draw."""
    for _ in range(5):
        try:
            test(*arguments)
        except (AssertionError, KeyError, ExceptionGroup):  # Hypothesis groups several faults
            return True
    return False


def test_base_is_not_collected_and_subclasses_are() -> None:
    class Mine(NpySuite):
        pass

    assert not FormatSuite.__test__
    assert not NpySuite.__test__
    assert Mine.__test__


def test_reader_that_is_off_by_one_fails() -> None:
    assert not fails(NpySuite().test_file_ranges_hold_the_bytes_of_the_arrays)
    assert fails(OffByOne().test_file_ranges_hold_the_bytes_of_the_arrays)


def test_reader_that_forgets_the_order_fails() -> None:
    assert fails(ForgetsTheOrder().test_file_ranges_hold_the_bytes_of_the_arrays)


def test_reader_that_lets_errors_of_its_library_through_fails(tmp_path: Path) -> None:
    assert fails(LetsErrorsThrough().test_damaged_header_is_a_format_error_or_stays_in_bounds)
    assert fails(LetsErrorsThrough().test_file_cut_short_at_any_length_is_a_format_error, tmp_path)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_reader_that_keeps_files_open_fails(tmp_path: Path) -> None:
    suite = KeepsFilesOpen()
    assert fails(suite.test_no_descriptor_stays_open, tmp_path)
    for file in suite.kept:
        file.close()  # type: ignore[attr-defined]

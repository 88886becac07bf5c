from __future__ import annotations

import errno
import inspect
import pickle

import pytest

import headrace as hr
from headrace import errors

BUILTIN_OF = {
    hr.FormatError: ValueError,
    hr.RouteUnavailable: RuntimeError,
    hr.ShortRead: EOFError,
    hr.SourceChanged: OSError,
    hr.DeviceError: RuntimeError,
    hr.BufferMismatch: ValueError,
}


@pytest.mark.parametrize(("error", "builtin"), BUILTIN_OF.items(), ids=lambda each: each.__name__)
def test_error_is_a_headrace_error_and_the_builtin_that_people_catch(
    error: type[hr.HeadraceError], builtin: type[Exception]
) -> None:
    assert error.__bases__ == (hr.HeadraceError, builtin)


def test_root_is_nothing_but_an_exception() -> None:
    assert hr.HeadraceError.__bases__ == (Exception,)


def test_every_error_of_the_tree_is_public_and_drawn_at_the_top_of_the_file() -> None:
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
    assert set(classes) == {*BUILTIN_OF, hr.HeadraceError}
    for each in classes:
        assert getattr(hr, each.__name__) is each
        assert each.__name__ in hr.__all__
        assert each.__name__ in (errors.__doc__ or "")


def test_changed_source_carries_number_and_path_as_an_os_error_does() -> None:
    error = hr.SourceChanged(errno.ESTALE, "it was truncated", "/some/file")
    assert (error.errno, error.filename) == (errno.ESTALE, "/some/file")
    assert "/some/file" in str(error)


@pytest.mark.parametrize("error", BUILTIN_OF, ids=lambda each: each.__name__)
def test_error_survives_the_way_to_another_process(error: type[hr.HeadraceError]) -> None:
    arguments = (errno.ESTALE, "why", "path") if error is hr.SourceChanged else ("why",)
    again = pickle.loads(pickle.dumps(error(*arguments)))
    assert (type(again), str(again)) == (error, str(error(*arguments)))

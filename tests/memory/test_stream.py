from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.bindings.cuda import LEGACY_STREAM
from headrace.memory.stream import parse_stream


class ByMethod:
    """As cuda.core's streams."""

    def __init__(self, *answer: Any) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


class ByAttribute:
    """As older streams of cuda.core."""

    def __init__(self, *answer: Any) -> None:
        self.__cuda_stream__ = answer


def torch_stream(handle: Any) -> Any:
    return SimpleNamespace(cuda_stream=handle, wait_event=print)


def cupy_stream(handle: Any) -> Any:
    return SimpleNamespace(ptr=handle, wait_event=print)


def by_method(handle: Any) -> Any:
    return ByMethod(0, handle)


def by_attribute(handle: Any) -> Any:
    return ByAttribute(0, handle)


def as_it_is(handle: Any) -> Any:
    return handle


KINDS = [torch_stream, cupy_stream, by_method, by_attribute, as_it_is]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("handle", [1, 2, 3, 0x7F00_1234_5678])
def test_handle_is_what_the_stream_says(make: Any, handle: int) -> None:
    assert parse_stream(make(handle)) == handle


@pytest.mark.parametrize("make", KINDS)
def test_handle_of_zero_is_the_legacy_stream(make: Any) -> None:
    assert parse_stream(make(0)) == LEGACY_STREAM == 1


@pytest.mark.parametrize("make", KINDS)
def test_negative_handle_is_a_value_error(make: Any) -> None:
    with pytest.raises(ValueError, match="has the handle -1; a handle is 0 or more"):
        parse_stream(make(-1))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("handle", [True, False, None, 5.0, "5"])
def test_handle_that_is_no_integer_is_a_type_error(make: Any, handle: Any) -> None:
    with pytest.raises(TypeError, match=r"pass a torch\.cuda\.Stream"):
        parse_stream(make(handle))


@pytest.mark.parametrize("stream", [object(), (0, 5), b"5", [5], {}], ids=repr)
def test_what_is_no_stream_is_a_type_error_that_says_what_is(stream: Any) -> None:
    with pytest.raises(TypeError) as caught:
        parse_stream(stream)
    for word in (repr(stream), "torch.cuda.Stream", "cupy.cuda.Stream", "__cuda_stream__", "int"):
        assert word in str(caught.value)


def test_pointer_that_is_no_stream_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        parse_stream(SimpleNamespace(ptr=0x7000))


def test_protocol_comes_before_the_attributes() -> None:
    stream = torch_stream(5)
    stream.__cuda_stream__ = (0, 6)
    assert parse_stream(stream) == 6


def test_protocol_of_another_version_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="is of version 1; only 0 is known"):
        parse_stream(ByMethod(1, 5))


@pytest.mark.parametrize("answer", [(), (0,), (0, 5, 6)], ids=repr)
def test_answer_of_another_length_is_a_type_error(answer: Any) -> None:
    with pytest.raises(TypeError, match=r"\(version, handle\) is wanted"):
        parse_stream(ByMethod(*answer))


def test_answer_that_is_no_tuple_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"gives 5; \(version, handle\) is wanted"):
        parse_stream(SimpleNamespace(__cuda_stream__=5))

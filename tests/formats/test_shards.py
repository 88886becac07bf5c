from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FormatError
from headrace.formats.checkpoint import find_files, read_checkpoint
from headrace.formats.dtypes import tensor_nbytes
from headrace.formats.safetensors_layout import Described, lay_out
from headrace.formats.shards import shard_index, split_shards


def of_sizes(sizes: list[int]) -> list[Described]:
    return [Described(str(i), "U8", (nbytes,)) for i, nbytes in enumerate(sizes)]


def size(shard: tuple[Described, ...]) -> int:
    return sum(tensor_nbytes(tensor.dtype, tensor.shape) for tensor in shard)


@pytest.mark.parametrize(
    ("sizes", "limit", "shards"),
    [
        ([6, 6, 2, 6, 2, 2], 10, [[6], [6, 2], [6, 2, 2]]),
        ([], 10, []),
        ([10], 10, [[10]]),
        ([11], 10, [[11]]),
        ([3, 11, 4], 10, [[11], [3, 4]]),
        ([11, 12], 10, [[11], [12]]),
        ([0, 10, 0, 0], 10, [[0, 10, 0, 0]]),
        ([10, 1], 10, [[10], [1]]),
        ([0, 11, 0], 10, [[11], [0, 0]]),
    ],
)
def test_tensors_are_split_as_huggingface_hub_splits_them(
    sizes: list[int], limit: int, shards: list[list[int]]
) -> None:
    split = split_shards(of_sizes(sizes), limit)
    assert [[tensor.shape[0] for tensor in shard] for shard in split] == shards


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_every_tensor_is_in_one_shard_and_only_a_single_one_exceeds_the_limit(
    sizes: list[int], limit: int
) -> None:
    tensors = of_sizes(sizes)
    shards = split_shards(tensors, limit)
    dealt = [tensor for shard in shards for tensor in shard]
    assert sorted(dealt, key=tensors.index) == tensors
    assert all(shards)
    assert all(size(shard) <= limit or len(shard) == 1 for shard in shards)
    small = [tensor for tensor in dealt if size((tensor,)) <= limit]
    assert small == [tensor for tensor in tensors if size((tensor,)) <= limit]


def test_packed_types_count_in_bytes() -> None:
    tensors = [Described("a", "F4", (8,)), Described("b", "F4", (8,))]
    assert split_shards(tensors, 8) == (tuple(tensors),)
    assert split_shards(tensors, 7) == ((tensors[0],), (tensors[1],))


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_is_a_value_error(limit: int) -> None:
    with pytest.raises(ValueError, match=f"max_shard_nbytes is {limit}"):
        split_shards([], limit)


def test_unknown_type_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="F99"):
        split_shards([Described("a", "F99", (1,))], 10)


def test_index_is_sorted_indented_and_ends_with_a_newline() -> None:
    index = shard_index({"b": "2.safetensors", "a\n": "é"}, 7, {"z": "1", "total_size": "9"})
    assert index.decode("ascii") == (
        "{\n"
        '  "metadata": {\n'
        '    "total_size": 7,\n'
        '    "z": "1"\n'
        "  },\n"
        '  "weight_map": {\n'
        '    "a\\n": "\\u00e9",\n'
        '    "b": "2.safetensors"\n'
        "  }\n"
        "}\n"
    )


@given(st.dictionaries(st.text(), st.text(min_size=1)), st.integers(0, 2**63))
def test_index_is_json_with_the_same_contents(weight_map: dict[str, str], total: int) -> None:
    assert json.loads(shard_index(weight_map, total)) == {
        "metadata": {"total_size": total},
        "weight_map": weight_map,
    }


def test_written_checkpoint_is_read_back_by_its_index(tmp_path: Path) -> None:
    tensors = [*of_sizes([6, 6, 2, 6, 2, 2]), Described('名"\n', "F32", ())]
    weight_map = {}
    shards = split_shards(tensors, 10)
    layouts = []
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layout = lay_out(shard, {"format": "pt"})
        (tmp_path / name).write_bytes(layout.header + bytes(layout.nbytes - len(layout.header)))
        weight_map.update({tensor.name: name for tensor in shard})
        layouts.append(layout)
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(shard_index(weight_map, sum(map(size, shards))))
    assert find_files(tmp_path) == tuple(
        str(tmp_path / name) for name in sorted(set(weight_map.values()))
    )
    catalogs = read_checkpoint(index)
    assert [catalog.tensors for catalog in catalogs] == [layout.tensors for layout in layouts]

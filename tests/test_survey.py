from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.bindings.sysfs import Linux
from headrace.errors import SourceChanged
from headrace.probing.fact import Fact
from headrace.survey import (
    GpuProbes,
    Survey,
    Want,
    name_source,
    open_sources,
    select,
    survey,
    want_any,
    want_checkpoint,
)
from headrace.testing import FaultyFiles
from tests.support import PAGE, RecordedSystem, write_random

NOT_LOOKED_FOR = Fact("CUDA device", None, "not looked for", "made up")
GPU = GpuProbes(NOT_LOOKED_FOR, NOT_LOOKED_FOR, lambda _: NOT_LOOKED_FOR)
MOUNTINFO = "/proc/self/mountinfo"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for number, names in enumerate((("a", "b"), ("c",)), 1):
        save_file(
            {name: np.arange(2000 * number, dtype=np.float32) for name in names},
            tmp_path / f"model-0000{number}-of-00002.safetensors",
        )
    return tmp_path


def look(want: Want, files: FaultyFiles | None = None, system: Any = None) -> Survey:
    with open_sources(want.paths, files or FaultyFiles()) as sources:
        wanted = select(want.describe(sources), want.names)
        return survey(sources, wanted, system or Linux(), GPU, 16 * PAGE)


def test_survey_numbers_the_tensors_file_after_file(shards: Path) -> None:
    found = look(want_checkpoint(shards))
    assert [spec.name for spec in found.specs] == ["a", "b", "c"]
    assert found.spec_sources == (0, 0, 1)
    assert found.nbytes == 4 * (2000 + 2000 + 4000)
    assert [[piece.buffer for piece in file.pieces] for file in found.files] == [[0, 1], [2]]
    assert len(found.volumes) == 2


def test_survey_reads_no_payload(shards: Path) -> None:
    files = FaultyFiles()
    look(want_checkpoint(shards), files)
    assert (files.nbytes_read, files.reads) == (0, 0)
    assert files.open_descriptors == ()


def test_facts_that_files_share_are_told_once(shards: Path) -> None:
    texts = {MOUNTINFO: "36 1 0:1 / / rw - tmpfs x rw\n"}
    facts = look(want_checkpoint(shards), system=RecordedSystem(texts)).facts()
    assert len(set(facts)) == len(facts)
    names = [fact.name for fact in facts]
    assert names.count("CUDA device") == names.count("available memory") == 1
    assert {"available memory", "CPUs busy", "CUDA device", "O_DIRECT", "resident"} == set(names)


def test_fact_of_residency_says_how_much_and_how_it_is_known(shards: Path) -> None:
    half = FaultyFiles(resident=lambda file_offset, nbytes: 1 if nbytes > PAGE else 0)
    (fact,) = [
        fact
        for fact in look(want_checkpoint(shards, ["c"]), half).facts()
        if fact.name == "resident"
    ][-1:]
    assert fact.holds is False
    assert "of 16000 bytes in the page cache" in fact.found
    assert fact.why.startswith("cachestat")


def test_residency_that_is_unknown_is_no_no(shards: Path) -> None:
    files = FaultyFiles(no_cachestat=True, no_mincore=True)
    facts = [f for f in look(want_checkpoint(shards), files).facts() if f.name == "resident"]
    assert {(fact.holds, fact.found) for fact in facts} == {(None, "unknown")}
    assert all(fact.remedy for fact in facts)


def test_wanted_names_are_selected_from_all_files(shards: Path) -> None:
    found = look(want_checkpoint(shards, ["c", "a", "a"]))
    assert [spec.name for spec in found.specs] == ["a", "c"]
    assert look(want_checkpoint(shards, [])).specs == ()


def test_missing_names_are_a_key_error_that_lists_them(shards: Path) -> None:
    with pytest.raises(KeyError) as caught:
        look(want_checkpoint(shards, ["z", "a", "y"]))
    assert "no tensor named y, z" in str(caught.value)
    assert "there are a, b, c" in str(caught.value)


def test_sources_are_closed_when_one_of_them_cannot_be_opened(shards: Path) -> None:
    files = FaultyFiles()
    paths = [*want_checkpoint(shards).paths, str(shards / "missing")]
    with pytest.raises(FileNotFoundError), open_sources(paths, files):
        raise AssertionError("not reached")
    assert (files.opens, files.open_descriptors) == (2, ())


def test_sources_are_closed_when_the_block_raises(shards: Path) -> None:
    files = FaultyFiles()
    with pytest.raises(KeyError), open_sources(want_checkpoint(shards).paths, files):
        raise KeyError("x")
    assert (files.opens, files.open_descriptors) == (2, ())


def test_any_source_is_read_as_what_it_is(shards: Path) -> None:
    np.save(shards / "array.NPY.npy", np.zeros((3, 4), np.int16))
    (shards / "own.index.json").write_text(
        json.dumps({"weight_map": {"c": "model-00002-of-00002.safetensors"}})
    )
    first = shards / "model-00001-of-00002.safetensors"
    kinds = {
        str(shards): ["a", "b", "c"],
        str(first): ["a", "b"],
        str(shards / "own.index.json"): ["c"],
        str(shards / "array.NPY.npy"): [""],
    }
    for source, names in kinds.items():
        want = want_any(source)
        assert want.label == source
        assert [spec.name for spec in look(want).specs] == names
    assert [
        spec.name
        for spec in look(
            want_any([first, str(first.with_name("model-00002-of-00002.safetensors"))])
        ).specs
    ] == ["a", "b", "c"]


def test_raw_file_is_all_of_its_bytes(tmp_path: Path) -> None:
    write_random(tmp_path / "weights.bin", 100)
    (spec,) = look(want_any(tmp_path / "weights.bin", raw=True)).specs
    assert (spec.dtype, spec.shape, spec.file_range.start) == ("U8", (100,), 0)


@pytest.mark.parametrize("name", ["missing", "missing.npy", "missing.safetensors"])
def test_missing_source_is_a_file_not_found_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        look(want_any(tmp_path / name))


def test_source_is_named_as_it_was_given(tmp_path: Path) -> None:
    assert name_source("a/b") == "a/b"
    assert name_source(tmp_path) == str(tmp_path)
    assert name_source(["a", tmp_path]) == f"a, {tmp_path}"


def test_directory_that_grows_meanwhile_is_a_source_changed_error(shards: Path) -> None:
    class Growing(FaultyFiles):
        def open(self, path: str, *, direct: bool = False) -> int:
            save_file({"late": np.zeros(3)}, shards / "model-late.safetensors")
            return super().open(path, direct=direct)

    with pytest.raises(SourceChanged):
        look(want_checkpoint(shards), Growing())


def test_safetensors_file_without_its_suffix_is_explained_as_load_loads_it(shards: Path) -> None:
    blob = shards / "b94f2fb8d2b3"
    (shards / "model-00001-of-00002.safetensors").rename(blob)
    loaded = [spec.name for spec in look(want_checkpoint(blob)).specs]
    assert [spec.name for spec in look(want_any(blob)).specs] == loaded == ["a", "b"]

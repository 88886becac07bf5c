"""Conversion: every byte arrives, whatever the parts, the dtypes, and what goes wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

import headrace as hr
import headrace.numpy as hn
from headrace.conversion.convert import convert, split_parts
from headrace.conversion.outcome import Conversion
from headrace.formats.catalog import TensorSpec
from headrace.formats.checkpoint import read_checkpoint
from headrace.formats.checksums import store_checksums, stored_checksums
from headrace.formats.dtypes import is_subbyte, tensor_nbytes
from headrace.formats.safetensors import read_catalog
from headrace.formats.safetensors_layout import Described, lay_out
from headrace.saving import Manner
from headrace.testing import FaultyFiles
from headrace.types import ByteRange
from tests.support import INDEX, listing, needs_mount

PAGE = 4096
DTYPES = (
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32"),
    *("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F32", "C64", "F64"),
    *("I64", "U64"),
)
EVERY_DTYPE = tuple(Described(f"t.{dtype}", dtype, (3, 8)) for dtype in DTYPES)
SOME = (
    Described("pages", "BF16", (4, PAGE)),
    Described("odd", "F8_E4M3", (PAGE + 3,)),
    Described("packed", "F4", (2, 7, 2)),
    Described("empty", "F32", (0, 5)),
    Described("scalar", "F64", ()),
)
Contents = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture
def context() -> Iterator[hr.Context]:
    with hr.Context() as made:
        yield made


def contents_of(tensors: Sequence[Described]) -> Contents:
    return {
        each.name: (
            each.dtype,
            each.shape,
            random.Random(each.name).randbytes(tensor_nbytes(each.dtype, each.shape)),
        )
        for each in tensors
    }


def write(
    path: Path, tensors: Sequence[Described] = SOME, metadata: Mapping[str, str] | None = None
) -> Contents:
    contents = contents_of(tensors)
    layout = lay_out(tensors, metadata)
    payload = b"".join(contents[spec.name][2] for spec in layout.tensors)
    path.write_bytes(layout.header + payload)
    return contents


def write_shards(
    directory: Path,
    tensors: Sequence[Described] = SOME,
    texts: Sequence[Mapping[str, str]] = ({}, {}),
    *,
    index: bool = True,
) -> Contents:
    """Two shards, with metadata each."""
    directory.mkdir(exist_ok=True)
    weight_map = {}
    for number, metadata in enumerate(texts):
        name = f"part-{number}.safetensors"
        write(directory / name, tensors[number::2], metadata)
        weight_map.update({each.name: name for each in tensors[number::2]})
    if index:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return contents_of(tensors)


def read(source: Path) -> Contents:
    """Names, dtypes, shapes and bytes, by plain reads of the files."""
    found: Contents = {}
    for catalog in read_checkpoint(source):
        whole = Path(catalog.path).read_bytes()
        for spec in catalog.tensors:
            content = whole[spec.file_range.start : spec.file_range.stop]
            found[spec.name] = (spec.dtype, spec.shape, content)
    return found


def run(
    source: Path,
    target: Path,
    context: hr.Context,
    *,
    align: bool = True,
    checksum: bool = False,
    route: str = "auto",
    **how: Any,
) -> Conversion:
    manner = Manner(align, checksum, fsync=how.pop("fsync", True), route=route)
    return convert(source, target, manner=manner, context=context, **how)


# what arrives


@pytest.mark.parametrize("target", ["new.safetensors", "new"])
@pytest.mark.parametrize("tensors", [EVERY_DTYPE, SOME], ids=["every dtype", "some"])
def test_every_dtype_keeps_its_name_its_shape_and_its_bits(
    target: str, tensors: Sequence[Described], tmp_path: Path, context: hr.Context
) -> None:
    wanted = write(tmp_path / "old.safetensors", tensors)
    done = run(tmp_path / "old.safetensors", tmp_path / target, context)
    assert read(tmp_path / target) == wanted
    assert done.tensors == len(tensors)
    assert done.nbytes == sum(len(content) for _, _, content in wanted.values())
    assert any(is_subbyte(each.dtype) for each in tensors)


@settings(deadline=None, max_examples=60)
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from([0, 1, 3, PAGE // 8, PAGE])), max_size=9
    ),
    sharded=st.booleans(),
    part_nbytes=st.integers(1, 20_000),
    max_shard_nbytes=st.integers(1, 20_000),
    align=st.booleans(),
    checksum=st.booleans(),
    route=st.sampled_from(["auto", "host"]),
)
def test_any_checkpoint_arrives_in_any_parts(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[str, int]],
    sharded: bool,
    part_nbytes: int,
    max_shard_nbytes: int,
    align: bool,
    checksum: bool,
    route: str,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    described = [Described(str(n), dtype, (8, size)) for n, (dtype, size) in enumerate(tensors)]
    source = folder / ("old" if sharded else "old.safetensors")
    wanted = (write_shards if sharded else write)(source, described) if described else {}
    if not described:
        write(folder / "old.safetensors", [])
        source = folder / "old.safetensors"
    how: dict[str, Any] = {
        "align": align,
        "checksum": checksum,
        "route": route,
        "part_nbytes": part_nbytes,
    }
    with hr.Context() as context:
        run(source, folder / "new.safetensors", context, **how)
        assert read(folder / "new.safetensors") == wanted
        if described:
            how["max_shard_nbytes"] = max_shard_nbytes
            run(folder / "new.safetensors", folder / "new", context, verify=True, **how)
            assert read(folder / "new") == wanted
    made = lay_out(
        described, store_checksums(None, described, digests_of(wanted)) if checksum else None
    )
    if not align and (described or not checksum):
        assert (folder / "new.safetensors").read_bytes()[: len(made.header)] == made.header


def digests_of(contents: Contents) -> dict[str, str]:
    return {name: xxh3_64_hexdigest(content) for name, (_, _, content) in contents.items()}


def test_tensors_of_whole_pages_lie_at_pages(tmp_path: Path, context: hr.Context) -> None:
    write(tmp_path / "old.safetensors")
    run(tmp_path / "old.safetensors", tmp_path / "new.safetensors", context)
    (pages,) = (
        spec
        for spec in read_catalog(str(tmp_path / "new.safetensors")).tensors
        if spec.name == "pages"
    )
    assert pages.file_range.start % PAGE == 0


def test_without_alignment_the_file_is_the_official_writer_s(
    tmp_path: Path, context: hr.Context
) -> None:
    write(tmp_path / "old.safetensors", SOME, {"format": "pt"})
    run(tmp_path / "old.safetensors", tmp_path / "new.safetensors", context, align=False)
    assert (tmp_path / "new.safetensors").read_bytes() == (
        tmp_path / "old.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("route", ["direct", "host"])
def test_a_forced_route_carries_both_ways(route: str, tmp_path: Path, context: hr.Context) -> None:
    wanted = write(tmp_path / "old.safetensors")
    try:
        done = run(tmp_path / "old.safetensors", tmp_path / "new", context, route=route)
    except hr.RouteUnavailable:
        assert route == "direct"  # a file system without O_DIRECT
        return
    assert read(tmp_path / "new") == wanted
    assert done.read is not None
    for report in (done.read, done.write):
        assert {str(seen.route) for seen in report.observed} == {route}


def test_arrays_of_an_npz_file_become_what_safetensors_has(
    tmp_path: Path, context: hr.Context
) -> None:
    arrays: dict[str, Any] = {
        "plain": np.arange(5000, dtype=np.float32),
        "fortran": np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
        "big": np.arange(7, dtype=">f8"),
        "flag": np.array(True),
        "none": np.zeros((0, 2), np.uint8),
    }
    np.savez(tmp_path / "arrays.NPZ", **arrays)  # NumPy adds a suffix to this name
    done = run(tmp_path / "arrays.NPZ.npz", tmp_path / "new.safetensors", context, part_nbytes=9)
    found = hn.load_file(tmp_path / "new.safetensors")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name], array)
    assert done.read is None
    assert any("CRC-32" in note for note in done.notes)


def test_a_directory_named_like_an_archive_is_a_checkpoint(
    tmp_path: Path, context: hr.Context
) -> None:
    wanted = write_shards(tmp_path / "odd.npz")
    run(tmp_path / "odd.npz", tmp_path / "new", context)
    assert read(tmp_path / "new") == wanted


@pytest.mark.parametrize("array", [np.array(["text"]), np.zeros(2, np.complex128)])
def test_types_that_safetensors_lacks_are_named_before_anything_is_made(
    array: np.ndarray, tmp_path: Path, context: hr.Context
) -> None:
    np.savez(tmp_path / "arrays.npz", odd=array)
    with pytest.raises(hr.FormatError, match="'odd'"):
        run(tmp_path / "arrays.npz", tmp_path / "new", context)
    assert listing(tmp_path) == {"arrays.npz"}


# memory


def test_no_more_than_a_part_is_read_at_once(tmp_path: Path, context: hr.Context) -> None:
    tensors = [Described(f"{n}", "U8", (1000 + n,)) for n in range(9)]
    tensors.append(Described("large", "U8", (50_000,)))
    write(tmp_path / "old.safetensors", tensors)
    with hr.trace() as trace:
        run(tmp_path / "old.safetensors", tmp_path / "new", context, part_nbytes=3000)
    reads = [report.nbytes for report in trace.reports if report.operation == "read"]
    assert max(nbytes for nbytes in reads if nbytes != 50_000) <= 3000
    assert len(reads) == 6


@given(sizes=st.lists(st.integers(0, 30)), most=st.integers(1, 60))
def test_parts_are_the_tensors_in_order_and_as_large_as_they_may_be(
    sizes: list[int], most: int
) -> None:
    specs = [TensorSpec(str(n), "U8", (size,), ByteRange(0, size)) for n, size in enumerate(sizes)]
    parts = list(split_parts(specs, most))
    assert [spec for part in parts for spec in part] == specs
    totals = [sum(spec.file_range.nbytes for spec in part) for part in parts]
    assert all(total <= most or len(part) == 1 for part, total in zip(parts, totals, strict=True))
    for total, following in zip(totals, parts[1:], strict=False):
        assert total + following[0].file_range.nbytes > most


# metadata and checksums


def test_metadata_of_one_file_is_kept(tmp_path: Path, context: hr.Context) -> None:
    write(tmp_path / "old.safetensors", SOME, {"format": "pt", "by": "ü"})
    done = run(tmp_path / "old.safetensors", tmp_path / "new", context, max_shard_nbytes=100)
    assert len(done.files) > 1
    for path in done.files:
        assert read_catalog(path).metadata == {"format": "pt", "by": "ü"}
    assert json.loads((tmp_path / "new" / INDEX).read_text())["metadata"]["by"] == "ü"
    assert done.notes == ()


def test_metadata_of_shards_is_what_they_have_in_common_and_the_rest_is_named(
    tmp_path: Path, context: hr.Context
) -> None:
    texts = ({"format": "pt", "part": "1", "first": "x"}, {"format": "pt", "part": "2"})
    write_shards(tmp_path / "old", SOME, texts)
    done = run(tmp_path / "old", tmp_path / "new.safetensors", context)
    assert read_catalog(done.files[0]).metadata == {"format": "pt"}
    (note,) = done.notes
    assert note.endswith(": first, part")


def test_stored_checksums_are_those_of_the_bytes(tmp_path: Path, context: hr.Context) -> None:
    old = store_checksums({"format": "pt"}, SOME, digests_of(contents_of(SOME)))
    wanted = write(tmp_path / "old.safetensors", SOME, old)
    target = tmp_path / "new.safetensors"
    done = run(tmp_path / "old.safetensors", target, context, checksum=True, part_nbytes=5000)
    catalog = read_catalog(str(target))
    assert stored_checksums(catalog) == digests_of(wanted)
    assert catalog.metadata["format"] == "pt"
    assert done.notes == ()
    assert done.read is not None
    assert done.read.verified_nbytes == done.nbytes


def test_checksums_are_dropped_where_none_are_asked_for(
    tmp_path: Path, context: hr.Context
) -> None:
    stale = store_checksums({"a": "b"}, SOME[:1], {"pages": "0" * 16})
    write(tmp_path / "old.safetensors", SOME, stale)
    done = run(tmp_path / "old.safetensors", tmp_path / "new.safetensors", context)
    assert read_catalog(done.files[0]).metadata == {"a": "b"}
    assert any("checksums" in note for note in done.notes)


@pytest.mark.parametrize("how", [{"verify": True}, {"checksum": True}], ids=str)
def test_verify_and_new_checksums_stop_at_damage_and_keep_the_old_target(
    tmp_path: Path, context: hr.Context, how: dict[str, Any]
) -> None:
    source, target = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    contents = contents_of(SOME)
    digests = digests_of(contents)
    write(source, SOME, store_checksums(None, SOME, {**digests, "odd": "0" * 16}))
    target.write_bytes(b"what was there")
    with pytest.raises(hr.FormatError, match="'odd'"):
        run(source, target, context, part_nbytes=5000, **how)
    assert target.read_bytes() == b"what was there"
    assert listing(tmp_path) == {source.name, target.name}
    write(source, SOME, store_checksums(None, SOME, digests))
    done = run(source, target, context, part_nbytes=5000, **how)
    assert done.read is not None
    assert done.read.verified_nbytes == done.nbytes


@pytest.mark.parametrize("how", [{"verify": True}, {"checksum": True}], ids=str)
@pytest.mark.parametrize("tensors", [SOME[1:], ()], ids=["one lost", "all lost"])
def test_lost_tensor_is_found_before_a_target_is_made(
    tmp_path: Path, context: hr.Context, tensors: Sequence[Described], how: dict[str, Any]
) -> None:
    source = tmp_path / "old.safetensors"
    write(source, tensors, store_checksums(None, SOME, digests_of(contents_of(SOME))))
    with pytest.raises(hr.FormatError, match="a checksum is stored for tensor"):
        run(source, tmp_path / "new.safetensors", context, **how)
    assert listing(tmp_path) == {source.name}


# reports and progress


def test_the_reports_of_all_parts_are_one(tmp_path: Path, context: hr.Context) -> None:
    write(tmp_path / "old.safetensors")
    with hr.trace() as trace:
        done = run(tmp_path / "old.safetensors", tmp_path / "new", context, part_nbytes=5000)
    assert len(trace.reports) > 4
    assert done.read is not None
    for joined, operation in ((done.read, "read"), (done.write, "write")):
        parts = [report for report in trace.reports if report.operation == operation]
        assert joined.operation == operation
        assert joined.nbytes == done.nbytes == sum(seen.nbytes for seen in joined.observed)
        assert sum(plan.nbytes for plan in joined.planned) == done.nbytes
        assert joined.seconds == pytest.approx(sum(report.seconds for report in parts))
        for stage in joined.stages:
            total = sum(report.stages.get(stage, 0.0) for report in parts)
            assert joined.stages[stage] == pytest.approx(total)
    assert done.write.durable is True
    assert "sync" in done.write.stages
    assert done.seconds >= done.read.seconds + done.write.seconds


def test_progress_rises_to_the_bytes_of_the_tensors(tmp_path: Path, context: hr.Context) -> None:
    write(tmp_path / "old.safetensors")
    told: list[hr.Progress] = []
    done = run(
        tmp_path / "old.safetensors",
        tmp_path / "new",
        context,
        part_nbytes=5000,
        progress=told.append,
    )
    moved = [each.nbytes for each in told]
    assert moved == sorted(moved)
    assert moved[-1] == done.nbytes
    assert {each.total_nbytes for each in told} == {done.nbytes}
    assert any(0 < each < done.nbytes for each in moved)


def test_unsynced_files_are_noted(tmp_path: Path) -> None:
    write(tmp_path / "old.safetensors")
    files = FaultyFiles()
    with hr.Context(files=files) as context:
        done = run(tmp_path / "old.safetensors", tmp_path / "new", context, fsync=False)
    assert files.synced == []
    assert done.write.durable is False
    assert any("not synced" in note for note in done.notes)


# what goes wrong


@pytest.mark.parametrize("target", ["new.safetensors", "new"])
def test_an_interrupt_keeps_what_was_there(
    target: str, tmp_path: Path, context: hr.Context
) -> None:
    write(tmp_path / "old.safetensors")
    wanted = write(tmp_path / "first.safetensors", EVERY_DTYPE)
    run(tmp_path / "first.safetensors", tmp_path / target, context)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    told: list[hr.Progress] = []

    def interrupt(done: hr.Progress) -> None:
        told.append(done)
        if done.nbytes > done.total_nbytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            tmp_path / "old.safetensors",
            tmp_path / target,
            context,
            part_nbytes=5000,
            progress=interrupt,
        )
    assert len(told) > 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert read(tmp_path / target) == wanted


@pytest.mark.parametrize("change", ["rewrite", "replace", "remove"])
def test_a_source_that_changes_between_two_parts_is_source_changed(
    change: str, tmp_path: Path, context: hr.Context
) -> None:
    source = tmp_path / "old.safetensors"
    write(source)

    def meddle(done: hr.Progress) -> None:
        if change == "rewrite":
            source.write_bytes(source.read_bytes())
            os.utime(source, ns=(1, 1))
        elif change == "replace":
            write(tmp_path / "other")
            os.replace(tmp_path / "other", source)
        else:
            source.unlink(missing_ok=True)

    with pytest.raises((hr.SourceChanged, FileNotFoundError), match=r"old\.safetensors"):
        run(source, tmp_path / "new.safetensors", context, part_nbytes=5000, progress=meddle)
    assert listing(tmp_path) <= {"old.safetensors"}


def test_a_source_that_changes_while_nothing_is_read_of_it_is_source_changed(
    tmp_path: Path,
) -> None:
    source = tmp_path / "old.safetensors"
    write(source)

    def replace(done: hr.Progress) -> None:
        if done.nbytes > done.total_nbytes // 2 and not (tmp_path / "kept").exists():
            os.rename(source, tmp_path / "kept")
            write(source)

    with hr.Context() as context, pytest.raises(hr.SourceChanged, match="while it was converted"):
        run(source, tmp_path / "new", context, part_nbytes=33_000, progress=replace)
    assert read(source) == contents_of(SOME)


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"fail": {"create": errno.EACCES}}, errno.EACCES),
        ({"fail": {"rename": errno.EIO}}, errno.EIO),
        ({"fail": {"sync": errno.EIO}}, errno.EIO),
        ({"eio_at": 5000}, errno.EIO),
    ],
)
@pytest.mark.parametrize("name", ["new.safetensors", "new"])
def test_errors_of_the_system_stay_themselves_and_leave_the_old_target(
    name: str, faults: dict[str, Any], code: int, tmp_path: Path, context: hr.Context
) -> None:
    write(tmp_path / "old.safetensors")
    wanted = write(tmp_path / "first.safetensors", EVERY_DTYPE)
    run(tmp_path / "first.safetensors", tmp_path / name, context)
    with hr.Context(files=FaultyFiles(**faults)) as faulty:
        with pytest.raises(OSError, match=r"new|old\.safetensors") as caught:
            run(tmp_path / "old.safetensors", tmp_path / name, faulty)
        assert caught.value.errno == code
    assert read(tmp_path / name) == wanted
    assert list(tmp_path.rglob(".*")) == []


@pytest.mark.root
def test_a_full_volume_is_met_before_the_first_byte_is_read(tmp_path: Path) -> None:
    write(tmp_path / "old.safetensors", [Described("a", "U8", (300_000,))])
    small = tmp_path / "small"
    small.mkdir()
    needs_mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small))
    try:
        with hr.Context() as context, hr.trace() as trace:
            for target in (small / "new.safetensors", small / "new"):
                with pytest.raises(OSError, match="No space") as caught:
                    run(tmp_path / "old.safetensors", target, context)
                assert caught.value.errno == errno.ENOSPC
        assert trace.reports == []
        assert not [path for path in small.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_route_that_does_not_exist_is_a_value_error_before_anything_is_made(
    tmp_path: Path, context: hr.Context
) -> None:
    write(tmp_path / "old.safetensors")
    with pytest.raises(ValueError, match="nowhere"):
        run(tmp_path / "old.safetensors", tmp_path / "new", context, route="nowhere")
    assert listing(tmp_path) == {"old.safetensors"}

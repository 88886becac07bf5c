"""What saving does in every library: devices, streams, crash safety, checksums, progress."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file as official_save_file
from xxhash import xxh3_64_hexdigest

import headrace as hr
import headrace.numpy as hn
from headrace import checkpoint_saving, saving
from headrace.formats.checksums import stored_checksums
from headrace.formats.safetensors import read_catalog
from headrace.saving import Manner
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles, Killed
from tests.library import Library
from tests.support import PAGE, folder_with_direct, needs_mount

OLD = {"old": np.arange(1000.0)}
MOST_CALLS = 100


def model(sizes: Sequence[int] = (70_001, 17, 0, 40_000)) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(3)
    return {f"tensor.{n}": noise.integers(0, 256, n, np.uint8) for n in sizes}


def on_device(cuda: FakeCuda, array: np.ndarray, device: int = 0) -> FakeDeviceArray:
    made = FakeDeviceArray(cuda, array.nbytes, device)
    if array.nbytes:
        cuda.device_write(made.pointer, array.tobytes())
    return made


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return {name: array.tobytes() for name, array in first.items()} == {
        name: array.tobytes() for name, array in second.items()
    }


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(devices=2)


@contextlib.contextmanager
def small_context(cuda: FakeCuda, **faults: Any) -> Iterator[hr.Context]:
    options = hr.Options(workers=3, block_nbytes=4 * PAGE, pinned_nbytes=8 * 4 * PAGE)
    with hr.Context(options, cuda=cuda, files=FaultyFiles(**faults)) as context:
        yield context
    assert cuda.errors == []


def save_file(library: Library, tensors: Any, path: Path, **options: Any) -> hr.Report:
    context, stream = options.pop("context"), options.pop("stream", None)
    progress, metadata = options.pop("progress", False), options.pop("metadata", None)
    return saving.save_file(
        library,
        tensors,
        path,
        metadata,
        Manner(**options),
        progress=progress,
        stream=stream,
        context=context,
    )


# devices and streams


@pytest.mark.parametrize(
    ("route", "faults"),
    [
        ("auto", {}),
        ("cached", {"short_writes": 5000}),
        ("direct", {}),
        ("direct", {"short_writes": 5000, "no_allocate": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("align", [False, True])
def test_tensors_on_a_device_become_the_official_file(
    tmp_path: Path, cuda: FakeCuda, route: str, faults: dict[str, Any], align: bool
) -> None:
    tensors = model((70_001, 17, 10 * PAGE))
    path = folder_with_direct(tmp_path) / "model.safetensors"
    with small_context(cuda, **faults) as context:
        held = {name: on_device(cuda, array, 1) for name, array in tensors.items()}
        report = save_file(
            Library(cuda),
            held,
            path,
            context=context,
            route=route,
            align=align,
            metadata={"a": "b"},
        )
    assert same(load_file(path), tensors)
    assert (report.device, report.nbytes) == ("cuda:1", sum(a.nbytes for a in tensors.values()))
    if align:
        offsets = {spec.name: spec.file_range.start for spec in read_catalog(str(path)).tensors}
        assert offsets[f"tensor.{10 * PAGE}"] % PAGE == 0
    else:
        official_save_file(tensors, tmp_path / "official", metadata={"a": "b"})
        assert path.read_bytes() == (tmp_path / "official").read_bytes()


def test_tensors_of_two_devices_and_the_host_go_into_one_file(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    tensors = model((70_001, 60_003, 17, 40_000, 5, 3))
    path = tmp_path / "model.safetensors"
    with small_context(cuda) as context:
        held = {
            name: array if number % 3 == 2 else on_device(cuda, array, number % 3)
            for number, (name, array) in enumerate(tensors.items())
        }
        report = save_file(Library(cuda), held, path, context=context)
    assert same(load_file(path), tensors)
    assert sorted(report.device.split(", ")) == ["cpu", "cuda:0", "cuda:1"]


def test_save_comes_after_what_the_library_has_queued(tmp_path: Path, cuda: FakeCuda) -> None:
    stream = cuda.create_stream()
    array = FakeDeviceArray(cuda, 50_000)
    cuda.enqueue_on(stream, lambda: array.fill(7))
    with small_context(cuda) as context:
        save_file(Library(cuda, stream), {"a": array}, tmp_path / "a", context=context)
    assert load_file(tmp_path / "a")["a"].tobytes() == bytes([7]) * 50_000
    cuda.destroy_stream(stream)


def test_given_stream_takes_the_place_of_the_current_one(tmp_path: Path, cuda: FakeCuda) -> None:
    cuda.set_device(1)
    current, given = cuda.create_stream(), cuda.create_stream()
    array = FakeDeviceArray(cuda, 50_000, 1)
    ran: list[str] = []
    cuda.enqueue_on(current, lambda: ran.append("current"))
    cuda.enqueue_on(given, lambda: array.fill(7))
    library = Library(cuda, current)
    with small_context(cuda) as context:
        save_file(library, {"a": array}, tmp_path / "a", context=context, stream=given)
        saving.write(
            library,
            array,
            tmp_path / "raw",
            file_offset=3,
            route="auto",
            progress=False,
            stream=given,
            context=context,
        )
    assert load_file(tmp_path / "a")["a"].tobytes() == bytes([7]) * 50_000
    assert (tmp_path / "raw").read_bytes() == bytes(3) + bytes([7]) * 50_000
    assert ran == []


def test_stream_of_another_device_is_a_value_error_and_makes_nothing(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    stream = cuda.create_stream()
    tensors = {"a": on_device(cuda, np.arange(9.0), 1)}
    with small_context(cuda) as context:
        with pytest.raises(ValueError, match=r"belongs to cuda:0, but the memory is on cuda:1"):
            save_file(Library(cuda), tensors, tmp_path / "a", context=context, stream=stream)
        for default in (0, 1, 2):
            save_file(Library(cuda), tensors, tmp_path / "b", context=context, stream=default)
    assert os.listdir(tmp_path) == ["b"]


def test_what_is_no_stream_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="pass a torch"):
        hn.save_file(OLD, tmp_path / "a", stream="nonsense")


# crash safety


@pytest.mark.parametrize("fsync", [False, True])
def test_report_says_whether_storage_was_waited_for(tmp_path: Path, fsync: bool) -> None:
    files = FaultyFiles()
    with hr.Context(files=files) as context:
        report = hn.save_file(OLD, tmp_path / "a", fsync=fsync, context=context)
    assert report.durable is fsync
    assert bool(files.synced) is fsync
    assert ("not synced" in str(report)) is not fsync


def test_killed_at_any_call_the_file_is_old_or_new_and_the_next_save_cleans_up(
    tmp_path: Path,
) -> None:
    new, seen = model(), []
    for number in range(1, MOST_CALLS):
        path = tmp_path / str(number) / "model.safetensors"
        path.parent.mkdir()
        hn.save_file(OLD, path)
        before = path.read_bytes()
        try:
            with hr.Context(files=FaultyFiles(die_at=number)) as context:
                hn.save_file(new, path, context=context)
        except Killed:
            pass
        else:
            break
        seen.append(path.read_bytes() == before)
        assert same(hn.load_file(path), OLD if seen[-1] else new)
        hn.save_file(OLD, path)
        assert os.listdir(path.parent) == ["model.safetensors"]
    assert len(seen) > 5
    assert {True, False} == set(seen)
    assert same(hn.load_file(path), new)


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"enospc_after": 30_000}, errno.ENOSPC),
        ({"enospc_after": 30_000, "no_allocate": True}, errno.ENOSPC),
        ({"enospc_after": 10}, errno.ENOSPC),
        ({"write_eio_at": 50_000}, errno.EIO),
        ({"fail": {"sync": errno.EIO}}, errno.EIO),
        ({"fail": {"rename": errno.EIO}}, errno.EIO),
    ],
    ids=str,
)
def test_failed_save_keeps_the_old_file_and_leaves_nothing_else(
    tmp_path: Path, faults: dict[str, Any], code: int
) -> None:
    path = tmp_path / "model.safetensors"
    hn.save_file(OLD, path)
    with hr.Context(files=FaultyFiles(**faults)) as context:
        with pytest.raises(OSError, match=r"model\.safetensors") as caught:
            hn.save_file(model(), path, context=context)
        assert caught.value.errno == code
    assert same(hn.load_file(path), OLD)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.root
def test_full_volume_keeps_the_old_file(tmp_path: Path) -> None:
    needs_mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path))
    try:
        path = tmp_path / "model.safetensors"
        hn.save_file(OLD, path)
        with pytest.raises(OSError, match="No space") as caught:
            hn.save_file(model((300_000,)), path)
        assert caught.value.errno == errno.ENOSPC
        assert same(hn.load_file(path), OLD)
        assert os.listdir(tmp_path) == ["model.safetensors"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "model", tmp_path / "link"
    hn.save_file(OLD, target)
    link.symlink_to(target)
    hn.save_file(model(), link)
    assert link.is_symlink()
    assert same(hn.load_file(target), model())


def test_directory_in_place_of_the_file_is_an_is_a_directory_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        hn.save_file(OLD, tmp_path)


def test_missing_folder_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        hn.save_file(OLD, tmp_path / "missing" / "model")


def test_folder_that_cannot_be_written_to_is_a_permission_error(tmp_path: Path) -> None:
    with (
        hr.Context(files=FaultyFiles(fail={"create": errno.EACCES})) as context,
        pytest.raises(PermissionError, match="model"),
    ):
        hn.save_file(OLD, tmp_path / "model", context=context)
    assert os.listdir(tmp_path) == []


def test_forced_route_that_cannot_serve_keeps_the_old_file(tmp_path: Path) -> None:
    hn.save_file(OLD, tmp_path / "model")
    with pytest.raises(hr.RouteUnavailable, match="gds"):
        hn.save_file(model(), tmp_path / "model", route="gds")
    with pytest.raises(ValueError, match="nowhere"):
        hn.save_file(model(), tmp_path / "model", route="nowhere")
    assert same(hn.load_file(tmp_path / "model"), OLD)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("tensors", "metadata", "error"),
    [
        ({"__metadata__": np.zeros(2)}, None, hr.FormatError),
        ({"\ud800": np.zeros(2)}, None, hr.FormatError),
        ({1: np.zeros(2)}, None, TypeError),
        ({"a": np.zeros(2)}, {"a": 1}, TypeError),
        ({"a": np.zeros(2)}, {1: "a"}, TypeError),
        ({"a": np.zeros(2)}, "text", TypeError),
    ],
    ids=repr,
)
def test_names_and_metadata_that_the_format_forbids_are_told_before_anything_is_made(
    tmp_path: Path, tensors: Any, metadata: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        hn.save_file(tensors, tmp_path / "model", metadata)
    with pytest.raises(error):
        hn.save(tensors, tmp_path / "folder", metadata)
    assert os.listdir(tmp_path) == []


# checksums and progress


def digests(tensors: dict[str, np.ndarray]) -> dict[str, str]:
    return {name: xxh3_64_hexdigest(array.tobytes()) for name, array in tensors.items()}


def test_checksums_of_the_tensors_are_in_the_metadata(tmp_path: Path) -> None:
    hn.save_file(model(), tmp_path / "a", {"format": "pt"}, checksum=True)
    catalog = read_catalog(str(tmp_path / "a"))
    assert stored_checksums(catalog) == digests(model())
    assert catalog.metadata["format"] == "pt"
    assert same(load_file(tmp_path / "a"), model())


def test_each_shard_has_the_checksums_of_its_own_tensors(tmp_path: Path) -> None:
    hn.save(model(), tmp_path, max_shard_nbytes=1000, checksum=True)
    catalogs = [read_catalog(str(path)) for path in tmp_path.glob("*.safetensors")]
    assert len(catalogs) > 2
    for catalog in catalogs:
        held = {spec.name: model()[spec.name] for spec in catalog.tensors}
        assert stored_checksums(catalog) == digests(held)


def test_checksums_of_a_device_come_after_work_on_the_given_stream(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    stream = cuda.create_stream()
    array = FakeDeviceArray(cuda, 50_000)
    cuda.enqueue_on(stream, lambda: array.fill(7))
    with small_context(cuda) as context:
        tensors = {"a": array}
        path = tmp_path / "a"
        save_file(Library(cuda), tensors, path, context=context, stream=stream, checksum=True)
    stored = stored_checksums(read_catalog(str(path)))
    assert stored == digests({"a": np.full(50_000, 7, np.uint8)})


@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_damaged_byte_is_told_by_tensor_where_verify_is_asked_for(
    tmp_path: Path, kind: str
) -> None:
    if kind == "file":
        hn.save_file(model(), tmp_path / "model.safetensors", checksum=True)
    else:
        hn.save(model(), tmp_path, max_shard_nbytes=1000, checksum=True)
    assert same(hn.load(tmp_path, verify=True), model())
    (path,) = (p for p in tmp_path.glob("*.safetensors") if "tensor.70001" in load_file(p))
    assert same(hn.load_file(path, verify=True), load_file(path))
    offset = hr.explain(path, names=["tensor.70001"]).tensors[0]["file_offset"]
    content = bytearray(path.read_bytes())
    content[offset + 60_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(hr.FormatError, match=r"tensor\.70001"):
        hn.load(tmp_path, verify=True)
    with pytest.raises(hr.FormatError, match=r"tensor\.70001"):
        hn.load_file(path, verify=True)
    hn.load(tmp_path)


def test_progress_counts_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    told: list[hr.Progress] = []
    tensors = model()
    total = sum(array.nbytes for array in tensors.values())
    hn.save_file(tensors, tmp_path / "a", progress=told.append)
    assert (told[-1].nbytes, told[-1].total_nbytes) == (total, total)
    told.clear()
    hn.save(tensors, tmp_path / "b", progress=told.append, max_shard_nbytes=50_000)
    assert (told[-1].nbytes, told[-1].total_nbytes) == (total, total)
    hn.write(tensors["tensor.70001"], tmp_path / "c", progress=told.append)
    assert (told[-1].nbytes, told[-1].total_nbytes) == (70_001, 70_001)


def test_progress_bar_leaves_no_line_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hn.save_file(model(), tmp_path / "a", progress=True)
    assert "".join(capsys.readouterr()).strip() == ""
    hn.save_file(model(), tmp_path / "a")
    assert tuple(capsys.readouterr()) == ("", "")


# write


def test_write_changes_its_range_alone_and_grows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(b"x" * 10_000)
    array = np.arange(1000, dtype=np.int16)
    report = hn.write(array, path, file_offset=77)
    assert path.read_bytes() == b"x" * 77 + array.tobytes() + b"x" * (10_000 - 77 - 2000)
    assert (report.nbytes, report.durable, report.operation) == (2000, False, "write")
    hn.write(array, path, file_offset=9_999)
    assert path.read_bytes()[9_999:] == array.tobytes()
    hn.write(array, tmp_path / "new", file_offset=np.int64(5))  # type: ignore[arg-type]
    assert (tmp_path / "new").read_bytes() == bytes(5) + array.tobytes()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    array = np.arange(60, dtype=">f4").reshape(3, 4, 5)
    hn.write(array, tmp_path / "raw", file_offset=9)
    read = hn.read(tmp_path / "raw", dtype=">f4", shape=(3, 4, 5), file_offset=9)
    assert np.array_equal(read, array)
    hn.write(np.zeros((0, 3)), tmp_path / "raw")
    hn.write(np.array(7, np.uint8), tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == b"\x07" + bytes(8) + array.tobytes()


@pytest.mark.parametrize(
    ("array", "file_offset", "error"),
    [
        (np.zeros((4, 4))[:, :2], 0, hr.BufferMismatch),
        (np.asfortranarray(np.zeros((4, 4))), 0, hr.BufferMismatch),
        (np.array([None]), 0, hr.BufferMismatch),
        ([1, 2], 0, hr.BufferMismatch),
        (np.zeros(3), -1, ValueError),
        (np.zeros(3), 1.5, TypeError),
    ],
    ids=str,
)
def test_what_cannot_be_written_makes_no_file(
    tmp_path: Path, array: Any, file_offset: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        hn.write(array, tmp_path / "raw", file_offset=file_offset)
    assert os.listdir(tmp_path) == []


def test_write_that_fails_gives_the_file_its_old_length_back(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"x" * 100)
    with hr.Context(files=FaultyFiles(enospc_after=10)) as context:
        for name in ("raw", "new"):
            with pytest.raises(OSError, match=r"No space|ENOSPC"):
                hn.write(np.zeros(5000), tmp_path / name, file_offset=100, context=context)
    with pytest.raises(ValueError, match="nowhere"):
        hn.write(np.zeros(3), tmp_path / "new", route="nowhere")
    assert (tmp_path / "raw").read_bytes() == b"x" * 100
    assert os.listdir(tmp_path) == ["raw"]


def test_two_devices_fill_the_shards_of_a_checkpoint(tmp_path: Path, cuda: FakeCuda) -> None:
    tensors = model((70_001, 60_003, 17, 40_000, 5, 3))
    with small_context(cuda) as context:
        report = checkpoint_saving.save(
            Library(cuda),
            {name: on_device(cuda, array, array.nbytes % 2) for name, array in tensors.items()},
            tmp_path / "model",
            None,
            Manner(),
            max_shard_nbytes=70_000,
            progress=False,
            stream=None,
            context=context,
        )
    assert same(hn.load(tmp_path / "model"), tensors)
    assert set(report.device.split(", ")) == {"cuda:0", "cuda:1"}


def test_progress_that_is_no_function_is_told_before_the_old_file_is_replaced(
    tmp_path: Path,
) -> None:
    hn.save_file({"a": np.ones(3)}, tmp_path / "a")
    wrong: Any = 3
    with pytest.raises(TypeError, match="progress is 3; pass True, False or a function"):
        hn.save_file({"a": np.zeros(3)}, tmp_path / "a", progress=wrong)
    assert hn.load_file(tmp_path / "a")["a"].sum() == 3
    assert os.listdir(tmp_path) == ["a"]

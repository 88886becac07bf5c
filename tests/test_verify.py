"""verify on load: what arrived is compared with the checksums that the file stores."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

import headrace as hr
import headrace.numpy as hn
from headrace.bindings.cuda import Copy
from headrace.formats.catalog import TensorSpec
from headrace.formats.checksums import store_checksums
from headrace.formats.dtypes import tensor_nbytes
from headrace.formats.safetensors_layout import Described, lay_out
from headrace.memory.buffer import Buffer
from headrace.survey import want_checkpoint
from headrace.testing import FakeCuda, FakeDeviceArray, FaultyFiles
from headrace.types import HOST, Device
from tests.support import PAGE, no_workers_left

BLOCK = 4 * PAGE
OPTIONS = hr.Options(workers=3, block_nbytes=BLOCK, pinned_nbytes=8 * BLOCK)
TENSORS = (
    Described("big", "F32", (3 * PAGE + 5,)),
    Described("packed", "F4", (3, 6)),
    Described("half", "BF16", (7, 3)),
    Described("empty", "F64", (0, 4)),
    Described("scalar", "U8", ()),
)
BIG_NBYTES = 4 * (3 * PAGE + 5)
CUDA = Device("cuda", 0)
DEVICES = pytest.mark.parametrize("device", [HOST, CUDA], ids=str)


def save(
    path: Path, tensors: Sequence[Described] = TENSORS, *, checked: bool = True
) -> dict[str, bytes]:
    """Write a file with checksums of all tensors, or of none; the bytes of each."""
    contents = {
        each.name: random.Random(each.name).randbytes(tensor_nbytes(each.dtype, each.shape))
        for each in tensors
    }
    digests = {name: xxh3_64_hexdigest(content) for name, content in contents.items()}
    named = tensors if checked else ()
    layout = lay_out(tensors, store_checksums({"format": "pt"}, named, digests))
    path.write_bytes(layout.header + b"".join(contents[spec.name] for spec in layout.tensors))
    return contents


def damage(path: Path, name: str, offset: int) -> None:
    """Flip a bit of a byte of a tensor, from its start or, below 0, from its end."""
    (place,) = (each for each in hr.explain(path).tensors if each["name"] == name)
    whole = bytearray(path.read_bytes())
    whole[place["file_offset"] + offset % place["nbytes"]] ^= 0x10
    path.write_bytes(whole)


def load(
    source: Path,
    device: Device = HOST,
    *,
    names: Sequence[str] | None = None,
    verify: bool = True,
    context: hr.Context | None = None,
    cuda: FakeCuda | None = None,
) -> tuple[dict[str, bytes], hr.Report]:
    """Load tensors into host memory, or that of a fake device."""
    cuda = cuda or FakeCuda()
    memory: dict[str, FakeDeviceArray] = {}

    def allocate(specs: tuple[TensorSpec, ...]) -> list[Buffer]:
        buffers = []
        for spec in specs:
            nbytes = spec.file_range.nbytes
            array = FakeDeviceArray(cuda, nbytes)
            memory[spec.name] = array
            buffers.append(Buffer(array.pointer, nbytes, device, array))
        return buffers

    want = want_checkpoint(source, names, verify=verify)
    with hr.Context(OPTIONS, cuda=cuda) as own:
        report = (context or own).transfer(want, device, allocate)
    return {name: array.tobytes() for name, array in memory.items()}, report


@DEVICES
def test_whole_file_is_right_and_the_report_says_how_much_was_compared(
    tmp_path: Path, device: Device
) -> None:
    contents = save(tmp_path / "model.safetensors")
    found, report = load(tmp_path / "model.safetensors", device)
    assert found == contents
    assert report.verified_nbytes == sum(map(len, contents.values())) == report.nbytes
    assert report.stages["verify"] > 0


@DEVICES
@pytest.mark.parametrize(
    "offset", [0, 1, PAGE, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, BIG_NBYTES - 1]
)
def test_each_flipped_byte_is_caught_and_its_tensor_named(
    tmp_path: Path, device: Device, offset: int
) -> None:
    path = tmp_path / "model.safetensors"
    content = save(path)["big"]
    damage(path, "big", offset)
    with pytest.raises(hr.FormatError, match="1 of 5 tensors") as caught:
        load(path, device)
    flipped = bytearray(content)
    flipped[offset] ^= 0x10
    message = str(caught.value)
    assert f"{path}: tensor 'big'" in message
    assert xxh3_64_hexdigest(content) in message
    assert xxh3_64_hexdigest(bytes(flipped)) in message
    assert "'half'" not in message
    assert no_workers_left()


@DEVICES
@pytest.mark.parametrize("name", ["packed", "half", "scalar"])
@pytest.mark.parametrize("offset", [0, -1])
def test_small_and_packed_tensors_are_compared_too(
    tmp_path: Path, device: Device, name: str, offset: int
) -> None:
    path = tmp_path / "model.safetensors"
    save(path)
    damage(path, name, offset)
    with pytest.raises(hr.FormatError, match=f"1 of 5 tensors .*: tensor '{name}'"):
        load(path, device)


def test_damaged_tensors_of_all_shards_are_named(tmp_path: Path) -> None:
    shards = {
        tmp_path / f"model-0000{number}-of-00002.safetensors": [
            Described(f"{number}.{name}", "U8", (BLOCK + number,)) for name in "abc"
        ]
        for number in (1, 2)
    }
    for path, tensors in shards.items():
        save(path, tensors)
    assert load(tmp_path)[1].verified_nbytes == 3 * (2 * BLOCK + 3)
    first, second = shards
    for path, name in ((first, "1.c"), (second, "2.a"), (second, "2.b")):
        damage(path, name, 77)
    with pytest.raises(hr.FormatError, match="3 of 6 tensors") as caught:
        load(tmp_path)
    before, after = str(caught.value).split(f"{second}: ")
    assert f"{first}: tensor '1.c'" in before
    assert "'2.a'" in after
    assert "'2.b'" in after
    assert not any(name in str(caught.value) for name in ("'1.a'", "'1.b'", "'2.c'"))


def test_only_wanted_tensors_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    contents = save(path)
    damage(path, "big", 5)
    found, report = load(path, names=["scalar", "half"])
    assert found == {name: contents[name] for name in ("half", "scalar")}
    assert report.verified_nbytes == 43
    with pytest.raises(hr.FormatError, match="1 of 2 tensors"):
        load(path, names=["scalar", "big"])


def test_damage_is_not_looked_for_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path)
    damage(path, "big", 5)
    _, report = load(path, verify=False)
    assert report.verified_nbytes is None


def test_file_without_checksums_is_loaded_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    contents = save(path, checked=False)
    found, report = load(path)
    assert found == contents
    assert report.verified_nbytes == 0


AB = (Described("a", "U8", (3,)), Described("b", "I16", (2, 1)))
A_TEXT, B_TEXT = (
    f"{xxh3_64_hexdigest(content)} {kind}"
    for content, kind in ((b"abc", "U8 [3]"), (b"wxyz", "I16 [2, 1]"))
)


@pytest.mark.parametrize("names", [None, ["b"]])
@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": "12", "b": B_TEXT}, r"the checksum of tensor 'a' is '12' \(2 characters\), not 16 "),
        ({"a": A_TEXT[:16], "b": B_TEXT}, "the checksum of tensor 'a' is .*as in '0123"),
        ({"a": A_TEXT, "b": B_TEXT, "c": B_TEXT}, "'c', of I16 .2, 1., and the file has no such"),
        ({"b": B_TEXT}, r"for tensor 'a', which is U8 \[3\], though 1 are in the file"),
        ({"a": A_TEXT.replace("U8", "I8"), "b": B_TEXT}, r"'a' is U8 \[3\] .* for I8 \[3\]"),
        ({"a": A_TEXT.replace("3]", "3, 1]"), "b": B_TEXT}, r"'a' is U8 .* for U8 \[3, 1\]"),
    ],
)
def test_entries_that_do_not_fit_the_header_are_refused_before_a_byte_is_read(
    tmp_path: Path, entries: Mapping[str, str], message: str, names: Sequence[str] | None
) -> None:
    path = tmp_path / "model.safetensors"
    layout = lay_out(AB, {f"headrace.xxh3_64.{name}": text for name, text in entries.items()})
    path.write_bytes(layout.header + b"wxyzabc")
    files = FaultyFiles()
    with hr.Context(files=files) as context:
        with pytest.raises(hr.FormatError, match=message) as caught:
            load(path, names=names, context=context)
        assert str(caught.value).startswith(f"{path}: ")
        assert "download" in str(caught.value)
        assert (files.reads, files.nbytes_read) == (0, 0)
        found = load(path, context=context, verify=False)[0]
    assert found == {"a": b"abc", "b": b"wxyz"}


@pytest.mark.parametrize("tensors", [AB, AB[:1]], ids=["two tensors", "one"])
def test_each_flipped_bit_of_a_header_is_caught_or_changes_nothing(
    tmp_path: Path, tensors: Sequence[Described]
) -> None:
    path = tmp_path / "model.safetensors"
    tensors = (*tensors, Described("none", "F32", (0, 2)))
    save(path, tensors)
    whole = path.read_bytes()
    header_nbytes = 8 + int.from_bytes(whole[:8], "little")

    def load_all(context: hr.Context) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        arrays = hn.load(path, verify=True, context=context)
        return {k: (str(v.dtype), v.shape, v.tobytes()) for k, v in arrays.items()}

    caught = 0
    with hr.Context(OPTIONS) as context:
        wanted = load_all(context)
        for bit in range(8 * header_nbytes):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                assert load_all(context) == wanted, f"bit {bit % 8} of byte {bit // 8}"
            except hr.FormatError:
                caught += 1
    assert caught > 4 * header_nbytes


def test_without_the_library_no_byte_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    files = FaultyFiles()
    with hr.Context(files=files) as context:
        with pytest.raises(ImportError, match=r"extra \[checksum\]"):
            load(tmp_path / "model.safetensors", context=context)
        assert (files.reads, files.nbytes_read) == (0, 0)
        load(tmp_path / "model.safetensors", context=context, verify=False)


class Flaky(FakeCuda):
    """A link on which one copy to the device goes wrong."""

    def copy_to_device(self, copies: Sequence[Copy], stream: int) -> None:
        super().copy_to_device(copies, stream)
        target = copies[0][0]
        if self.copies == 0:
            self.enqueue_on(stream, lambda: self.device_write(target, b"wrong"))


def test_what_arrived_on_the_device_is_what_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path)
    with pytest.raises(hr.FormatError, match="damaged"):
        load(path, CUDA, cuda=Flaky())
    load(path, CUDA)


def test_context_goes_on_after_damage_was_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    contents = save(path)
    whole = path.read_bytes()
    damage(path, "big", 5)
    cuda = FakeCuda()
    with hr.Context(OPTIONS, cuda=cuda) as context:
        with pytest.raises(hr.FormatError):
            load(path, CUDA, context=context, cuda=cuda)
        path.write_bytes(whole)
        found: Mapping[str, bytes] = load(path, CUDA, context=context, cuda=cuda)[0]
    assert found == contents
    assert cuda.errors == []

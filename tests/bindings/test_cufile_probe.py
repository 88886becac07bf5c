from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bindings.cufile_probe import CuFileProbe, probe_cufile


@contextlib.contextmanager
def _binding(folder: Path, driver_open: str) -> Iterator[None]:
    """Let child processes find a ``cuda.bindings.cufile`` whose driver opens like this."""
    package = folder / "cuda" / "bindings"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "cufile.py").write_text(
        "import os, time, types\n"
        "class cuFileError(Exception): status = 5033\n"
        "def get_version(): return 1200\n"
        "def log(text):\n"
        "    with open(os.environ['CUFILE_LOGFILE_PATH'], 'a') as file: file.write(text)\n"
        f"def driver_open():\n    {driver_open}\n"
        "class Descr: handle = types.SimpleNamespace(); ptr = 0\n"
        "FileHandleType = types.SimpleNamespace(OPAQUE_FD=1)\n"
        "def handle_register(ptr): return 3\n"
        "def handle_deregister(handle): pass\n"
        "def read(handle, pointer, nbytes, file_offset, buffer_offset): return 11\n"
    )
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


_ERROR_LINE = "log('x ERROR  cufio:1 the reason\\n')"


@pytest.mark.parametrize(
    ("driver_open", "works", "why"),
    [
        ("pass", True, "the driver opens"),
        (f"{_ERROR_LINE}; time.sleep(60)", False, "did not answer within 2 s"),
        (f"{_ERROR_LINE}; os.abort()", False, "killed its process with SIGABRT (its log: the rea"),
        ("raise cuFileError('TEXT')", False, "cuFileDriverOpen failed: NVFS_SETUP_ERROR (5033)"),
        ("os.close(0); os.close(1)", False, "ended with status"),
        ("os._exit(3)", False, "ended with status 3: it said nothing"),
    ],
)
def test_whatever_the_driver_does_to_its_child_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver_open: str, works: bool, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with _binding(tmp_path / "site", driver_open):
        found = probe_cufile(timeout_s=2.0 if "sleep" in driver_open else 30.0)
    assert found.works is works
    assert why in found.why
    assert os.listdir(tmp_path) == ["site"]


def test_probe_of_a_path_reads_its_first_page(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.write_bytes(b"x" * 11)
    cut.write_bytes(b"x" * 12)
    with _binding(tmp_path / "site", "pass"):
        assert probe_cufile(str(whole)) == CuFileProbe(
            True, f"the driver opens, and {whole} can be read", 1200, None
        )
        short = probe_cufile(str(cut))
        missing = probe_cufile(str(tmp_path / "missing"))
    assert (short.works, short.version) == (False, 1200)
    assert "gave 11 bytes" in short.why
    assert "No such file" in missing.why


def test_probe_tells_the_child_which_configuration_to_use(tmp_path: Path) -> None:
    with _binding(tmp_path / "site", "raise OSError(os.environ['CUFILE_ENV_PATH_JSON'])"):
        assert probe_cufile(config_path="/x/cufile.json").why == "/x/cufile.json"


def test_probe_without_the_bindings_says_so(tmp_path: Path) -> None:
    package = tmp_path / "cuda"
    package.mkdir()
    (package / "__init__.py").touch()
    sys.path.insert(0, str(tmp_path))
    try:
        found = probe_cufile()
    finally:
        sys.path.remove(str(tmp_path))
    assert not found.works
    assert "cuda" in found.why

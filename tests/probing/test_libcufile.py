from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from headrace.bindings.sysfs import Linux
from headrace.probing import libcufile
from headrace.probing.libcufile import ask_child, find_libcufile, probe_libcufile
from tests.support import RecordedSystem

SONAME = "libcufile.so.0"


def test_wheel_comes_before_the_cache_and_the_toolkit() -> None:
    wheel = f"/site/nvidia/cu13/lib/{SONAME}"
    system_wide = f"/usr/lib/x86_64-linux-gnu/{SONAME}"
    toolkit = f"/usr/local/cuda/lib64/{SONAME}"
    cache = f"glibc-ld.so.cache1.1\0{SONAME}\0{system_wide}\0libd.so\0/usr/lib/libd.so\0"
    texts = {wheel: "", system_wide: "", toolkit: "", "/etc/ld.so.cache": cache}
    for expected in (wheel, system_wide, toolkit):
        found, how = find_libcufile(RecordedSystem(texts), ("/other", "/site"))
        assert found == expected
        assert how
        del texts[expected]
    assert find_libcufile(RecordedSystem(texts), ("/site",))[0] == ""


def test_library_that_does_not_load_is_a_fact_with_the_linkers_words(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    (folder / SONAME).write_text("no library")
    bindings, library = probe_libcufile(Linux(), (str(tmp_path),), ask_child)
    assert library.holds is False
    assert "ELF" in library.why or "file too short" in library.why
    assert "pip install nvidia-cufile" in library.remedy
    assert bindings.holds in (True, False)


@pytest.mark.parametrize(
    "error",
    [
        subprocess.TimeoutExpired("python", 3.0),
        subprocess.CalledProcessError(-11, "python"),
        OSError("no such interpreter"),
        ValueError("no JSON"),
    ],
)
def test_child_that_hangs_or_crashes_is_a_fact(error: Exception) -> None:
    def ask(path: str) -> NoReturn:
        raise error

    path = f"/site/nvidia/cu13/lib/{SONAME}"
    bindings, library = probe_libcufile(RecordedSystem({path: ""}), ("/site",), ask)
    assert (bindings.holds, library.holds) == (None, False)
    assert str(error) in library.why


def test_child_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "libcufile_child.py"
    script.write_text("while True: pass\n")
    monkeypatch.setattr("headrace.bindings.__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(libcufile, "TIMEOUT_S", 0.3)
    with pytest.raises(subprocess.TimeoutExpired):
        ask_child("")


def test_version_and_bindings_are_told() -> None:
    def ask(path: str) -> Mapping[str, str]:
        return {"bindings": "13.3.1", "version": "1.20.0"}

    path = f"/site/nvidia/cu13/lib/{SONAME}"
    bindings, library = probe_libcufile(RecordedSystem({path: ""}), ("/site",), ask)
    assert bindings.found == "cuda.bindings 13.3.1"
    assert library.found == f"{path}, version 1.20.0"

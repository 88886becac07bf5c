"""What a suite needs whose files must lie on a certain file system."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing.route_suite import RouteSuite


class InFolder(RouteSuite):
    """All files of the tests lie in `folder`, for which a subclass gives another fixture."""

    __test__ = False

    @pytest.fixture
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("folder")

    @pytest.fixture(autouse=True)
    def _temporary_files(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also a property's files lie there; no example may ask for a fixture of its own."""
        monkeypatch.setattr(tempfile, "tempdir", str(folder))

    @pytest.fixture
    def tmp_path(self, folder: Path) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=folder) as path:
            yield Path(path)

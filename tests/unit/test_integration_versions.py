"""The integrations support stated versions of other libraries, and say so."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from poplar.integrations.versions import SUPPORTED, check_version

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("library", SUPPORTED)
def test_installed_versions_are_supported(library, monkeypatch):
    check_version(library)
    oldest, end = SUPPORTED[library]
    monkeypatch.setattr(metadata, "version", lambda _: f"{oldest}.0rc1")
    check_version(library)
    for other in ("0.1", end, f"{end}.1"):
        monkeypatch.setattr(metadata, "version", lambda _, other=other: other)
        with pytest.raises(ImportError, match=rf"but {other} is installed; install '{library}>="):
            check_version(library)


@pytest.mark.parametrize("library", SUPPORTED)
def test_extras_install_supported_versions(library):
    oldest, end = SUPPORTED[library]
    assert f'"{library}>={oldest},<{end}"' in PROJECT.read_text(encoding="utf-8")


def test_a_missing_library_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match="needs lightning; install"):
        check_version("lightning")


def test_no_other_library_is_imported_before_it_is_used():
    code = "import poplar.optimizer, sys; print(set(sys.modules) & %r)" % {*SUPPORTED, "wandb"}
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()"

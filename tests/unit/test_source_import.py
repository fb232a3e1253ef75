"""Importing the sources, which are not compiled, says what to do instead."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import poplar


def test_sources_that_are_not_compiled_say_so(tmp_path: Path) -> None:
    source = Path(poplar.__file__).parent
    copy = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(source, tmp_path / "poplar", ignore=copy)
    (tmp_path / "train.py").write_text("from poplar import HeteroZeroOptimizer\n", "utf-8")
    # Without the finder of an editable install, which would find the compiled modules.
    command = [sys.executable, "-c", "import sys; sys.meta_path = sys.meta_path[-3:]; import train"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "it is the source, not an installed Poplar" in ran.stderr, ran.stderr
    assert "pip install -e ." in ran.stderr

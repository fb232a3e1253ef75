"""The README's programs run as they stand, its links lead somewhere, and its table is current."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torchrun
from readme import QUICKSTART_LINES, README, REPOSITORY, quickstart, save_quickstart
from subset import choose


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "POPLAR_CACHE": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_quickstart_trains_on_two_cpu_ranks(tmp_path):
    """As it stands with `--full`; otherwise with forks and fewer seconds for measurements."""
    script = save_quickstart(tmp_path)
    budget = choose(quick="seconds=1", full="seconds=20")
    assert "seconds=20" in script.read_text("utf-8")
    script.write_text(script.read_text("utf-8").replace("seconds=20", budget), "utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    if choose(quick=True, full=False):
        variables = {"POPLAR_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        done = torchrun.run([script], ranks=2, environment=variables, timeout=300)
    else:
        done = run([*launcher, "--nproc-per-node", "2", script.name], tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 16
    assert losses[-1] < losses[0]


def test_quickstart_without_torchrun_names_torchrun(tmp_path):
    script = save_quickstart(tmp_path)
    done = run([sys.executable, script.name], tmp_path)
    assert done.returncode != 0
    assert "torchrun" in done.stderr
    assert "Traceback" not in done.stderr


def test_quickstart_is_short():
    assert len(quickstart().splitlines()) < QUICKSTART_LINES


def test_readme_has_at_most_1000_words():
    assert len(README.read_text("utf-8").split()) <= 1000


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_local_links_lead_to_files(document):
    path = REPOSITORY / document
    text = path.read_text("utf-8")
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (path.parent / target).exists()]
    assert not missing


@functools.cache
def summary() -> list[str]:
    """The lines that the command prints."""
    command = [sys.executable, "benchmarks/summary.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md"])
def test_results_table_is_what_its_command_prints(document):
    printed = summary()
    lines = (REPOSITORY / document).read_text("utf-8").splitlines()
    start = lines.index(printed[0])
    table = lines[start : lines.index("", start)]
    assert set(table) <= set(printed)


def test_benchmarks_page_names_the_commits_of_its_table():
    page = (REPOSITORY / "docs/benchmarks.md").read_text("utf-8")
    assert summary()[-1] in page.splitlines()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_picture_says_that_it_is_simulated(theme):
    picture = ElementTree.parse(REPOSITORY / f"docs/assets/step-{theme}.svg")
    texts = [element.text or "" for element in picture.iter()]
    assert any("Simulated from published GPU measurements" in text for text in texts)

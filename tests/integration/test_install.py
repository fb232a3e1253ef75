"""`pip install .` in an environment that has torch and nothing else that Poplar does not declare.

The environment is a new virtual one; torch, the declared dependencies and what they need are linked
from this one, so nothing is downloaded but what builds the package. Only the test of a new user's
path links nothing but torch, and downloads the other packages.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from readme import patched, save_quickstart

from poplar import ops
from poplar.monitoring import RunRecord

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SITE = Path("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
RUN_SECONDS = 1200
NEW_USER_SECONDS = 300
"""From the wheel to the end of the first planned steps of a script for Hugging Face's Trainer."""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

SAVE_AND_VERIFY = """
import torch
import torch.distributed as dist
from torch import nn
import poplar

def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

dist.init_process_group("gloo")
torch.manual_seed(0)
batch = torch.randn(4, 16), torch.randn(4, 1)
model, plan = nn.Linear(16, 1), poplar.Plan.even(2, 4, 2, stage=3)
assert poplar.verify(model, loss_fn, batch, plan).ok
optimizer = poplar.HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=1e-3)
optimizer.save_model("model.safetensors")
dist.destroy_process_group()
"""


def declared_dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"]


def with_requirements(requirements: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions that these requirements name, and all that those need."""
    waiting, found = [(Requirement(text), "") for text in requirements], set()
    while waiting:
        requirement, extra = waiting.pop()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if not applies or str(requirement) in found:
            continue
        found.add(str(requirement))
        distribution = importlib.metadata.distribution(requirement.name)
        yield distribution
        waiting += [
            (Requirement(needed), extra)
            for needed in distribution.requires or []
            for extra in {"", *requirement.extras}
        ]


def link_packages(site: Path, requirements: list[str]) -> None:
    """Link packages and all that they need into an environment."""
    for distribution in with_requirements(requirements):
        for top in {file.parts[0] for file in distribution.files if file.parts[0] != ".."}:
            source = Path(distribution.locate_file(top))
            if source.exists() and not (site / top).exists() and top != "__pycache__":
                (site / top).symlink_to(source)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The Python of an environment into which this checkout was installed, as the README says."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    link_packages(folder / SITE, declared_dependencies())
    python = folder / "bin" / "python"
    source = tmp_path_factory.mktemp("checkout") / "poplar"
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
    changed = subprocess.run(
        ["git", "diff", "HEAD"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    if changed:
        subprocess.run(["git", "apply"], input=changed, cwd=source, check=True)
    run(python, "-m", "pip", "install", ".", folder=source)
    return python


def run(
    *command: object,
    folder: Path,
    fails: bool = False,
    path: str | None = None,
    seconds: float = RUN_SECONDS,
) -> str:
    hidden = ("PYTHONPATH", "POPLAR_OPS", "RANK", "WORLD_SIZE", "VIRTUAL_ENV")
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if name not in hidden},
            **({} if path is None else {"PATH": path}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert (finished.returncode != 0) == fails, finished.stdout
    return finished.stdout


@pytest.mark.full
def test_installation_has_the_cpu_operators_despite_build_isolation(installed, tmp_path):
    out = run(installed, "-c", "from poplar import ops; print(ops.describe())", folder=tmp_path)
    assert "CPU: C++ (libpoplar_ops.so)" in out


@pytest.mark.full
def test_environment_has_only_declared_packages(installed, tmp_path):
    for package in ("hypothesis", "matplotlib", "scipy", "transformers"):
        printed = run(installed, "-c", f"import {package}", folder=tmp_path, fails=True)
        assert f"No module named '{package}'" in printed


@pytest.mark.full
def test_quickstart_needs_only_declared_packages(installed, tmp_path):
    run(installed, *TORCHRUN, save_quickstart(tmp_path), folder=tmp_path)


@pytest.mark.full
def test_quickstart_without_torchrun_ends_with_an_error_that_names_it(installed, tmp_path):
    assert "torchrun" in run(installed, save_quickstart(tmp_path), folder=tmp_path, fails=True)


@pytest.mark.full
def test_saving_and_verifying_need_only_declared_packages(installed, tmp_path):
    (tmp_path / "script.py").write_text(SAVE_AND_VERIFY)
    run(installed, *TORCHRUN, "script.py", folder=tmp_path)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.full
def test_doctor_needs_only_declared_packages(installed, tmp_path):
    assert "torch" in run(installed, "-m", "poplar", "doctor", folder=tmp_path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """What `make wheel` builds from this checkout, with the packages of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    made = (f"BIN={Path(sys.executable).parent}", f"WHEELS={folder}", f"WHEEL_BUILD={folder}/build")
    run("make", "-o", "setup", *made, "wheel", folder=ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed_wheel(wheel, tmp_path_factory) -> Path:
    """The Python of an environment into which the wheel was installed, with no program on PATH."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    link_packages(folder / SITE, declared_dependencies())
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-index", wheel, folder=folder, path="")
    return python


@pytest.mark.full
def test_wheel_is_for_many_linux_distributions_and_leaves_torch_out(wheel):
    assert "-manylinux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        libraries = [Path(name).name for name in archive.namelist() if ".so" in name]
    assert sorted(name.partition(".")[0] for name in libraries) == ["_core", "libpoplar_ops"]


@pytest.mark.full
def test_wheel_needs_no_compiler(installed_wheel, tmp_path):
    out = run(
        installed_wheel,
        "-c",
        "from poplar import ops; print(ops.describe())",
        folder=tmp_path,
        path="",
    )
    assert "CPU: C++ (libpoplar_ops.so)" in out
    run(installed_wheel, *TORCHRUN, save_quickstart(tmp_path), folder=tmp_path, path="")


@pytest.mark.full
def test_new_user_gets_from_the_wheel_to_planned_steps_in_five_minutes(wheel, tmp_path):
    began = time.monotonic()
    ends = began + NEW_USER_SECONDS
    venv.create(tmp_path / "environment", with_pip=True)
    link_packages(tmp_path / "environment" / SITE, ["torch"])
    python = tmp_path / "environment" / "bin" / "python"
    options = {"folder": tmp_path, "path": ""}  # no compiler
    wanted = f"{wheel}[transformers]"
    run(python, "-m", "pip", "install", wanted, seconds=ends - time.monotonic(), **options)
    installed = time.monotonic()

    script, changed = patched("examples/plain_trainer.py", "docs/guides/transformers.md")
    (tmp_path / "train.py").write_text(script)
    trained = ("train.py", "--output_dir", "run", "--max_steps", "3", "--use_cpu")
    printed = run(python, *TORCHRUN, *trained, seconds=ends - time.monotonic(), **options)
    assert "eval_loss" in printed
    assert (tmp_path / "run" / "model.safetensors").exists()
    (run_of_plan,) = RunRecord.from_json(tmp_path / "run" / "poplar_run.json").runs
    assert len(run_of_plan.step_seconds) == 2, "of 3 steps, without the first"
    print(
        f"from the wheel to planned steps: {installed - began:.0f} s to install, "
        f"{time.monotonic() - installed:.0f} s to measure, plan, train, save and evaluate; "
        f"{changed} changed lines"
    )


@pytest.fixture
def not_built(monkeypatch) -> ops.Provider:
    """What runs the operators if their library was not built, on rank 0."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ops, "_CHOICE", "")
    return ops._load("libpoplar_ops_that_was_not_built.so")


def test_missing_operators_cause_a_warning(not_built):
    with pytest.warns(RuntimeWarning, match="without its C\\+\\+ operators.*install torch first"):
        ops._warn_if_not_built(not_built)


@pytest.mark.filterwarnings("error")
def test_operators_that_were_built_cause_no_warning(not_built):
    ops._warn_if_not_built(replace(not_built, name="C++"))


@pytest.mark.filterwarnings("error")
def test_operators_that_were_switched_off_cause_no_warning(not_built, monkeypatch):
    monkeypatch.setattr(ops, "_CHOICE", "off")
    ops._warn_if_not_built(not_built)


@pytest.mark.filterwarnings("error")
def test_only_rank_0_warns(not_built, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    ops._warn_if_not_built(not_built)

"""The cache returns profiles of the same identity only, and never damaged ones.

Most tests save a profile and ask for it with a loss function that raises: a rank answers
"from the cache", or that it would have measured.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool
from records import cluster as measured_cluster
from torch import Tensor, nn

import poplar
from poplar import ClusterProfile, Plan
from poplar.comm import Group
from poplar.planner.search import search
from poplar.profiler import cache as caching
from poplar.profiler.cache import Cache
from poplar.profiler.job import Job
from poplar.profiler.session import Session
from poplar.system import devices, host_limits
from poplar.tuning import autotune
from poplar.tuning.profile_cluster import _folder

SMALL = ModelSpec(kind="mlp", blocks=1)
GLOBAL_BATCH = 8
KEY = json.dumps([GLOBAL_BATCH, "exact", "auto"])
CACHED, MEASURED = "from the cache", "measured"


class WouldMeasure(Exception):
    """Raised instead of running the model."""


def refuses_to_run(model: nn.Module, batch: Any) -> Tensor:
    raise WouldMeasure


def another_loss(model: nn.Module, batch: Any) -> Tensor:
    raise WouldMeasure


def a_loss_of_the_same_name() -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise WouldMeasure(batch)

    loss.__qualname__ = refuses_to_run.__qualname__
    return loss


def another_forward(self: nn.Module, tokens: Tensor) -> Tensor:
    return self.head(self.norm(self.embedding(tokens)))


def asked_for(folder: str, spec: ModelSpec = SMALL, **changes: Any) -> dict[str, Any]:
    """The usual arguments of `profile_cluster` on this rank, with `changes`."""
    return {
        "model": models.build(spec),
        "loss_fn": refuses_to_run,
        "example_batch": models.data(3, seed=1),
        "process_group": harness.group(),
        "stages": (0, 2),
        "seconds": 0.5,
        "max_batch": 4,
        "memory_limit": 1 << 30,
        "cache": folder,
        "progress": False,
        "lr": 1e-3,
        **changes,
    }


def identity(prepare: Callable[[], dict[str, Any]] = dict) -> dict[str, str]:
    """The identity of the usual job with changes."""
    usual = asked_for("", **prepare())
    model, loss_fn, example = (usual.pop(name) for name in ("model", "loss_fn", "example_batch"))
    job = Job.of(model, loss_fn, example, **usual)
    return dict(Session(job, Group.of(job.process_group, job.timeout)).identity)


def where_from(
    folder: str, prepare: Callable[[], dict[str, Any]] | None = None
) -> tuple[str, list[str]]:
    """Whether the profile comes from the cache on this rank, and the warnings."""
    changes = prepare() if prepare is not None else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            poplar.profile_cluster(**asked_for(folder, **changes))
            source = CACHED
        except WouldMeasure:
            source = MEASURED
        except poplar.RankFailed as error:
            source = MEASURED if "WouldMeasure" in str(error) else str(error)
    return source, [str(w.message) for w in caught if "cache" in str(w.message)]


@pytest.fixture(scope="module")
def usual_identity(ranks: Pool) -> dict[str, str]:
    first, *others = ranks.run(identity)
    assert others == [first] * 3
    return first


def a_profile(identity: dict[str, str], speeds: tuple[float, ...] = (4, 3, 2, 1)) -> ClusterProfile:
    return replace(measured_cluster(speeds, ["cpu"] * len(speeds)), identity=identity)


def a_plan(profile: ClusterProfile) -> Plan:
    return search(profile, global_batch=GLOBAL_BATCH, stages=(0,))


@pytest.fixture
def saved_file(usual_identity: dict[str, str], tmp_path: Path) -> Path:
    """The file of the usual request."""
    profile = a_profile(usual_identity)
    return Cache(tmp_path).save(profile, {KEY: a_plan(profile)})


# Found


class Counting:
    """A loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return models.mean_over_samples(model, batch)


def profiled_twice(folder: str) -> tuple[bool, list[int]]:
    loss = Counting()
    calls, profiles = [], []
    for _ in range(2):
        before = loss.calls
        profiles.append(poplar.profile_cluster(**asked_for(folder, loss_fn=loss, max_batch=2)))
        calls.append(loss.calls - before)
    return profiles[0] == profiles[1] and profiles[0].budget_seconds == 0.5, calls


def test_second_profile_comes_from_the_cache(ranks: Pool, tmp_path: Path):
    for same, (measuring, cached) in ranks.run(profiled_twice, str(tmp_path), ranks=2):
        assert same
        assert measuring > 0
        assert cached == 0


def tuned_twice(folder: str) -> tuple[list[Plan], list[int]]:
    loss = Counting()
    calls, plans = [], []
    for _ in range(2):
        before = loss.calls
        arguments = asked_for(folder, loss_fn=loss, max_batch=2)
        del arguments["stages"]
        plans.append(poplar.autotune(**arguments, global_batch=GLOBAL_BATCH, stage=2))
        calls.append(loss.calls - before)
    return plans, calls


def test_verified_plan_comes_from_the_cache(ranks: Pool, tmp_path: Path):
    answers = ranks.run(tuned_twice, str(tmp_path), ranks=2)
    for rank, ((tuned, found), (measuring, cached)) in enumerate(answers):
        assert found == tuned == answers[0][0][0]
        assert found.prediction == tuned.prediction
        assert measuring > 0
        assert cached < 10 if rank == 0 else cached == 0, "one rank checks the weight of samples"


def with_more_time() -> dict[str, Any]:
    return {"seconds": 0.7}


def with_much_more_time() -> dict[str, Any]:
    return {"seconds": 0.75}


def test_profile_of_a_much_smaller_time_budget_is_measured_again(
    ranks: Pool, usual_identity: dict[str, str], tmp_path: Path
):
    Cache(tmp_path).save(replace(a_profile(usual_identity), budget_seconds=0.5), {})
    for prepare, source in [(with_more_time, CACHED), (with_much_more_time, MEASURED)]:
        assert ranks.run(where_from, str(tmp_path), prepare) == [(source, [])] * 4


def profiled_with_less_memory(folder: str) -> tuple[list[int], int]:
    """Memory of rank 1 before, during and after a limit; and the number of loss computations."""
    loss = Counting()
    request = {"loss_fn": loss, "max_batch": 1, "stages": (0,), "memory_limit": None}
    profiles = [poplar.profile_cluster(**asked_for(folder, **request))]
    loss.calls = 0
    if harness.rank() == 1:
        _patch(devices, "memory_available", lambda device, ranks: 1000)
    try:
        profiles.append(poplar.profile_cluster(**asked_for(folder, **request)))
    finally:
        unpatch()
    profiles.append(poplar.profile_cluster(**asked_for(folder, **request)))
    return [profile.devices[1].memory_bytes for profile in profiles], loss.calls


def test_cached_profile_has_the_present_memory(ranks: Pool, tmp_path: Path):
    for memory, calls in ranks.run(profiled_with_less_memory, str(tmp_path), ranks=2):
        before, meanwhile, afterwards = memory
        assert meanwhile == 1000
        assert min(before, afterwards) > 1000
        assert calls == 0


def plans_in_the_cache(folder: str) -> list[str]:
    """Keys in the cache after a plan was verified while an older one did not fit."""
    arguments = asked_for(folder, loss_fn=Counting(), max_batch=2)
    del arguments["stages"]
    for batch in (GLOBAL_BATCH, GLOBAL_BATCH + 1):
        if batch != GLOBAL_BATCH:
            _patch(autotune, "fits", lambda profile, plan: False)
        try:
            poplar.autotune(**arguments, global_batch=batch, stage=2)
        finally:
            unpatch()
    path = next(Path(folder).glob("profiles/*.json"))
    return sorted(json.loads(path.read_text())["content"]["plans"])


def test_plan_that_does_not_fit_stays_in_the_cache(ranks: Pool, tmp_path: Path):
    expected = [
        json.dumps([batch, "exact", "auto", "auto", "auto", "auto", "exact"])
        for batch in (GLOBAL_BATCH, GLOBAL_BATCH + 1)
    ]
    assert ranks.run(plans_in_the_cache, str(tmp_path), ranks=1)[0] == sorted(expected)


def with_the_number_of_the_rank() -> dict[str, Any]:
    return with_settings(rank=harness.rank(), is_first=harness.rank() == 0)


def test_identity_of_models_that_differ_by_rank_is_the_same_on_all_ranks(ranks: Pool):
    first, *others = ranks.run(identity, with_the_number_of_the_rank)
    assert others == [first] * 3


# Not used: another request


def frozen_or_checkpointed(**flags: bool) -> dict[str, Any]:
    """The usual model, whose head has other flags."""
    model = models.build(SMALL)
    if "trains" in flags:
        model.head.weight.requires_grad_(flags["trains"])
    else:
        model.head.gradient_checkpointing = True
    return {"model": model}


def longer_samples() -> dict[str, Any]:
    batch = models.data(3, seed=1)
    return {"example_batch": {key: value[:, :5] for key, value in batch.items()}}


_PATCHED: list[tuple[Any, str, Any]] = []


def _patch(where: Any, name: str, value: Any) -> dict[str, Any]:
    _PATCHED.append((where, name, getattr(where, name)))
    setattr(where, name, value)
    return {}


def unpatch() -> None:
    while _PATCHED:
        setattr(*_PATCHED.pop())


def another_device() -> dict[str, Any]:
    before = devices.describe
    other = {"name": "Another 9000"}
    return _patch(devices, "describe", lambda device: replace(before(device), **other))


@dataclass
class Settings:
    """As of a model; `attention` decides which kernels run."""

    attention: str = "eager"


def with_settings(**settings: Any) -> dict[str, Any]:
    """The usual model, whose head has these attributes."""
    model = models.build(SMALL)
    vars(model.head).update(settings)
    return {"model": model}


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "wider": lambda: {"spec": replace(SMALL, hidden=67)},
    "deeper": lambda: {"spec": replace(SMALL, blocks=2)},
    "another mode": lambda: {"model": models.build(SMALL).eval()},
    "another dtype": lambda: {"spec": replace(SMALL, dtype=torch.bfloat16)},
    "partly frozen": lambda: frozen_or_checkpointed(trains=False),
    "checkpointing": frozen_or_checkpointed,
    "a number in a module": lambda: with_settings(depth=40),
    "a text in a module of one rank": lambda: with_settings(
        **({"attention": "eager"} if harness.rank() == 2 else {})
    ),
    "a tuple in a module": lambda: with_settings(window=(128, None)),
    "a config in a module": lambda: with_settings(config=Settings("sdpa")),
    "computing in bf16": lambda: {"compute_dtype": torch.bfloat16},
    "reducing in bf16": lambda: {"reduce_dtype": torch.bfloat16},
    "SGD": lambda: {"optimizer_class": torch.optim.SGD},
    "amsgrad": lambda: {"amsgrad": True},
    "a larger batch": lambda: {"max_batch": 5},
    "a larger batch on one rank": lambda: {"max_batch": 5 if harness.rank() == 2 else 4},
    "less memory on one rank": lambda: {"memory_limit": 1 << (29 if harness.rank() == 3 else 30)},
    "other stages": lambda: {"stages": (0, 3)},
    "no clipping": lambda: {"max_norm": None},
    "other units": lambda: {"units": ["embedding", "head"]},
    "longer samples": longer_samples,
    "another loss": lambda: {"loss_fn": another_loss},
    "a quota": lambda: _patch(host_limits, "processor_quota", lambda: 0.5),
    "another forward": lambda: _patch(models.Perceptron, "forward", another_forward),
    "another code of the loss": lambda: {"loss_fn": a_loss_of_the_same_name()},
    "another precision": lambda: _patch(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "another kernel of attention": lambda: _patch(
        torch.backends.cuda, "math_sdp_enabled", lambda: False
    ),
    "other algorithms of cuDNN": lambda: _patch(torch.backends.cudnn, "benchmark", True),
    "another poplar": lambda: _patch(poplar, "__version__", "99.0"),
    "another torch": lambda: _patch(torch, "__version__", "99.0"),
    "another device": another_device,
    "another backend": lambda: _patch(Group, "backend_for", lambda group, device: "another"),
    "no cache": lambda: {"cache": False},
}
SAME: dict[str, Callable[[], dict[str, Any]]] = {
    "no change": dict,
    "other values in the update": lambda: {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-5},
    "a partial function": lambda: {"loss_fn": functools.partial(refuses_to_run)},
}
"""Changes that leave the identity as it is."""


def where_all_from(folder: str) -> dict[str, tuple[str, list[str]]]:
    answers = {}
    for name, change in (CHANGES | SAME).items():
        try:
            answers[name] = where_from(folder, change)
        finally:
            unpatch()
    return answers


def test_changed_requests_are_measured(ranks: Pool, saved_file: Path):
    before = saved_file.read_bytes()
    expected = dict.fromkeys(CHANGES, (MEASURED, [])) | dict.fromkeys(SAME, (CACHED, []))
    for answers in ranks.run(where_all_from, str(saved_file.parents[1])):
        assert answers == expected
    assert saved_file.read_bytes() == before


def test_other_world_size_is_measured(ranks: Pool, saved_file: Path):
    assert ranks.run(where_from, str(saved_file.parents[1]), ranks=3) == [(MEASURED, [])] * 3


# Not used: damaged


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def a_changed_number(path: Path) -> None:
    document = json.loads(path.read_text())
    document["content"]["profile"]["devices"][1]["points"][0]["seconds"] *= 10
    path.write_text(json.dumps(document))


def no_file(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def edited(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content and its checksum."""
    content = json.loads(path.read_text())["content"]
    edit(content)
    path.write_text(json.dumps({"sha256": caching._checksum(content), "content": content}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncated, "JSONDecodeError"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 100), "can't decode"),
    "another shape": (lambda path: path.write_text("[1, 2, 3]"), "TypeError"),
    "a changed number": (a_changed_number, "its checksum is wrong"),
    "nested": (lambda path: path.write_text("[" * 100_000 + "]" * 100_000), "nested too deeply"),
    "a pipe": (lambda path: no_file(path, os.mkfifo), "not a regular file"),
}
EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another format": (lambda c: c["profile"].update(version=99), "profile format 99"),
    "another job": (
        lambda c: c["profile"]["identity"].update(device="Another 9000"),
        "its identity is that of another profile",
    ),
    "without a field": (
        lambda c: c["profile"]["network"].pop("all_gather_seconds"),
        "all_gather_seconds",
    ),
    "impossible": (
        lambda c: c["profile"]["devices"][0]["points"][0].update(seconds=-1),
        "above 0",
    ),
    "a damaged plan": (lambda c: c["plans"][KEY].update(global_batch=9), "global_batch is 9"),
}


@pytest.mark.parametrize("name", [*DAMAGES, *EDITS])
def test_damaged_file_gives_a_warning(usual_identity, saved_file: Path, name: str):
    if name in DAMAGES:
        damage, why = DAMAGES[name]
        damage(saved_file)
    else:
        edit, why = EDITS[name]
        edited(saved_file, edit)
    with pytest.warns(UserWarning, match="measuring again") as caught:
        assert Cache(saved_file.parents[1]).load(usual_identity) is None
    (warning,) = caught
    assert str(saved_file) in str(warning.message)
    assert why in str(warning.message)


def test_damaged_file_is_measured_again_with_one_warning(ranks: Pool, saved_file: Path):
    truncated(saved_file)
    first, *others = ranks.run(where_from, str(saved_file.parents[1]))
    assert others == [(MEASURED, [])] * 3
    assert first[0] == MEASURED
    assert len(first[1]) == 1


# Saving


def test_profiles_are_found_by_identity(tmp_path: Path):
    cache, profile = Cache(tmp_path / "new" / "folder"), a_profile({"model": "A"})
    plan = a_plan(profile)
    assert cache.load({"model": "A"}) is None
    cache.save(profile, {KEY: plan})
    found, plans = cache.load({"model": "A"})
    assert (found, plans) == (profile, {KEY: plan})
    assert plans[KEY].prediction == json.loads(json.dumps(plan.prediction))
    assert cache.load({"model": "B"}) is None


def test_saving_replaces_the_file(tmp_path: Path):
    cache = Cache(tmp_path)
    older, newer = a_profile({"model": "A"}), a_profile({"model": "A"}, (1, 2, 3, 4))
    assert cache.save(older, {}) == cache.save(newer, {})
    assert cache.load({"model": "A"}) == (newer, {})


def test_interrupted_save_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(caching.json, "dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Cache(tmp_path).save(a_profile({"model": "A"}), {})
    assert not list(tmp_path.rglob("*.*"))


def test_files_are_written_atomically(tmp_path: Path):
    cache = Cache(tmp_path)
    versions = [a_profile({"model": "A"}, speeds) for speeds in ((4, 3, 2, 1), (1, 2, 3, 4))]
    cache.save(versions[0], {})
    seen: list[Any] = []

    def read() -> None:
        for _ in range(100):
            seen.append(cache.load({"model": "A"}))

    def write() -> None:
        for number in range(100):
            cache.save(versions[number % 2], {})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=work) for work in (read, write, read, write)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 200
    assert all(found is not None and found[0] in versions for found in seen)
    assert len(list(tmp_path.rglob("*.*"))) == 1


def test_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POPLAR_CACHE", raising=False)
    assert caching.default_folder() == tmp_path / "poplar"
    monkeypatch.setenv("POPLAR_CACHE", str(tmp_path / "mine"))
    assert caching.default_folder() == tmp_path / "mine"
    monkeypatch.delenv("POPLAR_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert caching.default_folder() == tmp_path / "home" / ".cache" / "poplar"


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container runs under a user id that it does not know."""
    for name in ("HOME", "XDG_CACHE_HOME", "POPLAR_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_uid: int) -> Any:
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.mark.usefixtures("without_home")
def test_a_user_without_a_home_has_no_cache(tmp_path: Path):
    assert caching.default_folder() is None
    with pytest.warns(UserWarning, match="set POPLAR_CACHE"):
        assert _folder(True, warns=True) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _folder(True, warns=False) is None
        assert _folder(False, warns=True) is None
        assert _folder(tmp_path, warns=True) == tmp_path


def profiled_into(folder: str) -> tuple[int, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile = poplar.profile_cluster(
            **asked_for(folder, loss_fn=models.mean_over_samples, max_batch=1, stages=(0,))
        )
    return profile.world_size, [str(w.message) for w in caught if "cache" in str(w.message)]


def test_failing_to_save_is_a_warning(ranks: Pool, tmp_path: Path):
    folder = tmp_path / "a file"
    folder.write_text("in the way")
    first, *others = ranks.run(profiled_into, str(folder))
    assert others == [(4, [])] * 3
    assert first[0] == 4
    assert str(folder) in first[1][0]

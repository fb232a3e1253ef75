"""A saved training state goes on with the same bits, under other plans, and in plain PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
import torch.distributed.checkpoint as dcp
from ranks import Pool
from test_materialization import LanguageModel, values_of
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training import STAGES, assert_close, whole_parameters

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.data.global_batch import rank_slice
from poplar.elastic import MemoryCheckpoints

BATCH = 8
EPS = {"eps": 1e-5}  # see test_exact_steps.py
FOUR = Plan(
    stage=3,
    global_batch=BATCH,
    micro_batches=((2, 1), (1, 1), (1, 1), (1, 0)),
    shares=(0.4, 0.3, 0.2, 0.1),
)
THREE = Plan(
    stage=1,
    global_batch=BATCH,
    micro_batches=((2, 2), (2,), (2,)),
    shares=(0.5, 0.25, 0.25),
)


def plan_of_three(stage: int) -> Plan:
    batches = ((2, 2), (2, 1), (1, 0))
    return Plan(stage=stage, global_batch=BATCH, micro_batches=batches, shares=(0.6, 0.4, 0.0))


class OddModel(LanguageModel):
    """With a parameter without elements, which FSDP2 rejects, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(5))
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.empty.sum()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}]


def build(
    plan: Plan,
    *,
    seed: int = 0,
    model_class: type[nn.Module] = LanguageModel,
    cls: Any = torch.optim.AdamW,
    **options: Any,
) -> tuple[nn.Module, HeteroZeroOptimizer]:
    torch.manual_seed(seed)
    model = model_class().to(harness.device())
    options = {"lr": 1e-2, **EPS, "compute_dtype": torch.float32, **options}
    if cls is not torch.optim.AdamW:
        del options["eps"]
    groups = groups_of(model)
    return model, HeteroZeroOptimizer(
        model, cls, plan=plan, params=groups, process_group=harness.group(), **options
    )


def batch_of(step: int, start: int, stop: int) -> dict[str, Tensor]:
    batch = models.part(models.data(BATCH, seed=step), start, stop)
    return {key: value.to(harness.device()) for key, value in batch.items()}


def noisy_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Depends on the random state of the rank, as dropout does."""
    return models.mean_over_samples(model, batch) * (1 + 0.1 * torch.rand(()).item())


def train(
    optimizer: HeteroZeroOptimizer, first: int, steps: int, loss: Any = models.mean_over_samples
) -> None:
    for step in range(first, first + steps):
        optimizer.train_step(loss, batch_of(step, *rank_slice(optimizer.plan, harness.rank(), 8)))


def saver_of(kind: str, optimizer: HeteroZeroOptimizer, folder: str, **options: Any) -> Any:
    """What saves in a folder. With spares, the ranks are on hosts of their own."""
    if kind == "disk":
        return poplar.CheckpointManager(folder, optimizer, **options)
    own = f"{folder}/{harness.rank() if options.get('spare_shards') else 0}"
    return MemoryCheckpoints(optimizer, folder=own, **options)


def resume(saver: str, stage: int, options: dict[str, Any], folder: str, spares: int = 0) -> None:
    """With spares, the host of rank 1 is lost."""
    plan = plan_of_three(stage)
    settings = {"spare_shards": spares} if spares else {}
    model, optimizer = build(plan, model_class=OddModel, **options)
    torch.manual_seed(harness.rank())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = {"scheduler": scheduler, "note": [1, "a"]}
    checkpoints = saver_of(saver, optimizer, folder, state=state, **settings)
    assert checkpoints.load_latest() is None
    for step in (1, 2, 3):
        train(optimizer, step - 1, 1, noisy_loss)
        scheduler.step()
        model.extra = {"seen": step}
        model.steps.fill_(harness.rank() + step)  # a buffer that differs between ranks
        checkpoints.save(step)
    train(optimizer, 3, 2, noisy_loss)
    expected, drawn = whole_parameters(model, optimizer), torch.rand(3)
    if spares and harness.rank() == 1:
        shutil.rmtree(checkpoints.folder)

    model, optimizer = build(plan, seed=1, model_class=OddModel, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = {"scheduler": scheduler}
    checkpoints = saver_of(saver, optimizer, folder, state=state, **settings)
    assert checkpoints.load_latest() == 3
    assert checkpoints.values == {"note": [1, "a"]}
    assert scheduler.last_epoch == 3
    assert model.extra == {"seen": 3}
    assert set(model.steps.tolist()) == {harness.rank() + 3}
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 8, 2e-2 / 8]
    train(optimizer, 3, 2, noisy_loss)
    found = whole_parameters(model, optimizer)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("saver", "options"),
    [
        ("disk", {}),
        ("disk", {"compute_dtype": torch.bfloat16}),
        ("disk", {"compute_dtype": torch.float16}),
        ("disk", {"cls": torch.optim.SGD, "momentum": 0.9}),
        ("disk", {"amsgrad": True}),
        ("memory", {}),
        ("memory", {"compute_dtype": torch.bfloat16}),
        ("memory", {"cls": torch.optim.SGD, "momentum": 0.9}),
    ],
)
def test_training_goes_on_with_the_same_bits(
    ranks: Pool, saver: str, stage: int, options: dict[str, Any], tmp_path: Path
) -> None:
    ranks.run(resume, saver, stage, options, str(tmp_path), ranks=3)


def start(folder: str) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and five steps that nothing interrupts."""
    model, optimizer = build(FOUR)
    train(optimizer, 0, 2)
    unshard = mock.patch.object(
        optimizer._training.engine.strategy, "unshard", side_effect=AssertionError
    )
    with unshard:
        poplar.save_checkpoint(f"{folder}/four", optimizer)
    assert Plan.from_json(f"{folder}/four/plan.json") == FOUR
    values = values_of(model, optimizer)
    train(optimizer, 2, 5)
    return {"values": values, "after": values_of(model, optimizer)}


def reshard(folder: str, source: str, target: str) -> dict[str, Tensor]:
    model, optimizer = build(THREE, seed=1)
    poplar.load_checkpoint(f"{folder}/{source}", optimizer)
    poplar.save_checkpoint(f"{folder}/{target}", optimizer)
    train(optimizer, 2, 5)
    return values_of(model, optimizer)


def in_torch(folder: str, *, sharded: bool) -> dict[str, Any]:
    """Plain `AdamW`, or FSDP2: torch's own functions load the checkpoint; then five steps."""
    torch.manual_seed(1)
    model = LanguageModel()
    group = harness.group()
    if sharded:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2, **EPS)
    own = {}
    own["model"], own["optim"] = get_state_dict(model, optimizer)
    dcp.load(own, checkpoint_id=f"{folder}/four", process_group=group)
    set_state_dict(model, optimizer, model_state_dict=own["model"], optim_state_dict=own["optim"])
    own["model"], own["optim"] = get_state_dict(model, optimizer)
    dcp.save(own, checkpoint_id=f"{folder}/torch-{sharded}", process_group=group)
    size = BATCH // harness.size()
    for step in range(2, 7):
        batch = batch_of(step, harness.rank() * size, (harness.rank() + 1) * size)
        models.mean_over_samples(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = {n: v.full_tensor() if sharded else v for n, v in model.named_parameters()}
    return {name: value.detach() for name, value in full.items()}


def content(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint that torch knows of, by torch's reader."""
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {"model": state["model"], "state": state["optim"]["state"]}


def assert_close_values(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    floats = {n: v for n, v in expected.items() if n in found and v.is_floating_point()}
    assert_close(
        {name: found[name] for name, value in floats.items() if value.numel()},
        {name: value for name, value in floats.items() if value.numel()},
    )


def assert_equal_content(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal_content(found[key], value)
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, check_dtype=False)


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_moves_between_plans_plain_pytorch_and_fsdp2(
    ranks: Pool, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    began = ranks.run(start, folder, ranks=4)[0]
    saved = content(tmp_path / "four")
    assert_equal_content(saved["model"], began["values"])
    trained = {n for n in began["values"] if n in saved["state"]}
    assert len(trained) == len(saved["state"]) > 10
    expected = began["after"]

    after = ranks.run(reshard, folder, "four", "three", ranks=3)[0]
    assert_close_values(after, expected)
    assert_equal_content(content(tmp_path / "three"), saved)

    for sharded, count in ((False, 1), (True, 2)):
        after = ranks.run(in_torch, folder, sharded=sharded, ranks=count)[0]
        assert_close_values(after, expected)
        assert_equal_content(content(tmp_path / f"torch-{sharded}"), saved)
        after = ranks.run(reshard, folder, f"torch-{sharded}", f"back-{sharded}", ranks=3)[0]
        assert_close_values(after, expected)
        assert_equal_content(content(tmp_path / f"back-{sharded}"), saved)

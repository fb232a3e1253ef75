"""Classes that need blocks or whole tensors: state and parameters have the bits of one process.

The oracle is the class itself, on all ranks, with the mean gradients of the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import pytest
import ranks as harness
import torch
import torchao.optim
from ranks import Pool
from torch import Tensor, nn
from training import STAGES
from whole_tensor_optimizers import Lamb, Preconditioned, build, matrices_and_rest, mean_loss

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.zero.optimizers.state_values import taken_apart

SHARES = (0.6, 0.3, 0.1, 0.0)
OTHER_SHARES = (0.1, 0.0, 0.35, 0.55)
BATCHES = ((2, 1), (1, 1), (0, 1), (0, 0))

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "bitsandbytes": (bitsandbytes.optim.AdamW8bit, {"lr": 1e-2}),
    "bitsandbytes, 8 and 32 bits": (bitsandbytes.optim.AdamW8bit, {"lr": 1e-2}),
    "torchao, 8 bits": (torchao.optim.AdamW8bit, {"lr": 1e-2}),
    "torchao, 4 bits": (torchao.optim.AdamW4bit, {"lr": 1e-2}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Lamb": (Lamb, {"granularity": "parameter"}),
    "Preconditioned": (Preconditioned, {"granularity": "parameter"}),
    "AdamW by parameter": (torch.optim.AdamW, {"lr": 1e-2, "granularity": "parameter"}),
    "AdamW by block": (torch.optim.AdamW, {"lr": 1e-2, "granularity": 64}),
    "Muon and AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
}
BLOCKWISE = ("bitsandbytes", "torchao")
MUON = {"optimizer_class": torch.optim.Muon, "lr": 0.02, "momentum": 0.9}
IN_32_BITS = {"optimizer_class": bitsandbytes.optim.AdamW, "optim_bits": 32, "lr": 1e-2}
OWN_CLASSES = {"Muon and AdamW": MUON, "bitsandbytes, 8 and 32 bits": IN_32_BITS}
"""Of a param group with matrices."""


def groups_of(name: str, model: nn.Module) -> list[dict[str, Any]]:
    if name not in OWN_CLASSES:
        return [{"params": list(model.parameters())}]
    matrices, rest = matrices_and_rest(model)
    if name != "Muon and AdamW":  # matrices in both groups
        matrices, rest = matrices[::2], [*rest, *matrices[1::2]]
    return [{"params": matrices, **OWN_CLASSES[name]}, {"params": rest}]


class OneProcess:
    """The classes on a copy of the model."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        cls, options = CLASSES[name]
        options = {key: value for key, value in options.items() if key != "granularity"}
        self.groups = groups_of(name, self.model)
        self.optimizers = []
        for group in self.groups:
            own = {**options, **group} if "optimizer_class" not in group else dict(group)
            factory = own.pop("optimizer_class", cls)
            params = own.pop("params")
            fused = {"fused": True} if factory is torch.optim.AdamW else {}
            self.optimizers.append(factory(params, **fused, **own))

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name].clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
        own = dict(self.model.named_parameters())
        with optimizer.full_parameters():
            for name, parameter in model.named_parameters():
                self.assert_equal(parameter, own[name], own[name])
        state = optimizer.full_state_dict(0)
        parameters = [p for group in self.groups for p in group["params"]]
        known = {p: s for plain in self.optimizers for p, s in plain.state.items()}
        for index, parameter in enumerate(parameters if state is not None else ()):
            assert state is not None
            found = taken_apart(state["state"].get(index, {}))
            expected = taken_apart(known.get(parameter, {}))
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                self.assert_equal(found[key], value, parameter)

    def assert_equal(self, found: Any, expected: Any, parameter: Tensor) -> None:
        """Equal bits, or nearly so where Poplar's own kernel replaces that of torch."""
        of_adamw = any(
            parameter is p
            for plain in self.optimizers
            if type(plain) is torch.optim.AdamW
            for p in plain.state
        )
        tolerance = 1e-5 if of_adamw else 0.0
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def optimizer_of(name: str, model: nn.Module, plan: Plan) -> HeteroZeroOptimizer:
    cls, options = CLASSES[name]
    return HeteroZeroOptimizer(model, cls, plan=plan, params=groups_of(name, model), **options)


def plan_of(stage: int, shares: tuple[float, ...]) -> Plan:
    """At stage 2 also with state in host memory."""
    hosted = (0.3, 1.0, 0.0, 1.0) if stage == 2 else ()
    return Plan(
        stage=stage, global_batch=6, micro_batches=BATCHES, shares=shares, host_state=hosted
    )


def train_beside(
    oracle: OneProcess, model: nn.Module, optimizer: HeteroZeroOptimizer, steps: range
) -> None:
    rank = harness.rank()
    for step in steps:
        torch.manual_seed(100 * step + rank)
        samples = max(1, sum(BATCHES[rank]))
        batch = torch.randn(samples, 8), torch.randn(samples, 64)
        for micro_batch in optimizer.micro_batches(batch):
            mean_loss(model, micro_batch).backward()
        oracle.step(optimizer.full_gradients())
        optimizer.step()
        optimizer.zero_grad()
    oracle.check(model, optimizer)


def train_in_all_ways(name: str, stage: int, folder: Path) -> list[int]:
    # torchao compiles its step for each shape, which takes minutes on CPUs.
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        return train_and_move(name, stage, folder)


def train_and_move(name: str, stage: int, folder: Path) -> list[int]:
    """20 steps: with new shares, loaded state and a checkpoint in between; returns owned sizes."""
    model = build()
    oracle, plan = OneProcess(name, model), plan_of(stage, SHARES)
    optimizer = optimizer_of(name, model, plan)
    train_beside(oracle, model, optimizer, range(6))
    owned = [
        sum(flat.layout.size(r) for flat in optimizer._training.engine.flats) for r in range(4)
    ]
    optimizer.apply_plan(replace(plan, shares=OTHER_SHARES))
    train_beside(oracle, model, optimizer, range(6, 10))
    optimizer.load_state_dict(optimizer.state_dict())
    whole = optimizer.full_state_dict(0)
    poplar.save_checkpoint(folder, optimizer)
    optimizer.release()
    model = build()
    optimizer = optimizer_of(name, model, plan)
    poplar.load_checkpoint(folder, optimizer)
    oracle.check(model, optimizer)
    train_beside(oracle, model, optimizer, range(10, 15))
    # The state dict of one process, after other steps have changed the state.
    sent = [whole]
    torch.distributed.broadcast_object_list(sent, 0, group=harness.group())
    assert sent[0] is not None
    later = optimizer.full_state_dict(0)
    optimizer.load_state_dict(sent[0])
    sent = [later]
    torch.distributed.broadcast_object_list(sent, 0, group=harness.group())
    assert sent[0] is not None
    optimizer.load_state_dict(sent[0])
    train_beside(oracle, model, optimizer, range(15, 20))
    optimizer.release()
    return owned


@pytest.mark.parametrize(
    ("name", "stage"),  # other classes are refused at stage 3: see below
    [(n, s) for n in CLASSES for s in STAGES if s < 3 or n.startswith(BLOCKWISE)],
)
def test_state_and_parameters_equal_one_process(
    ranks: Pool, name: str, stage: int, tmp_path: Path
) -> None:
    owned = ranks.run(train_in_all_ways, name, stage, tmp_path / "saved")[0]
    if stage:
        largest = max(parameter.numel() for parameter in build().parameters())
        wanted = [share * sum(owned) for share in SHARES]
        assert all(abs(own - want) <= largest for own, want in zip(owned, wanted, strict=True))
        assert owned[3] == 0


def refused(cls: Any, stage: int, **options: Any) -> str:
    with pytest.raises(ValueError, match=cls.__name__) as caught:
        HeteroZeroOptimizer(build(), cls, stage=stage, **options)
    return str(caught.value)


def test_what_cannot_work_is_refused_on_all_ranks(ranks: Pool) -> None:
    for text in ranks.run(refused, torch.optim.Adafactor, 3):
        assert "Adafactor needs whole tensors, but stage 3" in text
        assert "use stage 2" in text
    for text in ranks.run(refused, Lamb, 1):
        assert "pass granularity='parameter'" in text


def build_with_overrides() -> str:
    """Of a model whose class gives bitsandbytes an option for one of its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(bitsandbytes.nn.StableEmbedding(64, 8), nn.Linear(8, 2))
    weight, *rest = model.parameters()
    cls, options = CLASSES["bitsandbytes"]
    own = {"optimizer_class": bitsandbytes.optim.AdamW, "optim_bits": 32, **options}
    groups = [{"params": [weight], **own}, {"params": rest}]
    try:
        with pytest.raises(ValueError, match="bitsandbytes has options") as caught:
            HeteroZeroOptimizer(model, cls, stage=1, **options)
        HeteroZeroOptimizer(model, cls, stage=1, params=groups, **options).release()
        HeteroZeroOptimizer(model, torch.optim.AdamW, stage=1).release()
    finally:
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
    return str(caught.value)


def test_options_of_bitsandbytes_for_a_parameter_need_a_group(ranks: Pool) -> None:
    for text in ranks.run(build_with_overrides):
        assert "'0.weight', {'optim_bits': 32}" in text
        assert "param group with a class and options of its own" in text

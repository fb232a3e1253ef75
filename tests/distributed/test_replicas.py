"""At stage 0 every rank updates all parameters; they must have the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ranks as at
import torch
from ranks import Failure
from torch import Tensor, nn
from torch.nn import functional as F
from training import STAGES, assert_raised

from poplar import HeteroZeroOptimizer
from poplar.values.errors import ReplicasDiffer
from poplar.zero import setup

BF16, FP32 = torch.bfloat16, torch.float32


class RankDecayedSGD(torch.optim.SGD):
    """Reads state of its process: each rank decays the parameters by another factor."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 1e-4 * at.rank())


class RankRoundedAdam(torch.optim.Adam):
    """Rounds differently on every rank, as other kernels would; parameters and state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                for tensor in (parameter, self.state[parameter]["exp_avg"]):
                    tensor.view(torch.int32).add_(at.rank())


def build(
    stage: int, optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> tuple[nn.Module, HeteroZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 61), nn.Tanh(), nn.Linear(61, 5)).to(at.device())
    optimizer = HeteroZeroOptimizer(
        model, optimizer_class, stage=stage, process_group=at.group(), lr=0.01, **options
    )
    return model, optimizer


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch).float(), batch[:, :5])


def take_steps(optimizer: HeteroZeroOptimizer, count: int, open_form: bool = False) -> None:
    for step in range(count):
        torch.manual_seed(10 * step + at.rank())
        batch = torch.rand(3, 37).to(at.device())
        if open_form:
            for micro_batch in optimizer.micro_batches(batch):
                loss_fn(optimizer._training.model, micro_batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.train_step(loss_fn, batch)


def train_with_a_rank_dependent_optimizer(open_form: bool) -> int:
    """Steps until the error."""
    _, optimizer = build(0, RankDecayedSGD)
    with pytest.raises(ReplicasDiffer, match=r"after update 1: .*'0\.(weight|bias)'"):
        take_steps(optimizer, 10, open_form)
    return optimizer._training.checks.replicas._updates


@pytest.mark.parametrize("open_form", [False, True])
def test_rank_dependent_optimizer_is_noticed_after_its_first_update(ranks, open_form):
    assert ranks.run(train_with_a_rank_dependent_optimizer, open_form) == [2] * 4


def change_on_one_rank(stage: int, rank: int, name: str, way: str) -> None:
    model, optimizer = build(stage, torch.optim.AdamW)
    take_steps(optimizer, 4)
    if at.rank() == rank:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[3] += 1e-6
    if way == "verify":
        optimizer.verify_replicas()
    else:
        optimizer._training.checks.replicas._next = 0  # the next update is checked
        take_steps(optimizer, 3)


@pytest.mark.parametrize("way", ["verify", "train"])
def test_all_ranks_name_the_parameter_and_the_rank(ranks, way):
    failures = ranks.run_expecting_errors(change_on_one_rank, 0, 2, "2.weight", way)
    assert_raised(failures, "rank(s) [2]", "'2.weight'", "checkpoint", kind=ReplicasDiffer)


@pytest.mark.parametrize("stage", STAGES)
def test_equal_replicas_pass(ranks, stage):
    ranks.run(train_and_verify, stage)


def train_and_verify(stage: int) -> None:
    _, optimizer = build(stage, torch.optim.AdamW)
    optimizer.verify_replicas()
    with mock.patch("poplar.zero.checks.replica_check.PERIOD", 1):
        take_steps(optimizer, 5)
    optimizer.verify_replicas()


def recover_from_a_difference() -> tuple[int, bool]:
    model, optimizer = build(0, torch.optim.AdamW)
    take_steps(optimizer, 3)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    if at.rank() == 1:
        with torch.no_grad():
            model[0].bias.add_(1.0)
    optimizer._training.checks.replicas._next = 0
    with at.catching() as caught:
        take_steps(optimizer, 3)
    with optimizer.full_parameters(writeback=True):
        model.load_state_dict(saved)
    take_steps(optimizer, 3)
    optimizer.verify_replicas()
    return len(caught), bool(model[0].bias.isfinite().all())


def test_training_continues_after_the_values_are_loaded_again(ranks):
    assert ranks.run(recover_from_a_difference, ranks=2) == [(1, True)] * 2


def fail_before_the_comparison() -> list[Failure]:
    """A rank fails in the step whose closing sends or compares a checksum."""
    _, optimizer = build(0, torch.optim.AdamW)

    def failing(model: nn.Module, batch: Tensor) -> Tensor:
        if at.rank() == 1:
            raise ValueError("a")
        return loss_fn(model, batch)

    failures = []
    for _ in range(3):
        with at.catching() as caught:
            optimizer.train_step(failing, torch.rand(3, 37).to(at.device()))
        failures += caught
        take_steps(optimizer, 1)
    optimizer.verify_replicas()
    return failures


def test_failed_step_does_not_disturb_the_check(ranks):
    for rank, failures in enumerate(ranks.run(fail_before_the_comparison, ranks=2)):
        assert [failure.type for failure in failures] == [
            "ValueError" if rank == 1 else "RankFailed"
        ] * 3


def start_with_exchanged_tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Own initial values and those after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    if at.rank() == 1:  # as if it had drawn them in another order
        model[0].weight, model[1].weight = model[1].weight, model[0].weight
    before = torch.cat([p.detach().clone() for p in model.parameters()])
    optimizer = HeteroZeroOptimizer(
        model.to(at.device()),
        torch.optim.AdamW,
        stage=0,
        process_group=at.group(),
        compute_dtype=dtype,
        lr=0.01,
    )
    for step in range(2):
        torch.manual_seed(10 * step + at.rank())
        batch = torch.rand(3, 64).to(at.device())
        optimizer.train_step(lambda model, x: model(x).float().square().mean(), batch)
    optimizer.verify_replicas()
    return before, torch.cat([p.detach().cpu() for p in model.parameters()])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_ranks_that_initialize_in_another_order_get_the_first_ranks_values(ranks, dtype):
    (before, after), *others = ranks.run(start_with_exchanged_tensors, dtype)
    assert not torch.equal(others[0][0], before)
    for _, own in others:
        assert torch.equal(own, after)


# Ranks that run other kernels


def train_on_unlike_devices(
    optimizer_class: type[torch.optim.Optimizer], dtype: torch.dtype, alike: bool
) -> tuple[dict[str, Tensor], dict[int, Any] | None]:
    """Parameters and, on rank 0, the state of the optimizer."""
    kernels = "a" if alike else f"kernels of rank {at.rank() % 2}"
    with mock.patch.object(setup, "_kernels", return_value=kernels):
        model, optimizer = build(0, optimizer_class, compute_dtype=dtype)
    take_steps(optimizer, 6)
    optimizer.verify_replicas()
    state = optimizer.full_state_dict()
    parameters = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return parameters, None if state is None else state["state"]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_unlike_devices_use_one_result_of_each_slice(ranks, dtype):
    results = ranks.run(train_on_unlike_devices, RankRoundedAdam, dtype, alike=False)
    exact = ranks.run(train_on_unlike_devices, torch.optim.Adam, dtype, alike=True)
    for parameters, _ in results:
        for name, value in parameters.items():
            assert torch.equal(value, results[0][0][name])
            torch.testing.assert_close(value, exact[0][0][name], rtol=1e-2, atol=1e-5)


def test_result_does_not_change_where_kernels_agree(ranks):
    unlike = ranks.run(train_on_unlike_devices, torch.optim.Adam, FP32, alike=False)
    alike = ranks.run(train_on_unlike_devices, torch.optim.Adam, FP32, alike=True)
    for (parameters, state), (expected, expected_state) in zip(unlike, alike, strict=True):
        for name, value in parameters.items():
            assert torch.equal(value, expected[name])
        for index, values in (state or {}).items():
            assert torch.equal(values["exp_avg"], expected_state[index]["exp_avg"])


def what_is_gathered(optimizer_class: type[torch.optim.Optimizer], alike: bool, stage: int) -> bool:
    kernels = "a" if alike else f"kernels of rank {at.rank()}"
    with mock.patch.object(setup, "_kernels", return_value=kernels):
        _, optimizer = build(stage, optimizer_class)
    with optimizer.trace() as spans:
        take_steps(optimizer, 1)
    return any("the updated parameters" in span.what for span in spans)


@pytest.mark.parametrize(
    ("optimizer_class", "alike", "stage", "expected"),
    [
        (torch.optim.Adam, False, 0, True),
        (torch.optim.Adam, True, 0, False),
        (torch.optim.AdamW, False, 0, False),  # Poplar's own kernel, with equal bits everywhere
        (torch.optim.Adam, False, 1, False),
    ],
)
def test_results_are_gathered_only_where_kernels_may_round_differently(
    ranks, optimizer_class, alike, stage, expected
):
    found = ranks.run(what_is_gathered, optimizer_class, alike, stage, ranks=2)
    assert found == [expected] * 2

"""Trains a recipe with the engine on the ranks of a test, and compares the results.

The functions that run on ranks (`train`, `train_many` and their parts) are written like user code.
The others compare the results in the test process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import models
import numpy
import ranks
import reference
import torch
from ranks import Failure
from reference import Recipe, Trajectory
from torch import Tensor, nn

from poplar import HeteroZeroOptimizer, Plan
from poplar.zero.absent_parameter import AbsentValues

STAGES = (0, 1, 2, 3)

TWO_PASSES = ((1, 1), (0, 1), (1, 2), (3, 3))
IDLE_RANK = ((2, 3), (0, 0), (1, 2), (2, 2))
"""Rank 1 has no samples."""
UNEVEN = (0.55, 0.25, 0.0, 0.2)
"""Shares; rank 2 owns nothing."""

RELATIVE = 1e-5
"""Largest error of a parameter, relative to the largest element of its tensor, in fp32."""


@dataclass(frozen=True)
class Run:
    """A recipe with the plan and options under which ranks train it."""

    recipe: Recipe
    plan: Plan
    open_form: bool = False
    """Use `micro_batches`, `backward`, `clip_grad_norm_` and `step` instead of `train_step`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the optimizer."""


def uneven(
    stage: int, micro_batches: tuple = TWO_PASSES, shares: tuple[float, ...] = UNEVEN, **more: Any
) -> Plan:
    """A plan of 12 samples on four ranks."""
    return Plan(stage=stage, global_batch=12, micro_batches=micro_batches, shares=shares, **more)


# On ranks


def optimizer_of(model: nn.Module, run: Run, **changes: Any) -> HeteroZeroOptimizer:
    """The optimizer of a run for this model, with other keyword arguments."""
    arguments = {
        "plan": run.plan,
        "params": models.parameter_groups(run.recipe.spec, model),
        "process_group": ranks.group(),
        **dict(run.recipe.options),
        # Not "auto", which computes in bf16 on a GPU; the reference does not.
        "compute_dtype": run.recipe.spec.dtype,
        **run.engine,
        **changes,
    }
    return HeteroZeroOptimizer(model, run.recipe.optimizer_class, **arguments)


def prepare(run: Run) -> tuple[nn.Module, HeteroZeroOptimizer]:
    """The model and its optimizer, on this rank."""
    model = models.build(run.recipe.spec).to(ranks.device())
    return model, optimizer_of(model, run)


def batch_of(run: Run, step: int) -> dict[str, Any] | None:
    """This rank's part of a global batch; None if it has no samples."""
    counts = run.plan.cut(run.recipe.batches[step])
    start = sum(counts[: ranks.rank()])
    stop = start + counts[ranks.rank()]
    if start == stop:
        return None
    return on_device(run.recipe.part(step, start, stop))


def on_device(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch on this rank's device."""
    return {k: v.to(ranks.device()) if isinstance(v, Tensor) else v for k, v in batch.items()}


def loss_of(recipe: Recipe) -> Callable[[nn.Module, Any], Tensor]:
    """The loss function of a recipe."""
    return {
        "samples": models.mean_over_samples,
        "tokens": models.mean_over_tokens,
        "sum": models.sum_over_samples,
        "token_sum": models.sum_over_tokens,
        "divided": models.already_divided,
    }[recipe.loss]


def weight_options(recipe: Recipe) -> dict[str, Any]:
    """The arguments `weight` and `loss` for the loss of a recipe."""
    return {
        "weight": models.counted_tokens if recipe.counts_tokens else None,
        "loss": {"sum": "sum", "token_sum": "sum", "divided": "global_mean"}.get(
            recipe.loss, "mean"
        ),
    }


def take_step(
    run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, step: int
) -> tuple[float | None, float | None]:
    """Run one optimizer step; returns the loss and the gradient norm."""
    recipe, loss = run.recipe, loss_of(run.recipe)
    batch = batch_of(run, step)
    if not run.open_form:
        result = optimizer.train_step(
            loss, batch, max_norm=recipe.max_norm, **weight_options(recipe)
        )
        norm = None if recipe.max_norm is None else float(result.grad_norm)
        return float(result.loss), norm
    for micro_batch in optimizer.micro_batches(batch, **weight_options(recipe)):
        loss(model, micro_batch).backward()
    norm = None
    if recipe.max_norm is not None:
        norm = float(optimizer.clip_grad_norm_(recipe.max_norm))
    optimizer.step()
    optimizer.zero_grad()
    return None, norm


Answer = tuple[Failure | None, list[str], dict[str, Tensor]]
"""An error, the parameters that it changed, and all parameters after a further step."""


def between_good_steps(
    run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, act: Callable[[], object]
) -> Answer:
    """Run a correct step, `act` and a correct step."""
    take_step(run, model, optimizer, 0)
    before = whole_parameters(model, optimizer)
    ranks.note("making a mistake")
    with ranks.catching() as caught:
        act()
    ranks.note("looking at the parameters after it")
    after = whole_parameters(model, optimizer)
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    ranks.note("taking a good step after it")
    take_step(run, model, optimizer, 1)
    return (caught or [None])[0], changed, whole_parameters(model, optimizer)


def whole_parameters(model: nn.Module, optimizer: HeteroZeroOptimizer) -> dict[str, Tensor]:
    """A full copy of every parameter on the CPU."""
    with optimizer.full_parameters():
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def is_absent(parameter: nn.Parameter) -> bool:
    """Whether a parameter is resharded: it has its shape, but memory for one element at most."""
    memory = parameter.untyped_storage().nbytes()
    return isinstance(parameter, AbsentValues) and memory <= parameter.element_size()


def train(run: Run) -> Trajectory:
    """Train the recipe on this rank."""
    model, optimizer = prepare(run)
    scheduler = run.recipe.scheduler(optimizer) if run.recipe.decaying else None
    made = []
    for step in range(len(run.recipe.batches)):
        made.append(take_step(run, model, optimizer, step))
        if scheduler is not None:
            scheduler.step()
    return Trajectory(
        parameters=whole_parameters(model, optimizer),
        losses=tuple(loss for loss, _ in made),
        norms=tuple(norm for _, norm in made),
    )


def train_many(runs: Sequence[Run]) -> list[Trajectory]:
    """Several runs in one call, one after the other."""
    made = []
    for run in runs:
        ranks.note(f"{run.plan!r} {run.recipe!r}")
        made.append(train(run))
    return made


# In the test process


def assert_exact(trajectories: Sequence[Trajectory], recipe: Recipe, what: str = "") -> None:
    """Every rank has the result of one process on the global batch, with the same bits."""
    expected = reference.train(recipe)
    first = trajectories[0]
    for rank, trajectory in enumerate(trajectories):
        for name, value in trajectory.parameters.items():
            assert torch.equal(value, first.parameters[name]), f"{what} {name}: rank {rank} differs"
        assert trajectory.losses == first.losses, f"{what}: rank {rank} reports other losses"
        assert trajectory.norms == first.norms, f"{what}: rank {rank} reports other norms"
    assert_close(first.parameters, expected.parameters, what)
    for kind in ("losses", "norms"):
        pairs = zip(getattr(first, kind), getattr(expected, kind), strict=True)
        for step, (value, wanted) in enumerate(pairs):
            if value is not None and wanted is not None:
                assert abs(value - wanted) <= RELATIVE * abs(wanted), (
                    f"{what} step {step}, {kind}: {value}, expected {wanted}"
                )


def assert_close(
    parameters: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str = ""
) -> None:
    """Parameters are within `RELATIVE` of each tensor's largest element."""
    assert parameters.keys() == expected.keys()
    wrong = []
    for name, wanted in expected.items():
        assert parameters[name].dtype == wanted.dtype, name
        error = (parameters[name].double() - wanted.double()).abs().max() / wanted.abs().max()
        if not error <= RELATIVE:
            wrong.append(f"{name}: relative error {error:.2e}")
    assert not wrong, f"{what}\n" + "\n".join(wrong)


def assert_unchanged(answers: Sequence[Answer], recipe: Recipe) -> list[Failure | None]:
    """What was done between good steps changed nothing; returns the error of each rank."""
    for rank, (failure, changed, left) in enumerate(answers):
        assert not changed, f"rank {rank}: {changed} changed"
        assert_close(left, reference.train(recipe).parameters, f"rank {rank}, after {failure}")
    return [failure for failure, _, _ in answers]


@dataclass(frozen=True)
class ModelState:
    """What a call must leave as it was: a model, and the random generators."""

    tensors: dict[str, Tensor | None]
    """Copies of parameters, gradients and buffers."""
    gradients: dict[str, Tensor | None]
    """The objects themselves."""
    others: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        parameters, modules = dict(model.named_parameters()), [*model.modules()]
        gradients = {f"gradient of {name}": p.grad for name, p in parameters.items()}
        tensors = parameters | gradients | dict(model.named_buffers())
        return cls(
            {name: None if t is None else t.detach().clone() for name, t in tensors.items()},
            gradients,
            {
                "memory": {name: p.data_ptr() for name, p in parameters.items()},
                "dtypes": {name: getattr(t, "dtype", None) for name, t in tensors.items()},
                "modes": [module.training for module in modules],
                "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
                "random numbers": _next_random_numbers(),
            },
        )

    def assert_same(self, other: ModelState) -> None:
        assert self.tensors.keys() == other.tensors.keys()
        for name, value in self.tensors.items():
            after = other.tensors[name]
            assert (value is None) == (after is None), f"{name} was {value} and is {after}"
            assert value is None or torch.equal(value, after), f"{name} has changed"
        for name, gradient in self.gradients.items():
            assert gradient is other.gradients[name], f"{name} is another tensor"
        assert self.others == other.others


def _next_random_numbers() -> tuple[float, ...]:
    """They will be drawn again."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    drawn = torch.rand(()).item(), random.random(), numpy.random.rand()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    return drawn


def assert_same(parameters: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Parameters have the same bits."""
    assert parameters.keys() == expected.keys()
    for name, wanted in expected.items():
        assert torch.equal(parameters[name], wanted), f"{name} differs"


def assert_raised(
    failures: Sequence[Failure | None], *patterns: str, kind: type[BaseException] | None = None
) -> None:
    """Every rank raised (an instance of `kind`), and each message contains every pattern."""
    for rank, failure in enumerate(failures):
        assert failure is not None, f"rank {rank} raised nothing; others: {failures}"
        for pattern in patterns:
            assert pattern.lower() in failure.message.lower(), (
                f"rank {rank}: {pattern!r} is not in its message\n{failure}"
            )
        if kind is not None:
            assert failure.is_a(kind), f"rank {rank}: not a {kind.__name__}\n{failure}"

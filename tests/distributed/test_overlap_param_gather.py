"""With `overlap_param_gather`, updated parameters arrive during the next forward."""

from __future__ import annotations

import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe, Trajectory
from training import Run, assert_exact, train

from poplar import HeteroZeroOptimizer, Plan

SHARES = (0.55, 0.25, 0.0, 0.2)
PASSES = ((1, 3), (1, 2), (0, 0), (2, 3))
RECIPES = {
    "plain": Recipe(batches=(12, 12, 7)),
    "frozen, tied, unused, two groups": Recipe(
        spec=ModelSpec(frozen=True, tied=True, unused=True, two_groups=True)
    ),
    "clipping": Recipe(max_norm=0.1),
    "bf16": Recipe(spec=ModelSpec(dtype=torch.bfloat16)),
}


def run_of(recipe: Recipe, stage: int, transport: str, *, open_form: bool = False) -> Run:
    plan = Plan(stage=stage, global_batch=12, micro_batches=PASSES, shares=SHARES)
    engine = {"communicator": transport, "overlap_param_gather": True}
    return Run(recipe, plan, engine=engine, open_form=open_form)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize("name", RECIPES)
def test_training_is_exact(ranks: Pool, stage: int, transport: str, name: str) -> None:
    run = run_of(RECIPES[name], stage, transport, open_form=name == "clipping")
    if name == "bf16":  # rounds, so it is compared with the same plan without the overlap
        waiting = Run(run.recipe, run.plan, engine={"communicator": transport})
        pairs = zip(ranks.run(train, run), ranks.run(train, waiting), strict=True)
        for one, other in pairs:
            training.assert_same(one.parameters, other.parameters)
    else:
        assert_exact(ranks.run(train, run), run.recipe, f"{name}, stage {stage}")


def read_between_steps(stage: int) -> tuple[bool, bool, bool, Trajectory]:
    """Whether parameters are NaN, finite in `state_dict`, and finite in an evaluation's model."""
    run = run_of(RECIPES["plain"], stage, "process_group")
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    hidden = all(bool(p.isnan().all()) for p in model.parameters() if p.numel())
    saved = all(bool(value.isfinite().all()) for value in model.state_dict().values())
    training.take_step(run, model, optimizer, 1)
    batch = training.batch_of(run, 1)
    loss = optimizer.evaluate(training.loss_of(run.recipe), [] if batch is None else [batch])
    training.take_step(run, model, optimizer, 2)
    parameters = training.whole_parameters(model, optimizer)
    return hidden, saved, loss == loss, Trajectory(parameters, (), ())


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_cannot_be_read_by_accident(ranks: Pool, stage: int) -> None:
    """They read as NaN, not as values of the previous step."""
    expected = None
    for hidden, saved, evaluated, trajectory in ranks.run(read_between_steps, stage):
        assert hidden
        assert saved
        assert evaluated
        expected = expected or trajectory.parameters
        training.assert_same(trajectory.parameters, expected)


def build(stage: int) -> str:
    model = torch.nn.Linear(4, 4)
    try:
        HeteroZeroOptimizer(
            model,
            torch.optim.AdamW,
            stage=stage,
            process_group=harness.group(),
            overlap_param_gather=True,
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_other_stages_refuse_it(ranks: Pool, stage: int) -> None:
    for message in ranks.run(build, stage):
        assert f"overlap_param_gather=True at stage {stage}" in message

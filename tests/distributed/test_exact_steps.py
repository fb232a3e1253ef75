"""Training under any plan equals training in one process on the global batch.

Tolerance: fp32 gradients that are summed in another order differ by about 1e-8. AdamW divides by
sqrt(v) + eps, so its first steps are lr * g / (|g| + eps) where a gradient is nearly zero. With eps
1e-8 the rounding of g moves such an element by up to lr, in any implementation. With eps 1e-5, well
below the typical gradient of 1e-3, the same rounding moves it by 1e-3 * lr, and one process that
only sums in another order stays within 7e-7 of the largest element of each tensor. The bound is
1e-5. Adam does not detect gradients that are wrong by a factor, so cases also run with SGD.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import models
import pytest
import ranks as harness
import reference
import torch
import training
from communicators import on_host
from models import ModelSpec
from native_calls import native_calls
from ranks import Pool
from reference import Recipe
from subset import choose
from training import STAGES, Run, assert_exact, assert_same, train_many

from poplar import HeteroZeroOptimizer, Plan, UnitPlan
from poplar.comm import Group, connect

EVEN = (0.25,) * 4
UNEVEN = (0.55, 0.25, 0.15, 0.05)
NOTHING_FOR_SOME = (0.6, 0.0, 0.4, 0.0)
EVERYDAY = ModelSpec(frozen=True, tied=True, unused=True, two_groups=True)

ONE_PASS = ((3,), (3,), (3,), (3,))
UNEVEN_BATCHES = ((2,), (1,), (3,), (6,))
A_RANK_WITHOUT_SAMPLES = ((5,), (0,), (3,), (4,))
PASSES_WITH_A_REMAINDER = ((1, 3), (1, 2), (2, 2), (0, 1))
OWN_NUMBERS_OF_PASSES = ((1, 2, 2), (4,), (1, 2), ())
SAME_NUMBER_OF_PASSES = ((1, 2, 2), (0, 0, 4), (0, 1, 2), (0, 0, 0))

CASES = {
    "even": (ONE_PASS, EVEN, Recipe(), False),
    "uneven batches": (UNEVEN_BATCHES, EVEN, Recipe(), False),
    "uneven shares": (ONE_PASS, UNEVEN, Recipe(), False),
    "a rank without samples": (A_RANK_WITHOUT_SAMPLES, UNEVEN, Recipe(), False),
    "ranks that own nothing": (UNEVEN_BATCHES, NOTHING_FOR_SOME, Recipe(), False),
    "one rank owns everything": (UNEVEN_BATCHES, (0.0, 1.0, 0.0, 0.0), Recipe(), False),
    "passes with a remainder": (PASSES_WITH_A_REMAINDER, UNEVEN, Recipe(), False),
    "own numbers of passes": (OWN_NUMBERS_OF_PASSES, UNEVEN, Recipe(), False),
    "token weights": (PASSES_WITH_A_REMAINDER, UNEVEN, Recipe(loss="tokens"), False),
    "sums": (PASSES_WITH_A_REMAINDER, UNEVEN, Recipe(loss="sum"), False),
    "sums over tokens": (PASSES_WITH_A_REMAINDER, EVEN, Recipe(loss="token_sum"), False),
    "a loss that is divided already": (UNEVEN_BATCHES, EVEN, Recipe(loss="divided"), False),
    "clipping": (PASSES_WITH_A_REMAINDER, UNEVEN, Recipe(max_norm=0.1), False),
    "a bound that clips nothing": (UNEVEN_BATCHES, UNEVEN, Recipe(max_norm=1e3), False),
    "frozen, tied, unused, two groups": (
        PASSES_WITH_A_REMAINDER,
        UNEVEN,
        Recipe(spec=EVERYDAY, max_norm=0.1),
        False,
    ),
    "activation checkpointing": (
        PASSES_WITH_A_REMAINDER,
        UNEVEN,
        Recipe(spec=ModelSpec(checkpointing=True, norm="rms")),
        False,
    ),
    "own loop": (
        PASSES_WITH_A_REMAINDER,
        UNEVEN,
        Recipe(loss="tokens", max_norm=0.1, spec=EVERYDAY),
        True,
    ),
    "own loop, own numbers of passes": (OWN_NUMBERS_OF_PASSES, NOTHING_FOR_SOME, Recipe(), True),
    "a short last batch": (
        PASSES_WITH_A_REMAINDER,
        UNEVEN,
        Recipe(batches=(12, 12, 7)),
        False,
    ),
    "own loop, a short last batch": (
        PASSES_WITH_A_REMAINDER,
        UNEVEN,
        Recipe(batches=(12, 12, 5), loss="sum"),
        True,
    ),
    "model without repeated blocks": (
        UNEVEN_BATCHES,
        UNEVEN,
        Recipe(spec=ModelSpec(kind="mlp", blocks=1)),
        False,
    ),
}


def with_sgd(recipe: Recipe) -> Recipe:
    """The recipe with SGD, which detects scaled gradients, for its last two steps."""
    return replace(
        recipe,
        optimizer="SGD",
        options=(("lr", 0.1), ("momentum", 0.9)),
        batches=recipe.batches[-2:],
    )


OPTIMIZERS = {"AdamW": lambda recipe: recipe, "SGD": with_sgd}
ALL_RUNS = list(itertools.product(CASES, STAGES, OPTIMIZERS))
TWO_RUNS = [
    # One stage of those that reduce once in a step, and one of those that reduce in every pass.
    (case, stage, optimizer)
    for number, case in enumerate(CASES)
    for stage, optimizer in zip(
        (number % 2, 3 - number % 2),
        list(OPTIMIZERS)[:: 1 if number % 4 < 2 else -1],
        strict=True,
    )
]


@pytest.mark.every_combination
@pytest.mark.parametrize(("case", "stage", "optimizer"), choose(quick=TWO_RUNS, full=ALL_RUNS))
def test_steps_equal_one_process_on_the_whole_batch(
    ranks: Pool, case: str, stage: int, optimizer: str
) -> None:
    micro_batches, shares, recipe, open_form = CASES[case]
    if stage >= 2 and micro_batches == OWN_NUMBERS_OF_PASSES:
        micro_batches = SAME_NUMBER_OF_PASSES  # with empty passes
    plan = Plan(stage=stage, global_batch=12, micro_batches=micro_batches, shares=shares)
    recipe = OPTIMIZERS[optimizer](recipe)
    assert_exact(ranks.run(training.train, Run(recipe, plan, open_form)), recipe)


def random_run(stage: int, seed: int) -> Run:
    """A random plan with passes, empty passes, shares, persistent units, a model and a loss."""
    draw = random.Random(1000 * stage + seed)
    synchronizes_every_pass = stage >= 2
    passes = draw.randint(1, 3)
    micro_batches = []
    for _ in range(4):
        count = passes if synchronizes_every_pass else draw.randint(0, 3)
        full = draw.choice([0, 1, 1, 2, 3, 4])
        idle = draw.randint(0, max(0, count - 1)) if synchronizes_every_pass else 0
        own = [full] * (count - idle)
        if own and full > 1:
            own[0] = draw.randint(1, full)
        micro_batches.append((0,) * idle + tuple(own))
    if not any(map(sum, micro_batches)):
        micro_batches[draw.randrange(4)] = (2,) * passes
    total = sum(map(sum, micro_batches))
    parts = [draw.choice([0.0, 0.1, 1.0, 2.5]) for _ in range(4)]
    parts[draw.randrange(4)] += 0.5
    shares = tuple(part / sum(parts) for part in parts)
    batches = [total, total]
    working = sum(1 for own in micro_batches if sum(own))
    if total > working and draw.random() < 0.5:
        batches.append(draw.randint(working, total - 1))
    recipe = Recipe(
        spec=ModelSpec(
            norm=draw.choice(["layer", "rms"]),
            blocks=draw.choice([2, 3]),
            tied=draw.random() < 0.3,
            frozen=draw.random() < 0.3,
            unused=draw.random() < 0.3,
            two_groups=draw.random() < 0.3,
            checkpointing=draw.random() < 0.3,
        ),
        batches=tuple(batches),
        loss=draw.choice(reference.LOSSES),
        max_norm=draw.choice([None, 0.2]),
        seed=seed,
    )
    if draw.random() < 0.3:
        recipe = replace(recipe, optimizer="SGD", options=(("lr", 0.1), ("momentum", 0.9)))
    open_form = draw.random() < 0.4
    names = ["root", *(f"blocks.{index}" for index in range(recipe.spec.blocks))]
    persistent = [name for name in names if draw.random() < 0.3] if stage == 3 else []
    plan = Plan(
        stage=stage,
        global_batch=total,
        micro_batches=tuple(micro_batches),
        shares=shares,
        units=tuple(UnitPlan(name, persistent=True) for name in persistent),
    )
    return Run(recipe, plan, open_form)


@pytest.mark.parametrize("stage", STAGES)
def test_random_plans_equal_one_process_on_the_whole_batch(ranks: Pool, stage: int) -> None:
    runs = [random_run(stage, seed) for seed in range(choose(quick=6, full=20))]
    trained = ranks.run(train_many, runs)
    for index, run in enumerate(runs):
        assert_exact([by_run[index] for by_run in trained], run.recipe, f"{index}: {run}")


def train_natively(runs: list[Run], names: str) -> list[reference.Trajectory]:
    """The ranks report the hosts named by letters."""
    with native_calls(), on_host(names[harness.rank()]):
        transport = connect(Group.of(harness.group(), None), "auto").name
        assert transport.startswith("hierarchical" if len(set(names)) > 1 else "process_group")
        return train_many(runs)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shares", [EVEN, NOTHING_FOR_SOME])
@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_steps_with_native_collectives_are_exact(
    ranks: Pool, hosts: str, shares: tuple[float, ...], stage: int
) -> None:
    """As on devices: one native collective per flat parameter and direction, no messages.

    On two hosts there is one on each host and one between them.
    """
    plan = Plan(stage=stage, global_batch=12, micro_batches=PASSES_WITH_A_REMAINDER, shares=shares)
    recipe = Recipe(spec=EVERYDAY, max_norm=0.1)
    runs = [Run(recipe, plan, open_form) for open_form in (False, True)]
    trained = ranks.run(train_natively, runs, hosts)
    for index, run in enumerate(runs):
        assert_exact([by_run[index] for by_run in trained], run.recipe, str(run.open_form))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_steps_are_exact_on_any_number_of_ranks(ranks: Pool, stage: int, count: int) -> None:
    shares = {1: (1.0,), 2: (0.7, 0.3), 3: (0.2, 0.0, 0.8)}[count]
    micro_batches = {1: ((1, 3),), 2: ((1, 1), (0, 2)), 3: ((1, 1), (0, 1), (0, 1))}[count]
    plan = Plan(stage=stage, global_batch=4, micro_batches=micro_batches, shares=shares)
    recipe = Recipe(batches=(4, 4, 4), max_norm=0.1)
    assert_exact(ranks.run(training.train, Run(recipe, plan), ranks=count), recipe)


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_parameters_are_within_their_rounding(ranks: Pool, stage: int) -> None:
    """The error to fp32 is that of one process with bf16 parameters and fp32 masters.

    Measured over all parameters together: if a rounding flips the sign of a small gradient, AdamW
    makes a step of 2 * lr, so single elements may differ, also in one process.
    """
    plan = Plan(stage=stage, global_batch=12, micro_batches=PASSES_WITH_A_REMAINDER, shares=UNEVEN)
    for truth in (Recipe(), with_sgd(Recipe())):
        recipe = replace(truth, spec=ModelSpec(dtype=torch.bfloat16))
        run = Run(recipe, plan, engine={"compute_dtype": torch.bfloat16})
        trained = ranks.run(training.train, run)
        for trajectory in trained:
            assert_same(trajectory.parameters, trained[0].parameters)
        assert {p.dtype for p in trained[0].parameters.values()} == {torch.bfloat16}
        wanted = flattened(reference.train(truth).parameters)
        rounding = (flattened(reference.train(recipe).parameters) - wanted).norm()
        error = (flattened(trained[0].parameters) - wanted).norm()
        assert error <= 1.2 * rounding, f"{recipe.optimizer}: {error:.2e}, alone {rounding:.2e}"


def flattened(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.float().flatten() for value in parameters.values()])


@pytest.mark.parametrize("stage", STAGES)
def test_updates_below_bf16_precision_accumulate(ranks: Pool, stage: int) -> None:
    """Steps of a hundredth of an ulp would be lost without fp32 masters."""
    plan = Plan.manual("1,2,1,0", stage=stage, shares=UNEVEN)
    options = (("lr", 2e-5), ("eps", 1e-8), ("weight_decay", 0.0))
    spec = ModelSpec(dtype=torch.bfloat16, kind="mlp", blocks=2)
    recipe = Recipe(spec=spec, options=options, batches=(4,) * 30)
    trained = ranks.run(training.train, Run(recipe, plan, engine={"compute_dtype": torch.bfloat16}))
    before = reference.train(replace(recipe, batches=())).parameters["head.weight"]
    wanted = reference.train(recipe).parameters["head.weight"]
    moved = (trained[0].parameters["head.weight"] != before).float().mean()
    should_move = (wanted != before).float().mean()
    assert should_move > 0.2
    assert abs(moved - should_move) < 0.1 * should_move


def train_without_a_plan(
    stage: int, sizes: tuple[int, ...], recipe: Recipe
) -> reference.Trajectory:
    model = models.build(recipe.spec).to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model,
        recipe.optimizer_class,
        stage=stage,
        process_group=harness.group(),
        compute_dtype=recipe.spec.dtype,
        **dict(recipe.options),
    )
    start = sum(sizes[: harness.rank()])
    losses = []
    for step in range(len(recipe.batches)):
        batch = training.on_device(recipe.part(step, start, start + sizes[harness.rank()]))
        losses.append(float(optimizer.train_step(training.loss_of(recipe), batch).loss))
    return reference.Trajectory(
        parameters=training.whole_parameters(model, optimizer),
        losses=tuple(losses),
        norms=(None,) * len(losses),
    )


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_have_different_batches_without_a_plan(ranks: Pool, stage: int) -> None:
    recipe = Recipe(batches=(12,) * 3)
    assert_exact(ranks.run(train_without_a_plan, stage, (2, 1, 3, 6), recipe), recipe)

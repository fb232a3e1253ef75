"""`poplar.verify`: accepts correct plans, and names the cause where a loss depends on the split."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import models
import pytest
import ranks
import torch
import training
from models import ModelSpec
from ranks import Failure, Pool
from torch import Tensor, nn
from training import STAGES, ModelState

from poplar import Plan
from poplar.data import CollateMicroBatches
from poplar.tuning.verification import ParameterError, Verification, verify
from poplar.tuning.verification.outcome import Tolerance, compare
from poplar.tuning.verification.step import _digest

UNEVEN = ((2, 3), (4, 1), (0, 2), (0, 0))
SHARES = (0.5, 0.3, 0.2, 0.0)
BATCH = 12


def uneven(stage: int) -> Plan:
    return Plan(stage=stage, global_batch=BATCH, micro_batches=UNEVEN, shares=SHARES)


def whole_batch(masked: bool = False) -> dict[str, Tensor]:
    return training.on_device(models.data(BATCH, seed=3, masked=masked))


def verify_here(
    spec: ModelSpec | type[nn.Module],
    plan: Plan,
    *,
    training: bool = True,
    loss: Any = None,
    **options: Any,
) -> Verification:
    """Run `verify` with models that differ between ranks; check that each is restored."""
    model = models.build(spec, ranks.rank()) if isinstance(spec, ModelSpec) else spec()
    model.to(ranks.device()).train(training)
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.full_like(parameter, 7.0)
    before = ModelState.of(model)
    outcome = verify(
        model,
        loss or models.mean_over_samples,
        whole_batch(),
        plan,
        process_group=ranks.group(),
        **options,
    )
    before.assert_same(ModelState.of(model))
    return outcome


def common_outcome(outcomes: list[Verification]) -> Verification:
    """The outcome, which must be equal on all ranks."""
    assert all(repr(other) == repr(outcomes[0]) for other in outcomes)
    return outcomes[0]


@pytest.mark.parametrize("stage", STAGES)
def test_uneven_plan_is_exact_and_model_is_restored(ranks: Pool, stage):
    spec = ModelSpec(frozen=True, unused=True, tied=True)
    outcome = common_outcome(ranks.run(verify_here, spec, uneven(stage)))
    assert outcome.ok, str(outcome)
    assert outcome.notes == ()
    assert outcome.reference_rank == 0
    assert outcome.reference_micro_batch == BATCH
    trained = {name for name, p in models.build(spec).named_parameters() if p.requires_grad}
    assert {parameter.name for parameter in outcome.parameters} == trained
    assert 0 < outcome.parameters[0].relative_error < 1e-5
    assert str(outcome).startswith("ok: the plan gives the gradient of one process")


def takes_targets(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = batch.pop("targets")
    return models.mean_over_tokens(model, {**batch, "targets": targets})


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (models.mean_over_tokens, {"weight": models.counted_tokens}),
        (takes_targets, {"weight": models.counted_tokens}),
        (models.sum_over_tokens, {"weight": models.counted_tokens, "loss": "sum"}),
        (models.sum_over_samples, {"loss": "sum"}),
    ],
)
def test_token_weights_and_summed_losses_are_exact(ranks: Pool, loss, options):
    options = {"masked": True, "max_micro_batch": 5, **options}
    outcome = common_outcome(ranks.run(verify_whole, uneven(2), loss, **options))
    assert outcome.ok, str(outcome)


def verify_whole(plan: Plan, loss_fn: Any, *, masked: bool = False, **options: Any) -> Verification:
    model = models.build(ModelSpec()).to(ranks.device())
    return verify(model, loss_fn, whole_batch(masked), plan, process_group=ranks.group(), **options)


@pytest.mark.parametrize("stage", [0, 3])
def test_mean_over_tokens_without_weight_fails_and_suggests_weight(ranks: Pool, stage):
    outcome = common_outcome(
        ranks.run(verify_whole, uneven(stage), models.mean_over_tokens, masked=True)
    )
    assert not outcome.ok
    assert "pass weight=poplar.tokens(shift=False, labels='targets')" in str(outcome)


def test_one_process_may_split_the_batch(ranks: Pool):
    outcome = common_outcome(
        ranks.run(verify_whole, uneven(1), models.mean_over_samples, max_micro_batch=5)
    )
    assert outcome.ok, str(outcome)
    assert outcome.reference_micro_batch == 5


@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float16), (3, torch.bfloat16)])
def test_16_bit_dtypes_have_their_own_tolerance(ranks: Pool, stage, dtype):
    outcome = common_outcome(
        ranks.run(verify_here, ModelSpec(), uneven(stage), compute_dtype=dtype)
    )
    assert outcome.ok, str(outcome)
    assert outcome.parameters[0].relative_error > 1e-5
    exact = common_outcome(
        ranks.run(verify_here, ModelSpec(), uneven(stage), compute_dtype=dtype, rtol=1e-7)
    )
    assert not exact.ok


def coupled_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Like a contrastive loss: each sample is compared with the others of its micro-batch."""
    logits = model(batch["tokens"]).flatten(1)
    return (logits - logits.mean(0)).square().mean()


def test_loss_that_couples_samples_fails_and_names_parameters(ranks: Pool):
    outcome = common_outcome(ranks.run(verify_here, ModelSpec(), uneven(2), loss=coupled_loss))
    assert not outcome.ok
    assert len(outcome.failures) > 3
    assert outcome.loss_error > 0.01
    shown = str(outcome)
    assert shown.startswith("NOT OK")
    assert outcome.failures[0].name in shown
    assert "this loss is not the mean of its samples' losses" in shown


class HalfDetached(nn.Module):
    """A wrong model: in a micro-batch of one sample, one layer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(models.VOCABULARY, 8)
        self.honest = nn.Linear(8, 8)
        self.fickle = nn.Linear(8, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.honest(self.embedding(tokens))
        weight = self.fickle.weight.detach() if len(tokens) == 1 else self.fickle.weight
        return nn.functional.linear(x, weight, self.fickle.bias)


def test_wrong_parameter_is_named(ranks: Pool):
    outcome = common_outcome(ranks.run(verify_here, HalfDetached, uneven(0)))
    assert [parameter.name for parameter in outcome.failures] == ["fickle.weight"]
    assert outcome.parameters[0].name == "fickle.weight"
    assert "1 of 5 parameters differ" in str(outcome)


class Dropping(HalfDetached):
    """Dropout before the last layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fickle(self.drop(self.honest(self.embedding(tokens))))

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)


def test_dropout_is_named_and_eval_mode_passes(ranks: Pool):
    dropped = common_outcome(ranks.run(verify_here, Dropping, uneven(3)))
    assert not dropped.ok
    assert any("'drop': dropout is random" in note for note in dropped.notes)
    assert any("the loss is random" in note for note in dropped.notes)
    still = common_outcome(ranks.run(verify_here, Dropping, uneven(3), training=False))
    assert still.ok, str(still)
    assert still.notes == ()


def test_batch_norm_in_training_mode_is_named(ranks: Pool):
    outcome = common_outcome(ranks.run(verify_here, ModelSpec(kind="batch_norm"), uneven(1)))
    assert not outcome.ok
    assert any("'norm': BatchNorm in training mode" in note for note in outcome.notes)
    assert any("not a weighted mean over samples" in note for note in outcome.notes)


# Bad input raises on every rank, and the model is restored.


def tensors_of_any_kind(value: float) -> dict[str, list[Any]]:
    dense, rows = torch.eye(4) * value, [torch.ones(1, 2), torch.full((2, 2), value)]
    return {
        "COO": [dense.to_sparse()],
        "CSR": [dense.to_sparse_csr()],
        "CSC": [dense.to_sparse_csc()],
        "BSR": [dense.to_sparse_bsr((2, 2))],
        "nested": [torch.nested.nested_tensor(rows, layout=torch.strided)],
        "jagged": [torch.nested.nested_tensor(rows, layout=torch.jagged)],
        "arrays": [dense.numpy()],
        "objects": [SimpleNamespace(x=[dense])],
    }


@pytest.mark.parametrize("kind", tensors_of_any_kind(1.0))
def test_batches_of_any_kind_of_tensor_are_compared(kind):
    def digest(value: float) -> tuple[str, list[str]]:
        return _digest(CollateMicroBatches(list)(tensors_of_any_kind(value)[kind]))

    assert digest(1.0) == digest(1.0)
    assert digest(1.0) != digest(2.0)
    assert digest(1.0)[1] == []


def verify_bad(case: str) -> Failure | None:
    plan, loss, options = uneven(2), models.mean_over_samples, {}
    batch = whole_batch()
    model = models.build(ModelSpec()).to(ranks.device())
    before = ModelState.of(model)
    if case == "another batch" and ranks.rank() == 2:
        batch["tokens"] = batch["tokens"].flip(0)
    if case == "own part":
        batch = models.part(batch, 0, max(1, plan.samples(ranks.rank())))
    if case == "another model" and ranks.rank() == 1:
        model = models.build(ModelSpec(hidden=19)).to(ranks.device())
    if case == "another world":
        plan = Plan.even(3, BATCH, BATCH, 2)
    if case == "a loss that fails" and ranks.rank() == 1:
        loss = failing_loss
    if case == "no scalar":
        loss = lambda model, batch: model(batch["tokens"])  # noqa: E731
    if case == "no plan":
        plan = None
    if case == "no samples at once":
        options["max_micro_batch"] = 0
    if case == "no tolerance":
        options["rtol"] = 0.0
    if case == "one process fails" and ranks.rank() == 0:
        loss = failing_on_the_whole_batch
    with ranks.catching() as caught:
        verify(model, loss, batch, plan, process_group=ranks.group(), **options)
    if case != "another model":
        before.assert_same(ModelState.of(model))
    outcome = verify_whole(uneven(1), models.mean_over_samples)  # the ranks can continue
    assert outcome.ok, str(outcome)
    return caught[0] if caught else None


def failing_loss(model: nn.Module, batch: Any) -> Tensor:
    raise KeyError("on purpose")


def failing_on_the_whole_batch(model: nn.Module, batch: Any) -> Tensor:
    if len(batch["tokens"]) == BATCH:
        raise KeyError("on purpose, alone")
    return models.mean_over_samples(model, batch)


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("another batch", ["rank(s) [2]", "another batch than rank 0"]),
        ("own part", ["the plan's global batch is 12", "the whole global batch"]),
        ("another model", ["rank"]),
        ("another world", ["the plan is for 3 ranks, but this process group has 4"]),
        ("a loss that fails", ["on purpose"]),
        ("no scalar", ["must return a scalar tensor"]),
        ("no plan", ["plan must be a poplar.Plan, got NoneType"]),
        ("no samples at once", ["max_micro_batch must be at least 1, got 0"]),
        ("no tolerance", ["rtol must be above 0, got 0.0"]),
        ("one process fails", ["on purpose, alone"]),
    ],
)
def test_bad_input_raises_on_every_rank(ranks: Pool, case, messages):
    training.assert_raised(ranks.run_expecting_errors(verify_bad, case), *messages)


def slow_alone(model: nn.Module, batch: Any) -> Tensor:
    """Each pass of the one process is shorter than the timeout, all together are longer."""
    if len(batch["tokens"]) == 1:
        time.sleep(0.2)
    return models.mean_over_samples(model, batch)


def verify_slowly() -> Verification:
    plan = Plan.manual("6,2,2,2", stage=1)
    return verify_whole(plan, slow_alone, max_micro_batch=1, timeout=timedelta(seconds=2))


def test_one_process_may_need_longer_than_the_timeout(ranks: Pool):
    outcome = common_outcome(ranks.run(verify_slowly))
    assert outcome.ok, str(outcome)


# Values


def test_gradient_of_rounding_errors_alone_passes():
    expected = {"weight": torch.ones(100), "bias": torch.full((10,), 1e-9)}
    noisy = {"weight": torch.ones(100), "bias": torch.full((10,), -2e-9)}
    worst = compare(noisy, expected, Tolerance.of(torch.float32))[0]
    assert worst.name == "bias"
    assert worst.relative_error < 1e-6
    assert worst.max_error == pytest.approx(3e-9)


def test_gradient_missing_in_one_process_fails():
    worst = compare({"never": torch.ones(3)}, {}, Tolerance.of(torch.float32))[0]
    assert worst.relative_error == float("inf")
    assert compare({"never": torch.zeros(3)}, {}, Tolerance.of(torch.float32))[0].max_error == 0


def test_nan_fails_and_is_listed_first():
    gradients = {"fine": torch.ones(2), "lost": torch.tensor([1.0, float("nan")])}
    errors = compare(gradients, {name: torch.ones(2) for name in gradients}, Tolerance.of())
    outcome = verification_of(errors)
    assert [parameter.name for parameter in outcome.failures] == ["lost"]
    assert not outcome.ok


def verification_of(parameters: tuple[ParameterError, ...], **changes: Any) -> Verification:
    values = {"stage": 1, "ranks": 2, "global_batch": 4, "tolerance": 1e-5, "loss": 1.0}
    return Verification(
        **{**values, "reference_loss": 1.0, "parameters": parameters, **changes}  # type: ignore
    )


def test_wrong_loss_alone_fails():
    outcome = verification_of((), loss=1.1)
    assert not outcome.ok
    assert "NOT OK: the loss differ" in str(outcome)
    assert not verification_of((), loss=float("nan")).ok
    assert verification_of(()).ok


def test_json_includes_the_verdict():
    errors = compare({"w": torch.ones(2)}, {"w": torch.ones(2)}, Tolerance.of())
    content = verification_of(errors, notes=("why",)).to_dict()
    assert content["ok"] is True
    assert content["loss_error"] == 0.0
    assert content["notes"] == ["why"]
    assert content["parameters"][0]["name"] == "w"


def test_table_lists_the_largest_errors_and_counts_the_rest():
    gradients = {f"layer{number}.weight": torch.full((4,), 1.0 + number) for number in range(25)}
    expected = {name: torch.ones(4) for name in gradients}
    shown = str(verification_of(compare(gradients, expected, Tolerance.of())))
    assert "layer24.weight" in shown
    assert "layer3.weight" not in shown
    assert "... and 15 more with smaller errors" in shown

"""`poplar.integrations.ddp`: stock DDP with unequal passes trains as one process does."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
import unequal_passes as training
from clusters import cluster_of, device
from ranks import Failure, Pool
from subset import choose
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from unequal_passes import Job, assert_equal_losses

import poplar
from poplar import Plan, UnitPlan
from poplar.integrations import ddp, fsdp2, unequal_passes
from poplar.planner.search import NoPlanFits, search
from poplar.values.communication import Communication

UNEQUAL = Plan(
    stage=0,
    global_batch=12,
    micro_batches=((3, 3, 2), (2,), (1, 1)),
    shares=(1 / 3,) * 3,
)
LEAVES_ONE_OUT = Plan(
    stage=0, global_batch=4, micro_batches=((2,), (2,), ()), shares=(0.5, 0.5, 0.0), left_out=(2,)
)
ONE_WITHOUT_SAMPLES = Plan(
    stage=0, global_batch=7, micro_batches=((1, 1, 1), (), (4,)), shares=(1 / 3,) * 3
)
"""Rank 0 has micro-batches without a label."""

DDP_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bucket_cap_mb": 1e-3},
    {"bucket_cap_mb": 1e-3, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1e-3, "find_unused_parameters": True},
)
"""Gradients in one bucket and in several ones."""


def test_losses_are_those_of_one_process(ranks: Pool) -> None:
    steps = choose(quick=6, full=20)
    jobs = [Job(name, UNEQUAL, steps=steps) for name in ("llama", "bert", "gpt2")]
    jobs += [
        Job("tagger", ONE_WITHOUT_SAMPLES, steps=5, max_norm=0.1),
        Job("tagger", ONE_WITHOUT_SAMPLES, ddp={"gradient_as_bucket_view": True}),
        Job("tagger", ONE_WITHOUT_SAMPLES, ddp={"find_unused_parameters": True}, optimizer="SGD"),
    ]
    by_rank = ranks.run(training.train_many, jobs, ranks=3)
    for number, job in enumerate(jobs):
        assert_equal_losses([losses[number] for losses in by_rank], job)


def test_what_scripts_use_with_ddp_still_works(ranks: Pool) -> None:
    plain = Job("tagger", ONE_WITHOUT_SAMPLES)
    variants = ("checkpointing", "reentrant checkpointing", "compiled", "scaler")
    jobs = [replace(plain, variant=variant) for variant in variants]
    jobs.append(replace(plain, optimizer="Muon"))
    by_rank = ranks.run(training.train_many, jobs, ranks=3)
    for number, job in enumerate(jobs):
        assert_equal_losses([losses[number] for losses in by_rank], job)


def test_autocast_differs_by_its_rounding_only(ranks: Pool) -> None:
    job = Job("tagger", ONE_WITHOUT_SAMPLES, variant="autocast")
    assert_equal_losses(ranks.run(training.train, job, ranks=3), job, tolerance=2e-2)


def fail_then_train(job: Job, mistake: str) -> tuple[list[Failure], list[float]]:
    """A step that one rank fails, by a mistake in the loop, and then a training."""
    model = training.wrap(job)
    optimizer = training.optimizer_of(job, model)
    passes = ddp.UnequalPasses(model, job.plan)
    with harness.catching() as caught:
        LOOPS[mistake](job, model, passes)
    assert all(p.grad is None for p in model.parameters())
    steps = range(job.steps)
    return caught, [training.step_with(job, model, optimizer, passes, step) for step in steps]


def raises_on_one_rank(job: Job, model: Any, passes: Any) -> None:
    for number, micro_batch in enumerate(passes(training.part_of(job, 0), weight=job.weight)):
        loss = training.loss_fn(model, micro_batch)
        if harness.rank() == 0 and number == 1:
            raise KeyError("lost on rank 0")
        passes.backward(loss)


def raises_in_a_context(job: Job, model: Any, passes: Any) -> None:
    with passes(training.part_of(job, 0), weight=job.weight) as kept:
        for number, micro_batch in enumerate(kept):
            loss = training.loss_fn(model, micro_batch)
            if harness.rank() == 0 and number == 1:
                raise KeyError("lost on rank 0")
            passes.backward(loss)


def calls_backward_of_the_loss(job: Job, model: Any, passes: Any) -> None:
    for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
        training.loss_fn(model, micro_batch).backward()


def calls_no_backward(job: Job, model: Any, passes: Any) -> None:
    for _ in passes(training.part_of(job, 0), weight=job.weight):
        pass


def runs_the_unwrapped_model(job: Job, model: Any, passes: Any) -> None:
    for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
        passes.backward(training.loss_fn(model.module, micro_batch))


def calls_backward_twice(job: Job, model: Any, passes: Any) -> None:
    for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
        loss = training.loss_fn(model, micro_batch)
        passes.backward(loss)
        if harness.rank() == 0:
            passes.backward(loss)


def runs_a_second_backward_itself(job: Job, model: Any, passes: Any) -> None:
    for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
        passes.backward(training.loss_fn(model, micro_batch))
        if harness.rank() == 0:
            training.loss_fn(model, micro_batch).backward()


def drops_gradients_before_each_backward(job: Job, model: Any, passes: Any) -> None:
    for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
        model.zero_grad()
        passes.backward(training.loss_fn(model, micro_batch))


def drops_gradients_after_each_backward(job: Job, model: Any, passes: Any) -> None:
    for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
        passes.backward(training.loss_fn(model, micro_batch))
        model.zero_grad()


def has_a_batch_of_another_size(job: Job, model: Any, passes: Any) -> None:
    batch = training.batch_of(job, 0) if harness.rank() == 0 else training.part_of(job, 0)
    list(passes(batch, weight=job.weight))


def has_an_empty_batch(job: Job, model: Any, passes: Any) -> None:
    batch = training.part_of(job, 0)
    if not job.plan.samples(harness.rank()):
        batch = {name: tensor[:0] for name, tensor in batch.items()}
    list(passes(batch, weight=job.weight))


def has_a_loss_that_is_no_scalar(job: Job, model: Any, passes: Any) -> None:
    for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
        loss = training.loss_fn(model, micro_batch)
        passes.backward(loss.expand(3) if harness.rank() == 0 else loss)


LOOPS = {
    function.__name__: function
    for function in (
        raises_on_one_rank,
        raises_in_a_context,
        calls_backward_of_the_loss,
        calls_no_backward,
        runs_the_unwrapped_model,
        calls_backward_twice,
        runs_a_second_backward_itself,
        drops_gradients_before_each_backward,
        drops_gradients_after_each_backward,
        has_a_batch_of_another_size,
        has_an_empty_batch,
        has_a_loss_that_is_no_scalar,
    )
}
MESSAGES = {
    "raises_on_one_rank": "rank 0 left the loop over its passes",
    "raises_in_a_context": "before its end: KeyError: 'lost on rank 0'",
    "calls_backward_of_the_loss": "did not call passes.backward(loss)",
    "calls_no_backward": "did not call passes.backward(loss)",
    "runs_the_unwrapped_model": "compute the loss with that model",
    "calls_backward_twice": "rank 0 left the loop over its passes",
    "runs_a_second_backward_itself": "rank 0 left the loop over its passes",
    "drops_gradients_before_each_backward": "rank 0 left the loop over its passes",
    "drops_gradients_after_each_backward": "call step() and zero_grad() after the loop",
    "has_a_batch_of_another_size": "but the plan gives this rank 3",
    "has_an_empty_batch": "a rank without samples in the plan passes one sample",
    "has_a_loss_that_is_no_scalar": "rank 0 left the loop over its passes",
}


@pytest.mark.filterwarnings("ignore:rank 0 left the loop")
@pytest.mark.every_combination
@pytest.mark.parametrize("mistake", LOOPS)
def test_all_ranks_raise_and_training_may_continue(ranks: Pool, mistake: str) -> None:
    job = Job("tagger", ONE_WITHOUT_SAMPLES, steps=2)
    answers = ranks.run(fail_then_train, job, mistake, ranks=3)
    for caught, _ in answers:
        assert len(caught) == 1
    assert MESSAGES[mistake] in answers[1][0][0].message
    assert_equal_losses([losses for _, losses in answers], job)


@dataclass(frozen=True)
class Fault:
    """Where ranks raise in the loops of one step."""

    step: int
    ranks: tuple[int, ...]
    passes_before: int = 0
    """Passes that the ranks complete; each has at least one more."""
    has_run_forward: bool = False


FAULTS = (
    Fault(step=0, ranks=(0,)),
    Fault(step=0, ranks=(1,), has_run_forward=True),
    Fault(step=0, ranks=(0, 1, 2)),
    Fault(step=1, ranks=(0,)),
    Fault(step=1, ranks=(0, 2)),
    Fault(step=2, ranks=(2,), has_run_forward=True),
    Fault(step=2, ranks=(0,), passes_before=2),
    Fault(step=2, ranks=(0,), passes_before=2, has_run_forward=True),
)
"""A step is 0 or 1 before DDP rebuilds its buckets, and only rank 0 has more than one pass."""


def train_with_a_fault(job: Job, fault: Fault) -> tuple[str, bool, list[float]]:
    """The error of the step with a fault, whether its gradients are gone, and all losses."""
    model = training.wrap(job)
    optimizer = training.optimizer_of(job, model)
    passes = ddp.UnequalPasses(model, job.plan)
    losses, message, are_dropped = [], "", False
    for step in range(job.steps):
        if step == fault.step:
            with harness.catching() as caught:
                run_into(fault, job, model, passes)
            message = caught[0].message
            are_dropped = all(p.grad is None for p in model.parameters())
        losses.append(training.step_with(job, model, optimizer, passes, step))
    return message, are_dropped, losses


def run_into(fault: Fault, job: Job, model: Any, passes: Any) -> None:
    is_failing = harness.rank() in fault.ranks
    for number, micro_batch in enumerate(passes(training.part_of(job, 0), weight=job.weight)):
        is_here = is_failing and number == fault.passes_before
        if is_here and not fault.has_run_forward:
            raise KeyError(f"lost on rank {harness.rank()}")
        loss = training.loss_fn(model, micro_batch)
        if is_here:
            raise KeyError(f"lost on rank {harness.rank()}")
        passes.backward(loss)


@pytest.mark.filterwarnings("ignore:rank . left the loop")
@pytest.mark.parametrize("options", DDP_OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_step_with_a_fault_is_dropped_on_all_ranks(
    ranks: Pool, fault: Fault, options: dict[str, Any]
) -> None:
    """Ranks that failed take part in DDP's communication, whatever it consists of."""
    job = Job("tagger", ONE_WITHOUT_SAMPLES, steps=4, ddp=options)
    answers = ranks.run(train_with_a_fault, job, fault, ranks=3)
    for rank, (message, are_dropped, _) in enumerate(answers):
        assert are_dropped
        expected = "lost on rank" if rank in fault.ranks else "left the loop over its passes"
        assert expected in message
    assert_equal_losses([losses for _, _, losses in answers], job)


def last_backward_begins(job: Job) -> bool:
    """Whether rank 1, which has one pass, begins its backward before rank 0 ends its first one."""
    model = training.wrap(job)
    passes = ddp.UnequalPasses(model, job.plan)
    group = harness.group()
    has_begun = torch.zeros(1)
    for number, micro_batch in enumerate(passes(training.part_of(job, 0), weight=job.weight)):
        loss = training.loss_fn(model, micro_batch)
        if harness.rank() == 0 and number == 0:
            dist.recv(has_begun, 1, group=group, tag=7)
        if harness.rank() == 1:
            loss.register_hook(lambda _: dist.send(torch.ones(1), 0, group=group, tag=7) or None)
        passes.backward(loss)
    return bool(has_begun)


def test_a_rank_with_fewer_passes_does_not_wait_to_begin_its_last_backward(ranks: Pool) -> None:
    assert ranks.run(last_backward_begins, Job("tagger", ONE_WITHOUT_SAMPLES), ranks=3)[0]


def keep_the_iterator_of_a_failed_loop(job: Job) -> tuple[list[str], list[float]]:
    """The messages of a loop that fails on rank 0 and of the step after it; then a training."""
    model = training.wrap(job)
    optimizer = training.optimizer_of(job, model)
    passes = ddp.UnequalPasses(model, job.plan)
    kept = passes(training.part_of(job, 0), weight=job.weight)
    messages = []
    with harness.catching() as caught:
        for number, micro_batch in enumerate(kept):
            loss = training.loss_fn(model, micro_batch)
            if harness.rank() == 0 and number == 1:
                raise KeyError("lost on rank 0")
            passes.backward(loss)
    messages.append(caught[0].message)
    with harness.catching() as caught:
        training.step_with(job, model, optimizer, passes, 0)
    messages.append(caught[0].message)
    steps = range(job.steps)
    return messages, [training.step_with(job, model, optimizer, passes, step) for step in steps]


@pytest.mark.filterwarnings("ignore:rank 0 left the loop")
def test_a_kept_iterator_ends_when_the_next_step_begins(ranks: Pool) -> None:
    job = Job("tagger", ONE_WITHOUT_SAMPLES, steps=2)
    answers = ranks.run(keep_the_iterator_of_a_failed_loop, job, ranks=3)
    for messages, _ in answers:
        assert "use `with passes(batch) as micro_batches:`" in messages[1]
    assert "rank 0 left the loop over its passes" in answers[1][0][0]
    assert_equal_losses([losses for _, losses in answers], job)


def warnings_of_a_16_bit_loss(job: Job, dtype: torch.dtype) -> int:
    """How many warnings a step has whose losses are of this dtype."""
    model = training.wrap(job)
    passes = ddp.UnequalPasses(model, job.plan)
    with warnings.catch_warnings(record=True) as caught:
        for micro_batch in passes(training.part_of(job, 0)):
            passes.backward(training.loss_fn(model, micro_batch).to(dtype))
    return sum("compute the loss in fp32" in str(warning.message) for warning in caught)


def test_16_bit_losses_warn_if_their_weights_are_rounded(ranks: Pool) -> None:
    """Those of the even plan are 1 / 2; the middle rank of the other one has no samples."""
    uneven = Job("tagger", ONE_WITHOUT_SAMPLES)
    even = Job("tagger", Plan.even(3, global_batch=6, micro_batch=1, stage=0))
    found = ranks.run(warnings_of_a_16_bit_loss, uneven, torch.bfloat16, ranks=3)
    assert [warned > 0 for warned in found] == [True, False, True]
    assert ranks.run(warnings_of_a_16_bit_loss, uneven, torch.float32, ranks=3) == [0, 0, 0]
    assert ranks.run(warnings_of_a_16_bit_loss, even, torch.bfloat16, ranks=3) == [0, 0, 0]


def warnings_of_own_loops(job: Job, is_weighted: bool) -> list[list[str]]:
    """What two steps of a loop warn of, in DDP and in Poplar's own engine."""
    plain = training.build(job.model)
    options = {"plan": job.plan, "process_group": harness.group(), "lr": 0.1}
    own = poplar.HeteroZeroOptimizer(plain, torch.optim.SGD, **options)
    model = training.wrap(job)
    passes = ddp.UnequalPasses(model, job.plan)
    weight, part = job.weight if is_weighted else None, training.part_of(job, 0)
    found = []
    for loop, called in ((passes, model), (own.micro_batches, plain)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for micro_batch in loop(part, weight=weight):
                    loss = training.loss_fn(called, micro_batch)
                    passes.backward(loss) if loop is passes else loss.backward()
                if loop is not passes:
                    own.step()
        found.append([str(warning.message) for warning in caught])
    return found


def test_the_own_loss_of_a_model_warns_once_without_its_weight(ranks: Pool) -> None:
    job = Job("llama", UNEQUAL)
    for number, of_engines in enumerate(ranks.run(warnings_of_own_loops, job, False, ranks=3)):
        for messages in of_engines:
            assert len(messages) == (number == 0), "the rank with most samples looks"
            assert all("weight=poplar.tokens() to the loop" in text for text in messages)
    assert ranks.run(warnings_of_own_loops, job, True, ranks=3) == [[[], []]] * 3


def leave_early(job: Job) -> list[bool]:
    """Leave the loop by a break, and step."""
    model = training.wrap(job)
    optimizer = training.optimizer_of(job, model)
    before = [p.detach().clone() for p in model.parameters()]
    passes = ddp.UnequalPasses(model, job.plan)
    with warnings.catch_warnings(record=True) as caught:
        for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
            training.loss_fn(model, micro_batch)
            break
    assert "gradients of this step were dropped" in str(caught[0].message)
    optimizer.step()
    return [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]


def test_break_drops_the_step(ranks: Pool) -> None:
    job = Job("tagger", ONE_WITHOUT_SAMPLES)
    assert all(all(same) for same in ranks.run(leave_early, job, ranks=3))


def plain_backward_after_a_step(job: Job) -> list[Tensor]:
    """Gradients of a backward outside the loop."""
    model = training.wrap(job)
    passes = ddp.UnequalPasses(model, job.plan)
    for micro_batch in passes(training.part_of(job, 0), weight=job.weight):
        passes.backward(training.loss_fn(model, micro_batch))
    model.zero_grad()
    batch = training.batch_of(job, harness.rank())
    training.loss_fn(model, batch).backward()
    return [p.grad for p in model.parameters()]


def test_backward_outside_the_loop_is_averaged_as_ddp_does(ranks: Pool) -> None:
    job = Job("tagger", ONE_WITHOUT_SAMPLES)
    model = training.build("tagger")
    (sum(training.loss_fn(model, training.batch_of(job, rank)) for rank in range(3)) / 3).backward()
    expected = [p.grad for p in model.parameters()]
    for gradients in ranks.run(plain_backward_after_a_step, job, ranks=3):
        torch.testing.assert_close(gradients, expected)


class Normalizing(training.Tagger):
    """Its scale is a moving average over samples."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.scale.lerp_(1.0 + input_ids.float().mean() / training.VOCABULARY, 0.1)
        return super().forward(input_ids, labels)


class NormalizingByParameter(Normalizing):
    """The moving average is a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)


def train_with_a_moving_average(job: Job, make: type[nn.Module]) -> list[list[Failure]]:
    """What the first step raises without and with `allow_forward_state`."""
    failures = []
    for allowed in (False, True):
        model = training.wrap(job, make())
        passes = job.engine.UnequalPasses(model, job.plan, allow_forward_state=allowed)
        with harness.catching() as caught:
            training.step_with(job, model, training.optimizer_of(job, model), passes, 0)
        failures.append(caught)
    return failures


def test_buffers_that_forwards_write_from_samples_raise_unless_allowed(ranks: Pool) -> None:
    for plan in (UNEQUAL, replace(UNEQUAL, stage=1)):  # of DDP and of FSDP2
        job = Job("tagger", plan)
        for refused, allowed in ranks.run(train_with_a_moving_average, job, Normalizing, ranks=3):
            assert "buffer 'scale' differs" in refused[0].message
            assert allowed == []


def test_frozen_parameters_that_forwards_write_raise_unless_allowed(ranks: Pool) -> None:
    job = Job("tagger", UNEQUAL)
    for refused, allowed in ranks.run(
        train_with_a_moving_average, job, NormalizingByParameter, ranks=3
    ):
        assert "parameter 'scale' differs" in refused[0].message
        assert allowed == []


def train_with_sync_batch_norm(job: Job) -> list[Failure]:
    """What the loop raises if the model has a SyncBatchNorm in training mode."""
    model = training.wrap(job)  # DDP itself refuses one on the CPU
    inner = model.module if job.plan.stage == 0 else model
    inner.norm = nn.SyncBatchNorm(1, affine=False)
    passes = job.engine.UnequalPasses(model, job.plan, allow_forward_state=True)
    with harness.catching() as caught:
        training.step_with(job, model, training.optimizer_of(job, model), passes, 0)
    return caught


def test_sync_batch_norm_raises_although_its_state_is_allowed(ranks: Pool) -> None:
    for plan in (UNEQUAL, replace(UNEQUAL, stage=1)):  # of DDP and of FSDP2
        for caught in ranks.run(train_with_sync_batch_norm, Job("tagger", plan), ranks=3):
            assert "'norm' is a SyncBatchNorm in training mode" in caught[0].message


def wrong_constructions() -> list[str]:
    """The messages of wrong models and plans."""
    wrapped = training.wrap(Job("tagger", UNEQUAL))
    plain = training.build("tagger")
    group = harness.group()
    other = replace(UNEQUAL, micro_batches=((8,), (2,), (2,)))
    by_rank = other if harness.rank() else UNEQUAL
    stepping = training.wrap(Job("tagger", UNEQUAL))
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    cases: list[tuple[Any, Any]] = [
        (DistributedDataParallel(wrapped, process_group=group), UNEQUAL),
        (DistributedDataParallel(plain, process_group=group, static_graph=True), UNEQUAL),
        (stepping, UNEQUAL),
        (DistributedDataParallel(nn.Embedding(4, 2, max_norm=1), process_group=group), UNEQUAL),
        (wrapped, Plan.manual("3,3", stage=0)),
        (wrapped, Plan.manual("3,3,3", stage=2)),
        (wrapped, "plan.json"),
        (wrapped, by_rank),
        (wrapped, replace(UNEQUAL, communication=Communication(gradients="int8"))),
        (wrapped, replace(UNEQUAL, host_state=(0.5, 0.0, 0.0), factored=("head",))),
        (wrapped, replace(UNEQUAL, units=(UnitPlan("head", recomputed_on=(1,)),))),
        (wrapped, LEAVES_ONE_OUT),
    ]
    messages = []
    for model, plan in cases:
        with harness.catching() as caught:
            ddp.UnequalPasses(model, plan)
        messages.append(caught[0].message)
    return messages


def test_wrong_models_and_plans_raise_with_the_fix(ranks: Pool) -> None:
    expected = [
        "wrapped a second time",
        "static_graph=True fails",
        "an optimizer runs in the backward of the DDP model",
        "has max_norm=1, so its forwards write",
        "the plan is for 2 ranks, but DDP has 3",
        "the plan is of stage 2, but DDP is of stage 0 (replicated)",
        "plan must be a poplar.Plan, got str",
        "rank(s) [1, 2] have another plan than rank 0",
        "the plan sets communication, which only poplar.HeteroZeroOptimizer carries out, not DDP",
        "the plan sets factored and host_state, which only",
        "the plan sets units, which only",
        "needs all ranks, but the plan leaves out rank 2",
    ]
    for messages in ranks.run(wrong_constructions, ranks=3):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_a_plan_may_name_a_transport_which_changes_no_gradient(ranks: Pool) -> None:
    """As the plans of `autotune` do."""
    job = Job("tagger", replace(UNEQUAL, transport="process_group"), steps=1)
    assert_equal_losses(ranks.run(training.train, job, ranks=3), job)


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        (ddp, {"communication": "int8"}, "communication must be 'exact' for DDP, got 'int8'"),
        (fsdp2, {"communication": "auto"}, "communication must be 'exact' for FSDP2, got 'auto'"),
        (ddp, {"policy": "exact"}, "policy must be 'even_shares' for DDP, got 'exact'"),
        (ddp, {"stage": 2}, "stage must be one of [0] for DDP, got 2"),
        (fsdp2, {"stage": 0}, "stage must be one of [1, 2, 3] for FSDP2, got 0"),
    ],
)
def test_autotune_refuses_what_the_engine_does_not_do(
    engine: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.autotune(torch.nn.Linear(1, 1), training.loss_fn, {}, global_batch=4, **options)


def none_fits() -> NoPlanFits:
    """The error of a search at stage 2 that suggests stage 3 and policy "exact"."""
    cluster = cluster_of(device(memory=200 * 10**6), device(memory=66 * 10**6))
    with pytest.raises(NoPlanFits) as caught:
        search(cluster, global_batch=4, stages=(2,), policy="even_shares", leave_out="never")
    assert caught.value.suggestions[:2] == ("stage 3", "policy exact at stage 2")
    return caught.value


@pytest.mark.parametrize(("engine", "stages"), [(ddp, ()), (fsdp2, ("stage 3",))])
def test_autotune_suggests_only_what_the_engine_can_run(
    monkeypatch: pytest.MonkeyPatch, engine: Any, stages: tuple[str, ...]
) -> None:
    monkeypatch.setattr(unequal_passes, "autotune", mock.Mock(side_effect=none_fits()))
    with pytest.raises(NoPlanFits) as caught:
        engine.autotune(torch.nn.Linear(1, 1), training.loss_fn, {}, global_batch=4)
    found = caught.value.suggestions
    assert (*stages, "without rank 1 at stage 2") == found[: len(stages) + 1]
    assert not any("policy" in one for one in found)


@pytest.mark.parametrize("engine", [ddp, fsdp2])
@pytest.mark.parametrize(
    ("dtype", "options", "measured"),
    [
        (torch.float32, {}, torch.float32),
        (torch.bfloat16, {}, "auto"),
        (torch.float32, {"compute_dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
def test_autotune_measures_what_the_engine_computes(
    monkeypatch: pytest.MonkeyPatch,
    engine: Any,
    dtype: torch.dtype,
    options: dict[str, Any],
    measured: torch.dtype | str,
) -> None:
    """Poplar's own default computes an fp32 model on GPUs in bf16, which these engines do not."""
    autotune = mock.Mock()
    monkeypatch.setattr(unequal_passes, "autotune", autotune)
    model = torch.nn.Linear(1, 1, dtype=dtype)
    engine.autotune(model, training.loss_fn, {}, global_batch=4, **options)
    assert autotune.call_args.kwargs["compute_dtype"] == measured

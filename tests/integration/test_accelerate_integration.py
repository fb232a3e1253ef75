"""A loop written for `Accelerator` trains on unequal ranks as on one process."""

from __future__ import annotations

import copy
import multiprocessing
import warnings
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any

import bitsandbytes
import pytest
import ranks as pool
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from launched import BATCH, PLANS, as_launched, fresh_state, three_ranks, write_for_a_while
from safetensors.torch import load_file
from subset import choose
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import poplar
from poplar.data.sampler import HeteroBatchSampler
from poplar.integrations.accelerate import prepare
from poplar.values.communication import Communication

three = pytest.fixture(scope="module")(three_ranks)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def a_dataset() -> TensorDataset:
    inputs = torch.randn(5 * BATCH, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def a_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def prepared(
    plan: poplar.Plan | None, accelerator: Accelerator, cls: Any = torch.optim.AdamW, **options: Any
) -> Any:
    loader = DataLoader(a_dataset(), batch_size=2, shuffle=True)
    return prepare(
        accelerator,
        a_model(),
        cls,
        loader,
        loss_fn=loss_fn,
        plan=plan,
        scheduler=a_scheduler,
        lr=0.05,
        **options,
    )


def run_loop(accelerator: Accelerator, parts: Any, save_at: int, folder: str) -> list[float]:
    """The norms of the steps until the end of the second epoch."""
    model, optimizer, loader, scheduler = parts
    norms: list[float] = []
    for epoch in range(loader.batch_sampler.epoch, 2):
        loader.set_epoch(epoch)
        for batch in loader:
            for micro_batch in optimizer.micro_batches(batch):
                accelerator.backward(loss_fn(model, micro_batch))
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if len(norms) == save_at:
                accelerator.save_state(folder)
    return norms


def train_and_resume(plan: poplar.Plan, folder: str, save_at: int, cls: Any) -> Any:
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    norms = run_loop(accelerator, prepared(plan, accelerator, cls), save_at, folder)
    fresh_state()
    again = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = prepared(plan, again, cls)
    again.load_state(folder)
    resumed = run_loop(again, parts, 0, folder)
    means = again.gather_for_metrics(torch.tensor([float(again.process_index)])).tolist()
    return norms, resumed, means, [group["lr"] for group in parts.optimizer.param_groups]


def train_alone(cls: Any) -> tuple[list[float], float]:
    model, dataset = a_model(), a_dataset()
    optimizer = cls(model.parameters(), lr=0.05)
    scheduler = a_scheduler(optimizer)
    whole = poplar.Plan.even(1, global_batch=BATCH, micro_batch=BATCH, stage=0)
    sampler = HeteroBatchSampler(len(dataset), whole, rank=0)
    norms = []
    for _ in range(2):
        for batch in DataLoader(dataset, batch_sampler=sampler):
            loss_fn(model, batch).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms, scheduler.get_last_lr()[0]


@pytest.mark.parametrize(
    ("stage", "save_at", "cls"),
    [
        *((stage, save_at, torch.optim.AdamW) for stage in PLANS for save_at in (3, 5)),
        (2, 3, torch.optim.Adafactor),
        (3, 3, bitsandbytes.optim.AdamW8bit),
    ],
)
def test_the_loop_equals_one_process_and_resumes(three, tmp_path, stage, save_at, cls):
    expected, rate = train_alone(cls)
    arguments = PLANS[stage], str(tmp_path / "state"), save_at, cls
    for norms, resumed, means, rates in three.run(train_and_resume, *arguments):
        torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-5)
        assert resumed == norms[save_at:], "the same bits after load_state"
        assert means == [0.0, 1.0, 2.0]
        assert rates == [pytest.approx(rate)]


def train_under_a_measured_plan(cls: Any) -> Any:
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    short = choose(quick={"seconds": 0.3, "stage": 2}, full={"seconds": 2.0})
    tuning = {**short, "cache": False, "verify": False, "progress": False}
    engine = {"on_nonfinite": "skip", "allow_forward_state": True}  # not options of AdamW
    parts = prepared(None, accelerator, cls, tuning=tuning, replan="auto", **engine)
    return parts.optimizer.plan.global_batch, run_loop(accelerator, parts, 0, "unused")


@pytest.mark.parametrize(
    "cls", [torch.optim.AdamW, pytest.param(torch.optim.Adafactor, marks=pytest.mark.full)]
)
def test_without_a_plan_the_ranks_are_measured(three, cls):
    expected, _ = train_alone(cls)
    for global_batch, norms in three.run(train_under_a_measured_plan, cls):
        assert global_batch == BATCH
        torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-5)


def meet_a_nonfinite_loss(stage: int, choice: str) -> tuple[str, list[str], bool]:
    """The second pass of rank 0 has no finite loss. What is raised and warned, and who stepped."""
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = prepared(PLANS[stage], accelerator, on_nonfinite=choice)
    message = ""
    with optimizer.full_parameters():
        before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings(record=True) as warned:
        try:
            for number, micro_batch in enumerate(optimizer.micro_batches(next(iter(loader)))):
                loss = loss_fn(model, micro_batch)
                bad = accelerator.process_index == 0 and number == 1
                accelerator.backward(loss * float("nan") if bad else loss)
            optimizer.step()
        except poplar.PoplarError as error:
            message = str(error)
    with optimizer.full_parameters():
        same = all(map(torch.equal, before, model.parameters()))
    return message, [str(warning.message) for warning in warned], same


@pytest.mark.parametrize("choice", ["raise", "skip"])
@pytest.mark.parametrize("stage", choose(quick=(2,), full=(1, 2, 3)))
def test_a_nonfinite_loss_is_applied_on_no_rank(three, stage, choice):
    answers = three.run(meet_a_nonfinite_loss, stage, choice)
    for message, _, same in answers:
        assert ("rank 0: the loss is nan in pass 2 of 2" in message) == (choice == "raise")
        assert same
    skipped = [text for text in answers[0][1] if "the loss of rank(s) [0]" in text]
    assert len(skipped) == (choice == "skip")


def small_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Its gradients are 0 in fp16 without a loss scale."""
    return (model(batch[0]).float() - batch[1]).square().mean() * 1e-7


def train_in_fp16(plan: poplar.Plan, max_norm: float | None, in_loop: bool) -> Any:
    """The norms of the steps, and the parameters."""
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    options = {"compute_dtype": torch.float16, "eps": 1e-12}
    model, optimizer, loader, _ = prepared(plan, accelerator, **options)
    norms: list[float] = []
    for batch in loader:
        if not in_loop:
            result = optimizer.train_step(small_loss, batch, max_norm=max_norm)
            norms += [] if max_norm is None else [float(result.grad_norm)]
            continue
        for micro_batch in optimizer.micro_batches(batch):
            accelerator.backward(small_loss(model, micro_batch))
        if max_norm is not None:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    with optimizer.full_parameters():
        return norms, [p.detach().clone() for p in model.parameters()]


@pytest.mark.every_combination
@pytest.mark.parametrize(("stage", "max_norm"), [(1, None), (3, 1e-8)])
def test_backward_scales_the_losses_of_an_fp16_model(three, stage, max_norm):
    expected, _ = train_alone(torch.optim.AdamW)
    answers = three.run(train_in_fp16, PLANS[stage], max_norm, True)
    whole_steps = three.run(train_in_fp16, PLANS[stage], max_norm, False)
    for (norms, parameters), (other_norms, others) in zip(answers, whole_steps, strict=True):
        assert norms == other_norms
        assert norms[:1] == [] or norms[0] == pytest.approx(expected[0] * 1e-7, rel=1e-2)
        torch.testing.assert_close(parameters, others, rtol=0, atol=0)
        for parameter, start in zip(parameters, a_model().parameters(), strict=True):
            assert float((parameter != start).float().mean()) > 0.9


def clip_beside_a_frozen_parameter() -> float:
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = a_model()
    model[0].bias.requires_grad_(False)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    loader = DataLoader(a_dataset(), batch_size=2)
    model, optimizer, loader, _ = prepare(
        accelerator, model, torch.optim.AdamW, loader, plan=PLANS[1], params=groups, lr=0.1
    )
    for micro_batch in optimizer.micro_batches(next(iter(loader))):
        accelerator.backward(loss_fn(model, micro_batch))
    return float(accelerator.clip_grad_norm_(model.parameters(), 1.0))


def test_a_gradient_beside_a_frozen_parameter_is_clipped(three):
    model = a_model()
    model[0].bias.requires_grad_(False)
    loss_fn(model, next(iter(DataLoader(a_dataset(), batch_size=BATCH)))).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert three.run(clip_beside_a_frozen_parameter) == [pytest.approx(expected, rel=1e-4)] * 3


def a_planned_loader(
    seed: int, data_seed: int | None = None, split_batches: bool = False, **options: Any
) -> Any:
    """The loader of a script whose ranks have the seeds `seed`, `seed + 1` and so on."""
    as_launched()
    config = DataLoaderConfiguration(data_seed=data_seed, split_batches=split_batches)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    model = a_model()
    torch.manual_seed(seed + accelerator.process_index)
    dataset = TensorDataset(torch.arange(5 * BATCH + 4))
    loader = DataLoader(dataset, **{"batch_size": 2, "shuffle": True, **options})
    return prepare(accelerator, model, torch.optim.AdamW, loader, plan=PLANS[0], lr=0.1).loader


def draw(loader: Iterable[Any]) -> list[list[int]]:
    return [samples.tolist() for (samples,) in loader]


def draw_in_many_orders() -> dict[str, list[list[int]]]:
    """This rank's samples of each step, by what is different."""
    found = {f"seed {seed}": draw(a_planned_loader(seed)) for seed in (10, 20)}
    found["again"] = draw(a_planned_loader(10))
    for name, seed in (("generator", 10), ("generator again", 20)):
        generator = torch.Generator().manual_seed(30)
        found[name] = draw(a_planned_loader(seed, generator=generator))
    found["data_seed"] = draw(a_planned_loader(10, data_seed=20))
    return found


def test_the_order_of_the_data_follows_the_seed_of_the_first_rank(three):
    by_rank = three.run(draw_in_many_orders)
    for found in by_rank:
        assert found["again"] == found["seed 10"] != found["seed 20"]
        assert found["generator again"] == found["generator"] != found["seed 10"]
        assert found["data_seed"] == found["seed 20"]
    for name in by_rank[0]:
        drawn = [at for found in by_rank for samples in found[name] for at in samples]
        assert sorted(drawn) == list(range(5 * BATCH + 4)), name


def resume_with_another_seed() -> tuple[bool, str]:
    """Whether the order goes on, and the error if `data_seed` asks for another one."""
    loader = a_planned_loader(10)
    expected = draw(loader)
    loader.steps_done = 2
    state = loader.state_dict()
    resumed = a_planned_loader(20)
    resumed.load_state_dict(state)
    message = ""
    try:
        a_planned_loader(20, data_seed=5).load_state_dict(state)
    except ValueError as error:
        message = str(error)
    return draw(resumed) == expected[2:], message


def test_a_resumed_loader_keeps_the_order_of_its_state(three):
    for goes_on, message in three.run(resume_with_another_seed):
        assert goes_on
        assert "was saved with seed=10, but here it is 5" in message


def leave_loops_early() -> tuple[list[list[int]], Any]:
    """This rank's samples of two loops that are left early and of the rest of a resumed one.

    With those that whole loops give. The workers of rank 0 draw all batches of an epoch at once.
    """
    whole = a_planned_loader(10)
    epochs = [draw(whole) for _ in range(4)]
    # The processes of the pool are daemons, which must not have children otherwise.
    multiprocessing.current_process()._config["daemon"] = False
    ahead = {"num_workers": 1, "prefetch_factor": 8 if pool.rank() == 0 else 1}
    loader = a_planned_loader(10, **ahead)
    found = [draw(islice(loader, 2)) for _ in range(2)]
    state = loader.state_dict()
    loader.set_epoch(1)
    found.append(draw(islice(loader, 2)))
    loader.set_epoch(2)
    saved_before_the_loop = loader.state_dict()
    resumed = a_planned_loader(10, **ahead)
    resumed.load_state_dict(state)
    found += [draw(islice(resumed, 3)), draw(resumed), draw(resumed)]
    resumed.load_state_dict(saved_before_the_loop)
    found.append(draw(resumed))
    again, rest = epochs[1][:2], epochs[1][2:5]
    return found, [epochs[0][:2], again, again, rest, epochs[2], epochs[3], epochs[2]]


def test_a_loop_after_one_that_was_left_early_is_the_next_epoch(three):
    for found, expected in three.run(leave_loops_early):
        assert found == expected


def draw_by_a_batch_sampler() -> bool:
    """Whether it is the order of a loader with the same options of its own."""
    dataset = TensorDataset(torch.arange(5 * BATCH + 4))
    batches = BatchSampler(RandomSampler(dataset), 2, drop_last=True)
    given = {"batch_size": 1, "shuffle": None, "batch_sampler": batches}
    return draw(a_planned_loader(10, **given)) == draw(a_planned_loader(10, drop_last=True))


def test_a_batch_sampler_has_the_options_of_its_loader(three):
    assert all(three.run(draw_by_a_batch_sampler))


def draw_split_batches() -> bool:
    """Whether batches for all ranks are those of loaders whose batches are for one rank."""
    split = a_planned_loader(10, split_batches=True, batch_size=6)
    return draw(split) == draw(a_planned_loader(10, batch_size=2))


def test_with_split_batches_the_batch_size_is_that_of_all_ranks(three):
    assert all(three.run(draw_split_batches))


class Tagger(nn.Module):
    """Its loss is a mean over labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(7, 7)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(tokens).mT, labels)


def mean_over_labels(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(*batch)


def warnings_of_a_mean_over_labels(is_weighted: bool) -> list[str]:
    as_launched()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 7, (5 * BATCH, 6), generator=generator)
    ends = torch.randint(1, 7, (5 * BATCH, 1), generator=generator)
    labels = tokens.masked_fill(torch.arange(6) >= ends, -100)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=2)
    model, optimizer, loader, _ = prepare(
        accelerator,
        Tagger(),
        torch.optim.AdamW,
        loader,
        loss_fn=mean_over_labels,
        plan=PLANS[1],
        lr=0.1,
    )
    weight = poplar.tokens(shift=False, labels=1) if is_weighted else None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in loader:
            for micro_batch in optimizer.micro_batches(batch, weight=weight):
                accelerator.backward(mean_over_labels(model, micro_batch))
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in warned]


def test_a_mean_over_labels_warns_once_without_its_weight(three):
    first, *others = three.run(warnings_of_a_mean_over_labels, False)
    assert len(first) == 1
    assert "pass weight=poplar.tokens(shift=False, labels=1) to micro_batches" in first[0]
    assert others == [[], []]
    assert three.run(warnings_of_a_mean_over_labels, True) == [[], [], []]


def use_wrongly(way: str) -> None:
    as_launched()
    steps = 1 if way == "batch" else 2
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(split_batches=way == "split batch"),
    )
    model, loader = a_model(), DataLoader(a_dataset(), batch_size=2)
    if way == "sampler":
        weights = torch.ones(5 * BATCH)
        sampler = torch.utils.data.WeightedRandomSampler(weights, 5 * BATCH)
        loader = DataLoader(a_dataset(), batch_size=2, sampler=sampler)
    if way == "prepared loader":
        loader = accelerator.prepare(loader)
    if way == "prepared model":
        model = accelerator.prepare_model(model, evaluation_mode=True)
    if way in ("sampler", "prepared loader", "prepared model", "no plan"):
        plan = None if way == "no plan" else PLANS[1]
        prepare(accelerator, model, torch.optim.AdamW, loader, plan=plan, lr=0.1)
    if way == "no loader":
        prepare(accelerator, model, loader, torch.optim.AdamW, plan=PLANS[1], lr=0.1)  # type: ignore[arg-type]
    if way == "made scheduler":
        made = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 10)
        prepare(accelerator, model, torch.optim.SGD, loader, plan=PLANS[1], scheduler=made)
    if way == "tuning":
        prepared(PLANS[1], accelerator, tuning={"memory_limit": "1GiB"})
    if way == "no profile":
        prepared(PLANS[1], accelerator, replan="auto")
    model, *_ = prepared(PLANS[1], accelerator)
    if way == "second model":
        prepared(PLANS[1], accelerator)
    if way == "accumulate":
        with accelerator.accumulate(model):
            pass
    if way == "clip value":
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    if way == "clip some":
        accelerator.clip_grad_norm_(model[0].parameters(), 1.0)


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("batch", "a global batch of 12, but the loader and the accelerator ask for 6"),
        ("split batch", "ask for 4 (batch_size 2 x 2 accumulation steps); change"),
        ("sampler", "but its sampler is a WeightedRandomSampler"),
        ("prepared loader", "pass a plain torch DataLoader"),
        ("no loader", "but it is a type, not a DataLoader"),
        ("made scheduler", "scheduler= is a StepLR of another one; pass a function that makes it"),
        ("prepared model", "leave out accelerator.prepare for it"),
        ("no plan", "needs loss_fn= to make a plan"),
        ("tuning", "is for planning, but plan= was given"),
        ("no profile", "compares steps with a profile"),
        ("second model", "make another Accelerator for each further model"),
        ("accumulate", "use `for micro_batch in optimizer.micro_batches"),
        ("clip value", "use accelerator.clip_grad_norm_"),
        ("clip some", "pass model.parameters()"),
    ],
)
def test_what_does_not_work_says_what_to_do(three, way, message):
    for error in three.run_expecting_errors(use_wrongly, way):
        assert message in error.message


def save_with_the_accelerator(plan: poplar.Plan, folder: str) -> str:
    """Save the model; returns the error of saving this rank's part of the optimizer's state."""
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = prepared(plan, accelerator)
    optimizer.train_step(loss_fn, next(iter(loader)))
    accelerator.save_model(model, folder)
    accelerator.save(accelerator.get_state_dict(model), f"{folder}/model.pt")
    with optimizer.full_parameters():
        accelerator.save_model(model, f"{folder}/inside")
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    for file in ("model.safetensors", "inside/model.safetensors"):
        found = load_file(f"{folder}/{file}") if accelerator.is_main_process else expected
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    if accelerator.is_main_process:
        assert torch.load(f"{folder}/model.pt").keys() == expected.keys()
    try:
        accelerator.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "sent"), [*((stage, "exact") for stage in PLANS), (1, "int4"), (2, "int4")]
)
def test_the_accelerator_saves_every_value(three, tmp_path, stage, sent):
    (tmp_path / "inside").mkdir()
    plan = replace(PLANS[stage], communication=Communication.of(sent, stage))
    errors = three.run(save_with_the_accelerator, plan, str(tmp_path))
    refused = ["the main process would save its own alone" in error for error in errors]
    assert refused == [stage > 0] * 3


def skip_in_loaders() -> tuple[str, int]:
    """The error of skipping batches of the loader of `prepare`, and how many another one has."""
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = prepared(PLANS[1], accelerator)
    message = ""
    try:
        accelerator.skip_first_batches(parts.loader, 1)
    except RuntimeError as error:
        message = str(error)
    other = DataLoader(a_dataset(), batch_size=BATCH)
    return message, len(list(accelerator.skip_first_batches(other, 2)))


def test_batches_of_the_planned_loader_are_not_skipped_twice(three):
    for message, batches in three.run(skip_in_loaders):
        assert "load_state continues at the saved position; iterate the loader itself" in message
        assert batches == 3


def save_beside_other_models(stage: int, folder: str) -> Any:
    """A model with an optimizer of its own, the one of `prepare`, and a mean of weights.

    Returns their state when it is saved, and when it is loaded by other objects.
    """

    def build(value: float) -> tuple[Accelerator, Any, list[nn.Module], Any]:
        fresh_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        first, last = nn.Linear(3, 2), a_model()
        for parameter in (*first.parameters(), *last.parameters()):
            nn.init.constant_(parameter, value)
        options = {"lr": 0.1, "momentum": 0.9}
        judged = accelerator.prepare(first, torch.optim.SGD(first.parameters(), **options))
        parts = prepared(PLANS[stage], accelerator)
        mean = accelerator.prepare_model(last, evaluation_mode=True)
        return accelerator, parts, [judged[0], mean], judged[1]

    def state(parts: Any, models: list[nn.Module], optimizer: Any) -> Any:
        with parts.optimizer.full_parameters():
            own = {name: value.clone() for name, value in parts.model.state_dict().items()}
        others = [accelerator.unwrap_model(model).state_dict() for model in models]
        return own, copy.deepcopy(others), copy.deepcopy(optimizer.state_dict()["state"])

    as_launched()
    accelerator, parts, models, optimizer = build(1.0)
    parts.optimizer.train_step(loss_fn, next(iter(parts.loader)))
    models[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    saved = state(parts, models, optimizer)
    accelerator, parts, models, optimizer = build(0.0)
    accelerator.load_state(folder)
    return saved, state(parts, models, optimizer)


@pytest.mark.parametrize("stage", choose(quick=[1, 3], full=list(PLANS)))
def test_other_models_of_the_accelerator_are_saved_and_loaded(three, tmp_path, stage):
    for saved, loaded in three.run(save_beside_other_models, stage, str(tmp_path)):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert names == {"model.safetensors", "model_1.safetensors"}, "not that of prepare()"


def save_model_slowly(stage: int, folder: str) -> None:
    """The main process needs longer for its file than the timeout of the ranks."""
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    save, timeout = accelerator.save, timedelta(seconds=2)

    def slow(*arguments: Any, **options: Any) -> None:
        if accelerator.is_main_process:
            write_for_a_while(2 * timeout)
        save(*arguments, **options)

    accelerator.save = slow
    model, optimizer, loader, _ = prepared(PLANS[stage], accelerator, timeout=timeout)
    accelerator.save_model(model, folder)
    optimizer.train_step(loss_fn, next(iter(loader)))


@pytest.mark.parametrize("stage", [1, 3])
def test_saving_the_model_waits_as_long_as_the_main_process_writes(three, tmp_path, stage):
    three.run(save_model_slowly, stage, str(tmp_path))
    assert load_file(tmp_path / "model.safetensors").keys() == a_model().state_dict().keys()

"""Lightning on unequal ranks trains as Lightning in one process on the same global batches."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import lightning.pytorch as pl
import pytest
import ranks as pool
import torch
import torchao.optim
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from subset import choose
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import poplar
from poplar.comm.bucket import Codec
from poplar.integrations.lightning import (
    PoplarMonitor,
    PoplarStrategy,
    to_lightning_checkpoint,
)
from poplar.integrations.lightning.batches import EvenBatchSampler
from poplar.integrations.lightning.configuration import OptimizerRecipe
from poplar.monitoring import JsonLines
from poplar.values.communication import Communication

SAMPLES, GLOBAL_BATCH, WIDTH = 46, 8, 32
STEPS = 20
UNEQUAL = ((2, 2), (0, 3), (0, 1), (0, 0))
"""Three unequal ranks, and one without samples."""
EVERY_RANK = ((3, 1), (0, 2), (0, 1), (0, 1))


class Regression(pl.LightningModule):
    """As users write it: nothing in it is for several ranks."""

    def __init__(self, lr: float = 1e-2, total: int = 0):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, weight_decay=0.1)
        total = self.hparams.total or int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=total + 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data(samples: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, WIDTH, generator=generator)
    y = x[:, :1].sin() + x[:, 1:2]
    return DataLoader(TensorDataset(x, y), **{"batch_size": 2, "drop_last": True, **options})


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "gradient_clip_val": 0.5,
    }
    return pl.Trainer(**{**defaults, **options})


def plan_of(stage: int, micro_batches: Any = UNEQUAL) -> poplar.Plan:
    shares = (0.4, 0.3, 0.2, 0.1)
    return poplar.Plan(
        stage=stage, global_batch=GLOBAL_BATCH, micro_batches=micro_batches, shares=shares
    )


def on_ranks(folder: Path, plan: Any, **options: Any) -> pl.Trainer:
    """A Trainer of one rank of the pool, as a launcher would have started it."""
    with mock.patch.dict(os.environ, LOCAL_RANK=str(pool.rank())):
        strategy = options.pop("strategy", None) or PoplarStrategy(plan=plan)
        return trainer(folder, strategy=strategy, devices=pool.size(), **options)


def environment() -> Any:
    return mock.patch.dict(os.environ, LOCAL_RANK=str(pool.rank()))


def model(cls: type[Regression] = Regression, **options: Any) -> Regression:
    torch.manual_seed(3)
    return cls(**options)


def in_one_process(folder: Path, **options: Any) -> tuple[pl.Trainer, Regression]:
    reference = trainer(folder, devices=1, **options)
    module = model()
    reference.fit(module, data(batch_size=GLOBAL_BATCH), data(45, batch_size=7, drop_last=False))
    return reference, module


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


class ChangesPlan(pl.Callback):
    """Reverses the batches of the ranks after the third step of the second epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        optimizer = trainer.strategy.optimizer
        if optimizer.steps == 8:
            reverse = optimizer.plan.micro_batches[::-1]
            optimizer.apply_plan(replace(optimizer.plan, micro_batches=reverse))


def train(folder: Path, plan: Any) -> dict[str, Any]:
    """Lightning would divide each loss by 2, for the two batches of a step."""
    with environment():
        monitor = PoplarMonitor([JsonLines(folder / "progress.jsonl")], every=8)
        run = on_ranks(folder, plan, callbacks=[monitor, ChangesPlan()], accumulate_grad_batches=2)
        module = model()
        run.fit(module, data(batch_size=1), data(45, batch_size=3, drop_last=False))
        assert run.strategy.plan != plan
        return {"losses": module.losses, "logged": numbers(run.callback_metrics)}


@pytest.mark.parametrize("stage", choose(quick=(0, 3), full=(0, 1, 2, 3)))
def test_losses_and_logged_values_are_those_of_one_process(ranks, tmp_path, stage):
    reference, module = in_one_process(tmp_path)
    assert len(module.losses) == STEPS
    for found in ranks.run(train, tmp_path, plan_of(stage)):
        torch.testing.assert_close(found["losses"], module.losses, rtol=1e-4, atol=1e-6)
        expected = numbers(reference.callback_metrics)
        assert found["logged"].keys() == expected.keys()
        for name, value in expected.items():
            assert found["logged"][name] == pytest.approx(value, rel=1e-4), name
    _, *reports = map(json.loads, (tmp_path / "progress.jsonl").read_text().splitlines())
    assert [report["step"] for report in reports] == [8, 16, 20]
    assert reports[-1]["loss"] == pytest.approx(module.losses[-1], rel=1e-4)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Muon, {"ns_steps": 3}),
        (torch.optim.Adafactor, {"d": 2.0}),
        (bitsandbytes.optim.AdamW, {"optim_bits": 8, "min_8bit_size": 8192}),
        (bitsandbytes.optim.PagedAdamW8bit, {}),
        (torchao.optim.AdamW8bit, {"block_size": 512}),
    ],
)
def test_options_of_an_optimizer_are_found_where_its_class_keeps_them(cls, options):
    parameter = nn.Parameter(torch.zeros(4, 4))
    given = cls([{"params": [parameter]}], lr=0.5, **options)
    recipe = OptimizerRecipe.of(given)
    assert recipe.options == {"lr": 0.5, **options}
    assert recipe.groups == [{"params": [parameter]}]
    recipe.optimizer_class(recipe.groups, **recipe.options)


def packed(samples: list[Any]) -> list[Tensor]:
    """Beside rows for the samples, their bounds, as of sequences in one row: one more."""
    return [*default_collate(samples), torch.arange(len(samples) + 1)]


def rows(batch: Any) -> int:
    return len(batch[1])


def train_by_length(folder: Path, lengths: list[int], collate: Any, weight: Any) -> list[float]:
    with environment():
        strategy = PoplarStrategy(plan=plan_of(2), lengths=lengths, weight=weight)
        module, run = model(), on_ranks(folder, None, strategy=strategy, max_steps=8)
        run.fit(module, data(collate_fn=collate))
        return module.losses


@pytest.mark.parametrize(("collate", "weight"), [(None, None), (packed, None), (packed, rows)])
def test_lengths_divide_global_batches_without_another_loss(ranks, tmp_path, collate, weight):
    reference, module = trainer(tmp_path, devices=1, max_steps=8), model()
    reference.fit(module, data(batch_size=GLOBAL_BATCH))
    lengths = [1 + 7 * at % 11 for at in range(SAMPLES)]
    for losses in ranks.run(train_by_length, tmp_path, lengths, collate, weight):
        torch.testing.assert_close(losses, module.losses, rtol=1e-4, atol=1e-6)


class FreezesHead(Regression):
    """In the first epoch, as DINO."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.current_epoch == 0:
            self.head.zero_grad()


def train_with_frozen_head(folder: Path) -> list[float]:
    with environment():
        module = model(FreezesHead)
        on_ranks(folder, plan_of(2), max_steps=8).fit(module, data())
        return module.losses


def test_gradients_removed_before_the_update_leave_parameters_out(ranks, tmp_path):
    module = model(FreezesHead)
    trainer(tmp_path, devices=1, max_steps=8).fit(module, data(batch_size=GLOBAL_BATCH))
    for losses in ranks.run(train_with_frozen_head, tmp_path):
        torch.testing.assert_close(losses, module.losses, rtol=1e-4, atol=1e-6)


class LogsByRank(Regression):
    """Ranks log other names, and in another order, which changes in the second run."""

    names = (("a", "b"), ("b", "a"), ("b",), ())

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.logged: list[tuple[str, float, int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = batch[0].mean()
        for name in self.names[self.global_rank]:
            self.log(name, value, on_step=name == "a", on_epoch=True)
            self.log(f"{name}_largest", value, reduce_fx="max")
            self.logged.append((name, float(value), len(batch[0])))

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("of_rank_0", 0.25)
            assert "b" in self.trainer.callback_metrics, "as callbacks read it, on one rank"


def validate_twice(folder: Path) -> list[tuple[dict[str, float], list[tuple[str, float, int]]]]:
    """By run, what is returned, and what this rank has logged."""
    runs = []
    with environment():
        run, module = on_ranks(folder, plan_of(1)), LogsByRank()
        for names in (module.names, module.names[::-1]):
            module.names, module.logged = names, []
            (returned,) = run.validate(module, data(45, batch_size=3), verbose=False)
            assert numbers(run.callback_metrics).items() >= {"of_rank_0": 0.25}.items()
            runs.append((returned, module.logged))
    return runs


def test_ranks_may_log_other_names_in_an_evaluation(ranks, tmp_path):
    by_rank = ranks.run(validate_twice, tmp_path)
    for run in range(2):
        logged = [each for runs in by_rank for each in runs[run][1]]
        expected = {"of_rank_0": 0.25}
        for name, epoch in {"a": "a_epoch", "b": "b"}.items():
            own = [(value, size) for n, value, size in logged if n == name]
            expected[epoch] = sum(v * size for v, size in own) / sum(size for _, size in own)
            expected[f"{name}_largest"] = max(value for value, _ in own)
        for runs in by_rank:
            assert runs[run][0] == pytest.approx(expected, rel=1e-5)


def above_zero(batch: Any) -> int:
    return int((batch[1] > 0).sum())


class CountsSome(Regression):
    """Its loss is a mean over the samples above 0, and NaN if there are none."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = batch[1][batch[1] > 0].mean()
        self.log("loss", value)
        self.log("of_step", value, on_step=True, on_epoch=True)


def validate_with_a_weight(folder: Path) -> list[dict[str, float]]:
    with environment():
        run = on_ranks(folder, None, strategy=PoplarStrategy(plan=plan_of(1), weight=above_zero))
        loader = data(45, batch_size=1)
        return [run.validate(CountsSome(), loader, verbose=False)[0] for _ in range(2)]


def test_a_batch_of_weight_0_counts_nothing_in_an_evaluation(ranks, tmp_path):
    y = torch.cat([batch[1] for batch in data(45, batch_size=1)])
    expected = float(y[y > 0].mean())
    for runs in ranks.run(validate_with_a_weight, tmp_path):
        for found in runs:
            assert found["loss"] == pytest.approx(expected, rel=1e-5)
            assert found["of_step_epoch"] == pytest.approx(expected, rel=1e-5)


class ChangesBatches(Regression):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def change_batches(folder: Path) -> None:
    with environment():
        strategy = PoplarStrategy(plan=plan_of(2), lengths=[1] * SAMPLES)
        on_ranks(folder, None, strategy=strategy, max_steps=8).fit(ChangesBatches(), data())


def test_hooks_of_whole_batches_are_refused_with_lengths(ranks, tmp_path):
    for error in ranks.run_expecting_errors(change_batches, tmp_path):
        assert "does not support on_after_batch_transfer of the module" in error.message


def stop_and_resume(folder: Path, stage: int) -> dict[str, Any]:
    """Train 10 steps; train the last 4 again in new objects, from the middle of an epoch."""
    loader = {"shuffle": True}
    with environment():
        save = ModelCheckpoint(folder, "stopped", every_n_train_steps=6)
        whole, first = (
            model(total=12),
            on_ranks(
                folder, plan_of(stage), max_steps=10, callbacks=[save], enable_checkpointing=True
            ),
        )
        first.fit(whole, data(**loader))
        monitor = PoplarMonitor([JsonLines(folder / "resumed.jsonl")], every=3)
        rest = model(total=12)
        second = on_ranks(folder, plan_of(stage), max_steps=10, callbacks=[monitor])
        second.fit(rest, data(**loader), ckpt_path=folder / "stopped.ckpt")
        found = {
            "validated": second.validate(rest, data(45, batch_size=3), verbose=False)[0],
            "predicted": [p.flatten().tolist() for p in second.predict(rest, data(45))],
        }
        second.save_checkpoint(folder / "trained.ckpt", weights_only=True)
        found["tested"] = second.test(rest, data(9), folder / "stopped.ckpt", verbose=False)[0]
        return {"whole": whole.losses, "rest": rest.losses, **found}


@pytest.mark.parametrize("stage", choose(quick=(3,), full=(0, 1, 2, 3)))
def test_stop_resume_evaluate_save_and_load(ranks, tmp_path, stage):
    found = ranks.run(stop_and_resume, tmp_path, stage)
    assert len(found[0]["whole"]) == 10
    for of_rank in found:
        torch.testing.assert_close(of_rank["rest"], of_rank["whole"][6:], rtol=1e-6, atol=0)
    _, *reports = map(json.loads, (tmp_path / "resumed.jsonl").read_text().splitlines())
    assert [report["step"] for report in reports] == [9, 10]

    plain = trainer(tmp_path, devices=1)
    trained = Regression.load_from_checkpoint(tmp_path / "trained.ckpt")
    validated = plain.validate(trained, data(45, batch_size=7, drop_last=False), verbose=False)[0]
    predicted = plain.predict(trained, data(45, batch_size=45, drop_last=False))[0].flatten()
    to_lightning_checkpoint(tmp_path / "stopped.ckpt", tmp_path / "stopped-in-one-file.ckpt")
    stopped = Regression.load_from_checkpoint(tmp_path / "stopped-in-one-file.ckpt")
    (tested,) = plain.test(stopped, data(8, batch_size=8), verbose=False)
    for of_rank in found:
        assert of_rank["validated"] == pytest.approx(validated, rel=1e-5)
        assert of_rank["tested"] == pytest.approx(tested, rel=1e-5)
    in_order = [
        value
        for batch in zip(*(f["predicted"] for f in found), strict=True)
        for p in batch
        for value in p
    ]
    torch.testing.assert_close(torch.tensor(in_order), predicted, rtol=1e-5, atol=1e-6)
    resumed = model(total=12)
    trainer(tmp_path, devices=1, max_steps=7).fit(
        resumed,
        data(batch_size=GLOBAL_BATCH),
        ckpt_path=tmp_path / "stopped-in-one-file.ckpt",
        weights_only=False,
    )
    assert len(resumed.losses) == 1


def save_after_compressed_updates(folder: Path, stage: int) -> dict[str, Tensor]:
    """Saves the weights alone; returns the exact ones."""
    plan = replace(plan_of(stage), communication=Communication.of("int4", stage))
    with environment():
        module, run = model(total=12), on_ranks(folder, plan, max_steps=2)
        run.fit(module, data())
        run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        with run.strategy.optimizer.full_parameters():
            return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("stage", choose(quick=(1,), full=(1, 2, 3)))
def test_saved_weights_are_exact_after_compressed_updates(ranks, tmp_path, stage):
    expected = ranks.run(save_after_compressed_updates, tmp_path, stage)[0]
    found = Regression.load_from_checkpoint(tmp_path / "weights.ckpt").state_dict()
    torch.testing.assert_close(dict(found), expected, rtol=0, atol=0)


class Normalized(Regression):
    """With statistics of its batches."""

    def __init__(self) -> None:
        super().__init__(total=12)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def save_and_evaluate_statistics(folder: Path, stage: int) -> dict[str, float]:
    """The first rank, which saves, has no samples."""
    plan = plan_of(stage, ((0,), (8,), (0,), (0,)))
    with environment():
        strategy = PoplarStrategy(plan=plan, allow_forward_state=True)
        module, run = model(Normalized), on_ranks(folder, None, strategy=strategy, max_steps=5)
        run.fit(module, data(), data(45, batch_size=3, drop_last=False))
        run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        return numbers(run.callback_metrics)


@pytest.mark.parametrize("stage", choose(quick=(3,), full=(0, 1, 2, 3)))
def test_a_rank_without_samples_saves_and_evaluates_the_trained_statistics(ranks, tmp_path, stage):
    by_rank = ranks.run(save_and_evaluate_statistics, tmp_path, stage)
    run, expected = trainer(tmp_path, devices=1, max_steps=5), model(Normalized)
    run.fit(expected, data(batch_size=8), data(45, batch_size=8, drop_last=False))
    for found in by_rank:
        assert found == pytest.approx(numbers(run.callback_metrics), rel=1e-4)
    saved = Normalized.load_from_checkpoint(tmp_path / "weights.ckpt").state_dict()
    torch.testing.assert_close(dict(saved), dict(expected.state_dict()), rtol=1e-4, atol=1e-5)


class BadSample(Regression):
    """One pass of rank 0 has no finite loss in the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.passes = 1 if batch_idx != getattr(self, "of_batch", -1) else self.passes + 1
        self.of_batch = batch_idx
        bad = self.global_rank == 0 and batch_idx == 2 and self.passes == 2
        return loss * float("nan") if bad else loss


def meet_a_nonfinite_loss(folder: Path, choice: str) -> tuple[str, list[bool]]:
    """What is raised, and which steps were skipped."""
    skipped: list[bool] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            skipped.append(trainer.strategy.last_result.skipped)

    with environment():
        micro_batches = ((2, 2), (0, 3), (0, 1), (0, 0))
        strategy = PoplarStrategy(plan=plan_of(2, micro_batches), on_nonfinite=choice)
        options = {"gradient_clip_val": None, "max_steps": 4, "callbacks": [Watch()]}
        run = on_ranks(folder, None, strategy=strategy, **options)
        torch.manual_seed(3)
        message = ""
        try:
            run.fit(BadSample(total=12), data())
        except poplar.PoplarError as error:
            message = str(error)
    return message, skipped


def test_a_nonfinite_loss_is_applied_on_no_rank(ranks, tmp_path):
    for message, skipped in ranks.run(meet_a_nonfinite_loss, tmp_path, "raise"):
        assert "rank 0: the loss is nan in pass 2 of 2" in message
        assert skipped == [False, False]
    for message, skipped in ranks.run(meet_a_nonfinite_loss, tmp_path, "skip"):
        assert message == ""
        assert skipped == [False, False, True, False]


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Regression):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.blocks.parameters()), torch.optim.SGD(self.head.parameters())]


class NoLoss(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"prediction": self(batch[0])}


MISTAKES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "precision": ({"precision": "16-true"}, model, "supports precision='32-true' and 'bf16-mixed'"),
    "clip by value": ({"gradient_clip_algorithm": "value"}, model, "by norm only"),
    "manual": ({"gradient_clip_val": None}, Manual, "use automatic optimization"),
    "sync batchnorm": ({"sync_batchnorm": True}, model, "drop Trainer(sync_batchnorm=True)"),
    "two optimizers": ({}, TwoOptimizers, "Training with multiple optimizers"),
    "no loss": ({}, NoLoss, "must return its loss"),
    "schedule": (
        {"callbacks": [GradientAccumulationScheduler({0: 2})]},
        model,
        "remove the callback",
    ),
    "global batch": ({"accumulate_grad_batches": 2}, model, "has 16: batch_size 2 x"),
}


def make_mistakes(folder: Path) -> dict[str, str]:
    messages = {}
    with environment():
        for name, (options, make, _) in MISTAKES.items():
            try:
                on_ranks(folder, plan_of(0), **options).fit(make(), data())
            except (Exception, SystemExit) as error:
                messages[name] = f"{error} {error.__cause__ or error.__context__}"
        for name, loader in {
            "sampler": data(sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
            "list": [data(), data()],
        }.items():
            try:
                on_ranks(folder, plan_of(0)).fit(model(), loader)
            except (Exception, SystemExit) as error:
                messages[name] = str(error)
        wrong = {"accumulate_grad_batches": 2, "gradient_clip_algorithm": "value"}
        run = on_ranks(folder, plan_of(0), **wrong)
        with pytest.raises(ValueError, match="by norm only"):
            run.fit(model(), data())
        assert run.accumulate_grad_batches == 2, "as before the refused fit"
    return messages


def test_mistakes_are_named(ranks, tmp_path):
    expected = {name: message for name, (_, _, message) in MISTAKES.items()}
    expected.update({"sampler": "HeteroBatchSampler", "list": "it is a list, not a DataLoader"})
    in_a_pass = expected.pop("no loss")
    found = ranks.run(make_mistakes, tmp_path)
    assert in_a_pass in found[0]["no loss"]
    for messages in found:
        assert messages["no loss"]
        for name, message in expected.items():
            assert message in messages.get(name, "nothing was raised"), name


def train_without_a_plan(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    with environment():
        module = model()
        tuning = {"cache": False, "seconds": choose(quick=0.3, full=3), "verify": False}
        strategy = PoplarStrategy(stage=2, replan="auto", **tuning)
        run = on_ranks(folder, None, strategy=strategy, accumulate_grad_batches=3)
        run.fit(module, data(batch_size=1))
        return {"losses": module.losses, "plan": strategy.plan}


@pytest.mark.slow
def test_without_a_plan_ranks_are_profiled_and_the_global_batch_is_kept(ranks, tmp_path):
    found = ranks.run(train_without_a_plan, tmp_path, ranks=4)
    reference = model()
    trainer(tmp_path, devices=1).fit(reference, data(batch_size=12))
    for of_rank in found:
        plan = of_rank["plan"]
        assert (plan.global_batch, plan.stage) == (12, 2)
        torch.testing.assert_close(of_rank["losses"], reference.losses, rtol=1e-4, atol=1e-6)


def train_in_bf16(folder: Path) -> list[float]:
    with environment():
        module = model(total=12)
        run = on_ranks(folder, plan_of(3), precision="bf16-mixed", max_steps=5)
        run.fit(module, data())
        return module.losses


def test_bf16_mixed_is_autocast(ranks, tmp_path):
    reference = model(total=12)
    alone = trainer(tmp_path, precision="bf16-mixed", devices=1, max_steps=5)
    alone.fit(reference, data(batch_size=GLOBAL_BATCH))
    for losses in ranks.run(train_in_bf16, tmp_path):
        torch.testing.assert_close(losses, reference.losses, rtol=1e-2, atol=0)


class SmallLoss(Regression):
    """Its gradients are 0 in fp16 without a loss scale."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]).float(), batch[1]) * 1e-8

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3, eps=1e-12)


def train_with_options(folder: Path) -> Any:
    with environment():
        strategy = PoplarStrategy(plan=plan_of(1), reduce_dtype=torch.bfloat16, units=["head"])
        on_ranks(folder, None, strategy=strategy, max_steps=1).fit(model(), data())
        engine = strategy.optimizer._training_parts().engine
        return engine.strategy.codec, [unit.name for unit in engine.units]


def test_options_of_the_engine_reach_it(ranks, tmp_path):
    for codec, units in ranks.run(train_with_options, tmp_path):
        assert codec == Codec(torch.bfloat16)
        assert units == ["root..head"]
    with pytest.raises(TypeError, match=r"unknown arguments \['reduced'\]"):
        PoplarStrategy(reduced=torch.bfloat16)


def train_in_fp16(folder: Path, stage: int) -> list[float]:
    torch.manual_seed(3)
    with environment():
        module = SmallLoss()
        strategy = PoplarStrategy(plan=plan_of(stage), compute_dtype=torch.float16)
        on_ranks(folder, None, strategy=strategy).fit(module, data())
        return module.losses


@pytest.mark.parametrize("stage", choose(quick=(0, 3), full=(0, 1, 2, 3)))
def test_losses_of_an_fp16_model_are_scaled(ranks, tmp_path, stage):
    torch.manual_seed(3)
    reference = SmallLoss()
    trainer(tmp_path, devices=1).fit(reference, data(batch_size=GLOBAL_BATCH))
    assert reference.losses[-1] < 0.5 * reference.losses[0]
    for losses in ranks.run(train_in_fp16, tmp_path, stage):
        torch.testing.assert_close(losses, reference.losses, rtol=2e-2, atol=0)


def train_by_a_batch_sampler(folder: Path) -> tuple[list[float], list[float]]:
    """Losses with a batch sampler, and with the same options of the loader."""
    losses = []
    for is_given in (True, False):
        loader = data(shuffle=True)
        if is_given:
            batches = BatchSampler(RandomSampler(loader.dataset), 2, drop_last=True)
            loader = DataLoader(loader.dataset, batch_sampler=batches)
        module = model()  # which asks for the number of steps before there is a plan
        with environment(), mock.patch.object(PoplarStrategy, "_tuned", return_value=plan_of(1)):
            on_ranks(folder, None, max_steps=6).fit(module, loader)
        losses.append(module.losses)
    return losses[0], losses[1]


def test_a_batch_sampler_has_the_options_of_its_loader(ranks, tmp_path):
    for given, expected in ranks.run(train_by_a_batch_sampler, tmp_path):
        assert given == expected


@pytest.mark.parametrize(("length", "batch_size", "ranks"), [(45, 7, 3), (10, 1, 3), (3, 5, 3)])
def test_every_sample_is_evaluated_once_and_ranks_have_equally_many_batches(
    length, batch_size, ranks
):
    by_rank = [list(EvenBatchSampler(length, batch_size, rank, ranks)) for rank in range(ranks)]
    rounds = list(zip(*by_rank, strict=True))
    assert [i for batches in rounds for batch in batches for i in batch] == list(range(length))
    assert all(1 <= len(batch) <= batch_size + 1 for batches in by_rank for batch in batches)


def test_fewer_samples_than_ranks_cannot_be_evaluated():
    with pytest.raises(ValueError, match="every rank needs a sample"):
        EvenBatchSampler(2, 4, rank=0, world_size=3)

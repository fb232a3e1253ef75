"""`PoplarTrainer` on three unequal ranks trains as `Trainer` does on one process."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bitsandbytes
import datasets
import numpy as np
import peft
import pytest
import ranks as pool
import torch
import trl
from language_models import WORDS, model_of
from launched import (
    BATCH,
    PLANS,
    SHARES,
    as_launched,
    fresh_state,
    three_ranks,
    write_for_a_while,
)
from ranks import Pool
from records import cluster
from safetensors.torch import load_file
from subset import choose
from tokenizers import Tokenizer, models
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate
from trainers import Sentences, arguments, logged, padded
from transformers import (
    HfArgumentParser,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import poplar
from poplar.data.lengths import deal
from poplar.integrations.transformers import (
    PoplarArguments,
    PoplarTrainer,
    PoplarTrainerMixin,
)
from poplar.integrations.transformers import trainer as trainer_module
from poplar.integrations.transformers.loss import own_mean_weight
from poplar.integrations.transformers.trainer import RUN_FILE, _length
from poplar.monitoring import JsonLines, RunRecord
from poplar.values.communication import Communication
from poplar.zero.steps.step_result import Stopwatch


def imported() -> None:
    """Called first, with a deadline for importing the libraries."""


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    """The ranks of all tests here."""
    for workers in three_ranks():
        workers.run(imported, timeout=300)
        yield workers


class Stream(IterableDataset[dict[str, list[int]]]):
    """The same sentences without a length."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(Sentences(60).samples)


class MeanOfWeights(TrainerCallback):
    """An average of the weights over the steps, as of an EMA; reads whole parameters."""

    def __init__(self) -> None:
        self.mean: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        whole = getattr(optimizer, "full_parameters", contextlib.nullcontext)
        with whole(), torch.no_grad():
            for name, value in model.state_dict().items():
                self.mean[name] = 0.5 * self.mean.get(name, 0.0) + 0.5 * value.clone()


def square_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss function of the user: squared logits of the labels."""
    counted = labels != -100
    logits = outputs.logits.gather(-1, labels.clamp(min=0).unsqueeze(-1))[..., 0]
    return ((logits - 1.0).square() * counted).sum() / num_items_in_batch


class MeanForCausalLM(LlamaForCausalLM):
    """Computes the mean of its own labels, as models do that take no `num_items_in_batch`."""

    accepts_loss_kwargs = False

    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask, labels=labels)


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def with_frozen_adapters(model: nn.Module) -> nn.Module:
    """LoRA whose `lora_A` stays random (LoRA-FA)."""
    model = with_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


def with_added_adapter(model: Any) -> nn.Module:
    """By the integration of transformers, which makes no `PeftModel`."""
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
    model.add_adapter(peft.LoraConfig(**options))
    return model


def with_prefix(model: nn.Module) -> nn.Module:
    """PEFT saves what the forward of its encoder returns."""
    torch.manual_seed(1)
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    return peft.get_peft_model(model, peft.PrefixTuningConfig(**options))


def with_many_words(model: Any) -> nn.Module:
    """Its embedding has state of 8 bits, unless it is kept in 32."""
    model.config.vocab_size = 512
    torch.manual_seed(0)
    return LlamaForCausalLM(model.config)


def built(
    trainer_class: Any,
    folder: Path | str,
    model: Any = None,
    given: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer with `TrainingArguments` of these settings.

    Args:
        given: arguments of the trainer, in place of these or beside them.
    """
    own = {"data_collator": padded, "train_dataset": Sentences(60)} | dict(given or {})
    model = model_of("llama") if model is None else model
    return trainer_class(model, arguments(folder, **settings), **own)


def planned(
    folder: str,
    plan: poplar.Plan | None,
    model: Any = None,
    trainer_class: Any = PoplarTrainer,
    options: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """The trainer of a rank; `options` are further ones of `PoplarArguments`."""
    as_launched()
    own = {"poplar": PoplarArguments(**({"plan": plan} | dict(options or {})))} | dict(given or {})
    return built(trainer_class, folder, model, own, **(SHARES | settings))


def alone_trained(
    folder: Path,
    model: Any = None,
    trainer_class: Any = Trainer,
    given: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """The trainer of one process after its training."""
    fresh_state()
    trainer = built(trainer_class, folder, model, given, **settings)
    trainer.train()
    return trainer


ADAPTED = {
    "adapters": with_adapters,
    "frozen adapters": with_frozen_adapters,
    "added adapter": with_added_adapter,
    "prefix": with_prefix,
}
FEATURES: dict[str, dict[str, Any]] = {
    "label smoothing": {"args": {"label_smoothing_factor": 0.1}},
    "loss function": {"trainer": {"compute_loss_func": square_loss}},
    "adapters": {"model": with_adapters},
    "recomputed activations": {"args": {"gradient_checkpointing": True}},
    "autocast": {"args": {"bf16": True}, "rtol": 2e-2},
    "compiled": {"args": {"torch_compile": True, "torch_compile_backend": "eager"}},
    "mean of weights": {"trainer": {"callbacks": [MeanOfWeights]}},
    "stream": {"trainer": {"train_dataset": Stream()}},
    "in the order of the dataset": {"args": {"train_sampling_strategy": "sequential"}},
    "token counts": {"args": {"include_num_input_tokens_seen": "non_padding"}},
    "plain SGD": {"args": {"optim": "sgd", "max_grad_norm": 0.0}},
    "8-bit optimizer": {"model": with_many_words, "args": {"optim": "adamw_8bit"}},
    "Adafactor": {"args": {"optim": "adafactor"}},
    "a mean over labels": {"model": lambda model: MeanForCausalLM(model.config)},
    "wide tail": {"args": {"num_train_epochs": 2, "max_steps": -1}, "samples": 55},
}
QUICK = set(FEATURES) - {
    *("autocast", "compiled", "in the order of the dataset"),
    *("token counts", "plain SGD", "Adafactor"),
}
FEATURE_STEPS = choose(quick=4, full=6)
"""More than those that warm up."""


def trained(trainer_class: Any, feature: str, folder: str, sizes: dict[str, int], **options: Any):
    """What was logged, and what is special of the feature."""
    wanted = FEATURES[feature]
    own = {"train_dataset": Sentences(wanted.get("samples", 60))} | wanted.get("trainer", {})
    callbacks = [callback() for callback in own.get("callbacks", ())]
    model = wanted.get("model", lambda model: model)(model_of("llama"))
    settings = {"max_steps": FEATURE_STEPS} | wanted.get("args", {}) | sizes
    given = own | {"callbacks": callbacks} | options
    trainer = built(trainer_class, folder, model, given, **settings)
    trainer.train()
    counts = (trainer.state.num_input_tokens_seen, trainer.state.total_flos)
    return logged(trainer), [callback.mean for callback in callbacks], counts


def train_with_feature(feature: str, plan: poplar.Plan, folder: str) -> Any:
    as_launched()
    torch._dynamo.reset()
    return trained(PoplarTrainer, feature, folder, SHARES, poplar=PoplarArguments(plan=plan))


def train_on_ranks(name: str, plan: poplar.Plan, folder: str, **options: Any) -> Any:
    trainer = planned(folder, plan, model_of(name), options=options)
    trainer.train()
    return logged(trainer)


@pytest.mark.parametrize("stage", PLANS)
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_losses_equal_those_of_one_process(three, tmp_path, name, stage):
    here = three.run(train_on_ranks, name, PLANS[stage], str(tmp_path))
    alone = logged(alone_trained(tmp_path, model_of(name)))
    assert len(alone) == 20
    for each in here:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(alone), rtol=1e-4, atol=1e-5)


def test_balanced_lengths_change_no_loss(three, tmp_path):
    options = {"balance_lengths": True}
    here = three.run(train_on_ranks, "llama", PLANS[2], str(tmp_path), **options)
    alone = logged(alone_trained(tmp_path))
    for each in here:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(alone), rtol=1e-4, atol=1e-5)


def metrics_of(outcome: Any) -> dict[str, float]:
    """A metric that depends on every prediction and on its label."""
    own = np.take_along_axis(outcome.predictions, outcome.label_ids[..., None], -1)
    return {"margin": float((own[..., 0] - outcome.predictions.mean(-1)).mean())}


class Fixed(Dataset[dict[str, list[int]]]):
    """Sequences of one length, all of whose tokens are labels; their number is no multiple of 3."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, at: int) -> dict[str, list[int]]:
        words = [3 + (at * 7 + position * 5) % (WORDS - 3) for position in range(8)]
        return {"input_ids": words, "labels": words}


SAVING = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "per_device_eval_batch_size": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "margin",
    "lr_scheduler_type": "cosine",
}
EVALUATING = {"eval_dataset": Fixed(), "compute_metrics": metrics_of}


def evaluated(trainer: Trainer) -> list[tuple[float, float]]:
    history = trainer.state.log_history
    return [(entry["eval_loss"], entry["eval_margin"]) for entry in history if "eval_loss" in entry]


class ChangesPlan(TrainerCallback):
    """Changes the plan after the fourth step; the batches of the ranks are then reversed."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        if state.global_step == 4:
            optimizer.apply_plan(
                replace(optimizer.plan, micro_batches=optimizer.plan.micro_batches[::-1])
            )


def save_and_resume(plan: poplar.Plan, folder: str) -> Any:
    """Train six steps; again from the third, in mid-epoch of the first. Returns the outcomes."""

    def trainer(*callbacks: TrainerCallback) -> PoplarTrainer:
        given = EVALUATING | {"callbacks": list(callbacks)}
        return planned(folder, plan, given=given, **SAVING)

    first = trainer()
    first.train()
    kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    predictions = again.predict(Fixed())
    again.save_model(f"{folder}/saved")
    changed = trainer(ChangesPlan())
    changed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert changed.plan != plan
    return {
        "first": logged(first),
        "again": logged(again),
        "changed": logged(changed),
        "evaluated": (evaluated(first), evaluated(again)),
        "kept": kept,
        "best": first.state.best_model_checkpoint,
        "predictions": predictions.predictions,
        "epochs": (first.state.epoch, again.state.epoch),
        "step": again.state.global_step,
    }


@pytest.mark.parametrize("stage", choose(quick=[1, 3], full=list(PLANS)))
def test_stop_resume_evaluate_predict_save_load(three, tmp_path, stage):
    alone = alone_trained(tmp_path / "alone", given=EVALUATING, **SAVING)
    expected = alone.predict(Fixed()).predictions

    here = three.run(save_and_resume, PLANS[stage], str(tmp_path / "here"))[0]

    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(here["first"]), torch.tensor(logged(alone)), **close)
    assert here["again"] == here["first"], "the log before the resume, then the same bits"
    torch.testing.assert_close(torch.tensor(here["changed"]), torch.tensor(here["first"]), **close)
    for each in here["evaluated"]:
        count = len(each)
        torch.testing.assert_close(
            torch.tensor(each), torch.tensor(evaluated(alone)[-count:]), **close
        )
    assert here["kept"] == sorted(p.name for p in (tmp_path / "alone").glob("checkpoint-*"))
    assert Path(here["best"]).name == Path(alone.state.best_model_checkpoint).name
    assert here["epochs"] == (alone.state.epoch, alone.state.epoch)
    assert here["step"] == 6
    torch.testing.assert_close(torch.tensor(here["predictions"]), torch.tensor(expected), **close)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "here" / "saved")
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, **close)


@pytest.mark.parametrize("stage", PLANS)
@pytest.mark.parametrize("feature", choose(quick=sorted(QUICK), full=list(FEATURES)))
def test_features_train_with_equal_losses(three, tmp_path, feature, stage):
    if (feature, stage) == ("Adafactor", 3):
        pytest.skip("needs whole tensors")
    here = three.run(train_with_feature, feature, PLANS[stage], str(tmp_path))
    fresh_state()
    torch._dynamo.reset()
    alone = trained(Trainer, feature, str(tmp_path), {})
    close = {"rtol": FEATURES[feature].get("rtol", 1e-4), "atol": 1e-5}
    assert alone[0]
    for losses, means, counts in here:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone[0]), **close)
        torch.testing.assert_close(means, alone[1], **close)
        assert counts[0] == alone[2][0]


ONE_STEP_IN_8_BITS = {"optim": "adamw_8bit", "max_steps": 1}


def types_of_state(trainer: Any) -> Any:
    state = getattr(trainer.optimizer, "optimizer", trainer.optimizer).state
    named = trainer.model.named_parameters()
    return {name: state[p]["state1"].dtype for name, p in named if state.get(p)}


def types_of_state_on_ranks(stage: int, folder: str) -> Any:
    model = with_many_words(model_of("llama"))
    trainer = planned(folder, PLANS[stage], model, **ONE_STEP_IN_8_BITS)
    trainer.train()
    return types_of_state(trainer)


@pytest.mark.parametrize("stage", PLANS)
def test_the_state_of_embeddings_stays_in_32_bits(three, tmp_path, stage):
    model = with_many_words(model_of("llama"))
    expected = types_of_state(alone_trained(tmp_path, model, **ONE_STEP_IN_8_BITS))
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
    assert expected["model.embed_tokens.weight"] == torch.float32
    assert expected["lm_head.weight"] == torch.uint8
    found = {}
    for types in three.run(types_of_state_on_ranks, stage, str(tmp_path)):
        found |= types
    assert found == expected


class PlannedSFTTrainer(PoplarTrainerMixin, trl.SFTTrainer):
    """TRL's trainer with the mixin."""


def fine_tuned(trainer_class: Any, folder: str, changes: dict[str, Any], **options: Any) -> Any:
    """What TRL's trainer logs on packed sequences (rows without padding, several samples each)."""
    words = Tokenizer(models.WordLevel({str(word): word for word in range(WORDS)}, unk_token="0"))
    data = [sample["input_ids"] for sample in Sentences(60).samples]
    counted = {"max_steps": 4, "max_length": None, "eval_strategy": "steps", "eval_steps": 4}
    settings = arguments(folder).to_dict() | {**counted, **changes}
    own = {key: settings[key] for key in ("output_dir", *counted, *changes)}
    same = ("learning_rate", "warmup_steps", "logging_steps", "save_strategy", "use_cpu")
    own |= {key: settings[key] for key in (*same, "report_to", "disable_tqdm")}
    trainer = trainer_class(
        model_of("llama"),
        trl.SFTConfig(**own, bf16=False),
        train_dataset=datasets.Dataset.from_dict({"input_ids": data, "labels": data}),
        eval_dataset=datasets.Dataset.from_dict({"input_ids": data[:6], "labels": data[:6]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0"
        ),
        **options,
    )
    trainer.train()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    history = trainer.state.log_history
    rows = [[e[name] for name in names] for e in history if "entropy" in e]
    in_evaluation = [e["eval_num_tokens"] for e in history if "eval_num_tokens" in e]
    assert in_evaluation == [rows[-1][-1]], "the tokens of all ranks"
    return rows


def fine_tune_on_ranks(plan: poplar.Plan, folder: str, packed: bool) -> Any:
    as_launched()
    options = {"poplar": PoplarArguments(plan=plan)}
    return fine_tuned(PlannedSFTTrainer, folder, {"padding_free": packed, **SHARES}, **options)


@pytest.mark.parametrize("stage", PLANS)
@pytest.mark.parametrize("packed", [False, True])
def test_supervised_fine_tuning_of_trl(three, tmp_path, stage, packed):
    here = three.run(fine_tune_on_ranks, PLANS[stage], str(tmp_path), packed)
    fresh_state()
    changes = {"padding_free": packed, "per_device_train_batch_size": BATCH}
    alone = fine_tuned(trl.SFTTrainer, str(tmp_path), changes)
    assert len(alone) == 4
    for each in here:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(alone), rtol=1e-4, atol=1e-4)


COUNTED = {"include_num_input_tokens_seen": "non_padding"}


class OutOfMemoryOnce(PlannedSFTTrainer):
    """Rank 1 runs out of memory in its second pass of the second step."""

    passes = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.passes += 1
        if pool.rank() == 1 and self.passes == 4:
            raise torch.OutOfMemoryError("planted")
        return loss


def fine_tune_with_little_memory(folder: str) -> Any:
    as_launched()
    options = {"poplar": PoplarArguments(plan=PLANS[0])}
    return fine_tuned(OutOfMemoryOnce, folder, SHARES | COUNTED, **options)


def test_a_step_that_ran_out_of_memory_counts_once_in_metrics_and_tokens(three, tmp_path):
    here = three.run(fine_tune_with_little_memory, str(tmp_path))
    fresh_state()
    changes = {"per_device_train_batch_size": BATCH, **COUNTED}
    alone = fine_tuned(trl.SFTTrainer, str(tmp_path), changes)
    for each in here:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(alone), rtol=1e-4, atol=1e-4)


def train_by_own_file(folder: str, name: str) -> None:
    own = {name: f"{folder}/rank-{pool.rank()}.json"}
    planned(folder, None, options=own, max_steps=2).train()


@pytest.mark.parametrize("name", ["plan", "profile"])
def test_a_file_that_one_rank_lacks_ends_all_ranks(three, tmp_path, name):
    for rank in (0, 2):
        document = PLANS[1] if name == "plan" else cluster((3.0, 2.0, 1.0), ["CPU"] * 3)
        document.to_json(tmp_path / f"rank-{rank}.json")
    errors = three.run_expecting_errors(train_by_own_file, str(tmp_path), name)
    assert [error.type for error in errors] == ["RankFailed", "FileNotFoundError", "RankFailed"]
    for rank in (0, 2):
        assert "rank 1: FileNotFoundError" in errors[rank].message


def watch_the_device(folder: str, steps_per_report: int) -> Any:
    """After each step, whether the host has waited for the device; logs, and warnings."""
    gc.collect()  # samplers of earlier tests, which know lengths
    waits: list[int] = []
    by_step: list[bool] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            by_step.append(bool(waits))
            waits.clear()

    given = {"callbacks": [Steps()], "loggers": [JsonLines(f"{folder}/progress.jsonl")]}
    plan = poplar.Plan.manual("1,6,5", stage=2)  # rank 0 sees all lengths
    trainer = planned(folder, plan, given=given, max_steps=6, logging_steps=3)
    with (
        warnings.catch_warnings(record=True) as warned,
        mock.patch.object(Stopwatch, "wait", side_effect=lambda: waits.append(1)),
        mock.patch(f"{PoplarTrainer.__module__}.STEPS_PER_REPORT", steps_per_report),
    ):
        warnings.simplefilter("always")
        trainer.train()
    return by_step, trainer.state.log_history, [str(each.message) for each in warned]


@pytest.mark.parametrize("steps_per_report", [1000, 3])
def test_only_logs_wait_for_the_device_and_have_speeds_and_waits(three, tmp_path, steps_per_report):
    """Also if the monitor reports in the step of a log by itself."""
    alone = alone_trained(tmp_path, max_steps=6, logging_steps=3)
    expected = [entry["loss"] for entry in alone.state.log_history if "loss" in entry]
    here = three.run(watch_the_device, str(tmp_path / "here"), steps_per_report)
    warned = [message for _, _, of_rank in here for message in of_rank]
    assert sum("balance_lengths=True" in m for m in warned) == 1, "sentences have unequal lengths"
    for waits, history, _ in here:
        assert waits == [False, False, False, True, False, False]
        logs = [entry for entry in history if "loss" in entry]
        torch.testing.assert_close([e["loss"] for e in logs], expected, rtol=1e-4, atol=1e-5)
        for entry in logs:
            assert entry["samples_per_second"] > 0
            assert all(entry[f"waiting_percent/rank_{rank}"] >= 0 for rank in range(3))
    lines = (tmp_path / "here" / "progress.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line).get("step") for line in lines] == [None, 3, 6]


@pytest.mark.parametrize("filters", [True, False])
def test_losses_that_are_not_finite_are_logged_as_by_trainer(filters):
    trainer = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cpu")),
        state=SimpleNamespace(global_step=8),
        _globalstep_last_logged=5,
        _tr_loss=torch.tensor(6.0),
        _replaces_nonfinite=filters,
    )
    given = torch.tensor([2.5, math.inf, math.nan], dtype=torch.float64)
    expected = torch.tensor([2.5, 1.5, 1.5]) if filters else given.float()
    logged = PoplarTrainerMixin._logged_loss(trainer, given)
    torch.testing.assert_close(logged, expected, rtol=0, atol=0, equal_nan=True)


def plan_and_train(folder: str, balanced: bool) -> Any:
    """Two steps under a plan that was measured."""
    short = choose(quick={"seconds": 0.3, "stage": "2"}, full={"seconds": 2.0})
    options = {"cache": False, "verify": False, "replan": "auto", "balance_lengths": balanced}
    given = {"train_dataset": Sentences(40)}
    trainer = planned(folder, None, options=short | options, given=given, max_steps=2)
    trainer.train()
    return trainer.plan, trainer.tuned is not None, logged(trainer), trainer.state.log_history


@pytest.mark.parametrize("balanced", choose(quick=[True], full=[False, True]))
def test_without_a_plan_the_ranks_are_measured(three, tmp_path, balanced):
    alone = alone_trained(tmp_path, given={"train_dataset": Sentences(40)}, max_steps=2)
    here = three.run(plan_and_train, str(tmp_path), balanced)
    for plan, measured, losses, history in here:
        assert plan.global_batch == BATCH
        assert measured
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(logged(alone)), rtol=1e-4, atol=1e-5
        )
        assert history[0]["percent_of_sum_of_speeds"] > 0
    record = RunRecord.from_json(tmp_path / RUN_FILE)
    assert record.runs[-1].plan == plan
    assert ("length_distribution" in record.profile.identity) == balanced
    assert len(record.runs[-1].losses) == 1, "without the first step, which prepares kernels"


class ImagesForCausalLM(LlamaForCausalLM):
    """Takes images as rows of patches, as Qwen-VL does."""

    def forward(self, input_ids, attention_mask=None, labels=None, pixel_values=None, **kwargs):
        return super().forward(input_ids, attention_mask, labels=labels, **kwargs)


def with_patches(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Three patches per sample."""
    return padded(samples) | {"pixel_values": torch.ones(3 * len(samples), 4)}


class Labelled(Dataset[dict[str, torch.Tensor]]):
    """Tensors, of which the label has no dimensions."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.tensor(Fixed()[at]["input_ids"]),
            "labels": torch.tensor(at % 2),
        }


def classifier() -> nn.Module:
    config = model_of("llama").config
    config.pad_token_id = 0
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def describer() -> nn.Module:
    torch.manual_seed(0)
    return ImagesForCausalLM(model_of("llama").config)


PATCHES = {"train_dataset": Sentences(40), "data_collator": with_patches}
UNUSUAL: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "labels without dimensions": (classifier, {"train_dataset": Labelled()}, False),
    "patches of images": (describer, PATCHES, True),
}
"""The model, the data, and whether lengths are balanced."""


def train_on_unusual_data(name: str, trainer_class: Any, folder: str, **options: Any) -> Any:
    model, data, _ = UNUSUAL[name]
    sizes = {} if trainer_class is Trainer else SHARES
    trainer = trainer_class(model(), arguments(folder, max_steps=2, **sizes), **data, **options)
    trainer.train()
    return logged(trainer)


def plan_for_unusual_data(name: str, folder: str) -> Any:
    as_launched()
    options = {"seconds": 0.3, "stage": "2", "cache": False, "verify": False}
    options["balance_lengths"] = UNUSUAL[name][2]
    return train_on_unusual_data(name, PoplarTrainer, folder, poplar=PoplarArguments(**options))


@pytest.mark.every_combination
@pytest.mark.parametrize("name", UNUSUAL)
def test_ranks_are_measured_whatever_the_samples_are(three, tmp_path, name):
    fresh_state()
    alone = train_on_unusual_data(name, Trainer, str(tmp_path))
    for each in three.run(plan_for_unusual_data, name, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(each), torch.tensor(alone), rtol=1e-4, atol=1e-5)


def test_the_length_of_a_sample_counts_no_single_values():
    single = {"labels": torch.tensor(1), "weight": np.array(0.5), "number": 3}
    assert _length({"input_ids": torch.ones(7), **single}) == 7
    assert _length(single) == 0


def test_samples_that_cannot_be_counted_say_which_method_to_override():
    boxes = [{"boxes": torch.ones(3, 4)}, {"boxes": torch.ones(1, 4)}]
    inputs = {"pixel_values": torch.ones(2, 3, 8, 8), "labels": boxes}
    with pytest.raises(ValueError, match=r"have \[1, 2, 3\] rows.*override loss_weight\(inputs\)"):
        own_mean_weight(inputs, shifted=False)


def a_saved_model(name: str, folder: str) -> dict[str, torch.Tensor]:
    """Trains and saves at stage 3, with the best of the checkpoints; returns the weights."""
    model = ADAPTED[name](model_of("llama")) if name in ADAPTED else model_of(name)
    # `Trainer` cannot load an adapter that is not of a `PeftModel`.
    best = {"load_best_model_at_end": name != "added adapter"}
    settings = SAVING | {"max_steps": 4} | best
    trainer = planned(folder, PLANS[3], model, given=EVALUATING, **settings)
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    with trainer.optimizer.full_parameters():
        saved = peft.get_peft_model_state_dict(model) if name in ADAPTED else model.state_dict()
        return {key: value.clone() for key, value in saved.items()}


@pytest.mark.every_combination
@pytest.mark.parametrize("name", choose(quick=["bert", *ADAPTED], full=["bert", "gpt2", *ADAPTED]))
def test_tied_weights_and_adapters_are_saved_at_stage_3(three, tmp_path, name):
    expected = three.run(a_saved_model, name, str(tmp_path))[0]
    if name in ADAPTED:
        loaded = model_of("llama")
        torch.manual_seed(2)
        if name == "added adapter":
            loaded.load_adapter(str(tmp_path / "saved"))
        else:
            loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "saved")
        found = peft.get_peft_model_state_dict(loaded)
    else:
        found = type(model_of(name)).from_pretrained(tmp_path / "saved").state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0)


def a_trainer_before_its_first_step(
    folder: str, plan: poplar.Plan, model: Any = None, ddp_timeout: float = 1800, **options: Any
) -> PoplarTrainer:
    """A trainer whose optimizer is built."""
    trainer = planned(folder, plan, model, options=options, ddp_timeout=ddp_timeout)
    trainer.get_train_dataloader()
    trainer.create_optimizer()
    return trainer


def save_slowly(name: str, stage: int, folder: str) -> None:
    """Rank 0 needs longer for its files than the timeout of the ranks."""
    save, timeout = PoplarTrainer._save, timedelta(seconds=2)

    def slow(trainer: Trainer, *args: Any, **options: Any) -> None:
        write_for_a_while(2 * timeout)
        save(trainer, *args, **options)

    model = ADAPTED[name](model_of("llama")) if name in ADAPTED else model_of(name)
    trainer = a_trainer_before_its_first_step(
        folder, PLANS[stage], model, timeout=timeout.total_seconds()
    )
    with mock.patch.object(PoplarTrainer, "_save", slow):
        trainer.save_model()


@pytest.mark.parametrize(("name", "stage"), [("llama", 1), ("llama", 3), ("adapters", 3)])
def test_a_save_waits_as_long_as_rank_0_writes(three, tmp_path, name, stage):
    three.run(save_slowly, name, stage, str(tmp_path))
    assert (tmp_path / "training_args.bin").exists()


def wait_limits(folder: str) -> list[float]:
    """Seconds, by default, by a raised `ddp_timeout`, and by the options of Poplar."""
    found = []
    for options in ({}, {"ddp_timeout": 7200}, {"ddp_timeout": 7200, "timeout": 50.0}):
        trainer = a_trainer_before_its_first_step(folder, PLANS[1], **options)
        found.append(trainer.optimizer.control.group.timeout.total_seconds())
    return found


def test_ranks_wait_as_long_as_the_arguments_say(three, tmp_path):
    assert three.run(wait_limits, str(tmp_path)) == [[300.0, 7200.0, 50.0]] * 3


def mixture() -> MixtralForCausalLM:
    """Its experts have other names and shapes in files of the hub than in memory."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(vocab_size=WORDS, **sizes, **heads))


def a_saved_mixture(stage: int, folder: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Trains and saves; returns the exact weights, and warnings."""
    plan = replace(PLANS[stage], communication=Communication.of("int4", stage))
    trainer = planned(folder, plan, mixture(), max_steps=1)
    trainer.train()
    with mock.patch(f"{PoplarTrainer.__module__}.logger.warning_once") as warning:
        trainer.save_model(f"{folder}/saved")
    with trainer.optimizer.full_parameters():
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return state, [call.args[0] for call in warning.call_args_list]


@pytest.mark.every_combination
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_experts_are_saved_with_the_names_that_the_guide_says(three, tmp_path, stage):
    expected, warned = three.run(a_saved_mixture, stage, str(tmp_path))[0]
    file = tmp_path / "saved" / "model.safetensors"
    of_hub = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    assert (of_hub in load_file(file)) == (stage == 2)
    assert len(warned) == (stage == 3)
    found = MixtralForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    torch.testing.assert_close(dict(found), expected, rtol=0, atol=0)
    if stage == 3:
        converted = MixtralForCausalLM(MixtralConfig.from_pretrained(tmp_path / "saved"))
        converted.load_state_dict(load_file(file))
        converted.save_pretrained(tmp_path / "converted")
        assert of_hub in load_file(tmp_path / "converted" / "model.safetensors")


class PlannedSeq2SeqTrainer(PoplarTrainerMixin, Seq2SeqTrainer):
    """The trainer of encoder-decoder models with the mixin."""


def generate(folder: str) -> Any:
    """Text whose length differs by rank, after one step with sharded parameters."""
    as_launched()
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config)
    settings = arguments(folder, max_steps=1, **SHARES).to_dict()
    names = ("output_dir", "max_steps", *SHARES, "save_strategy", "report_to", "use_cpu")
    trainer = PlannedSeq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            **{name: settings[name] for name in names},
            predict_with_generate=True,
            disable_tqdm=True,
        ),
        data_collator=padded,
        train_dataset=Sentences(12),
        poplar=PoplarArguments(plan=PLANS[3], timeout=30.0),
    )
    trainer.train()

    def stop(words: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(words),), words.shape[1] >= 3 + pool.rank())

    return trainer.predict(Fixed(), max_new_tokens=8, stopping_criteria=[stop]).predictions


def test_ranks_that_generate_wait_for_the_longest_text(three, tmp_path):
    for predictions in three.run(generate, str(tmp_path)):
        assert len(predictions) >= len(Fixed())  # the last batch is filled up


def resume_a_stream(plan: poplar.Plan, folder: str) -> Any:
    """Five steps, and the last two again after a checkpoint, with a loss scale and two plans."""
    outcomes = []
    saving = {"save_strategy": "steps", "save_steps": 3}
    for checkpoint in (None, f"{folder}/checkpoint-3"):
        given = {"train_dataset": Stream(), "callbacks": [ChangesPlan()]}
        trainer = planned(folder, plan, given=given, max_steps=5, **saving)
        trainer._scaler = poplar.GradScaler("cpu", init_scale=64.0)  # as with fp16=True
        trainer.train(resume_from_checkpoint=checkpoint)
        outcomes.append((logged(trainer), trainer._scaler.state_dict()))
    return outcomes


def test_a_stream_and_a_loss_scale_go_on_where_they_were(three, tmp_path):
    alone = alone_trained(tmp_path, given={"train_dataset": Stream()}, max_steps=5)
    for first, again in three.run(resume_a_stream, PLANS[2], str(tmp_path / "here")):
        assert again == first
        torch.testing.assert_close(
            torch.tensor(first[0]), torch.tensor(logged(alone)), rtol=1e-4, atol=1e-5
        )


RESUMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "all parameters": (lambda model: model, {}),
    # The second param group, of what does not decay, has no parameters.
    "adapters": (with_adapters, {}),
    "8-bit optimizer": (with_many_words, {"optim": "adamw_8bit"}),
}


def resume_from_trainer(name: str, plan: poplar.Plan, folder: str) -> Any:
    model, changes = RESUMED[name]
    trainer = planned(folder, plan, model(model_of("llama")), max_steps=6, **changes)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return logged(trainer)


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("name", "stage"),
    [("all parameters", 1), ("all parameters", 3), ("adapters", 2), ("8-bit optimizer", 3)],
)
def test_goes_on_from_a_checkpoint_of_trainer(three, tmp_path, name, stage):
    model, changes = RESUMED[name]
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    alone = alone_trained(tmp_path, model(model_of("llama")), **saving, **changes)
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
    for each in three.run(resume_from_trainer, name, PLANS[stage], str(tmp_path)):
        torch.testing.assert_close(
            torch.tensor(each), torch.tensor(logged(alone)), rtol=1e-4, atol=1e-5
        )


def load_slowly(folder: str) -> None:
    """Rank 0 needs longer for its files than the timeout of the ranks."""
    load, timeout = trainer_module._loaded, timedelta(seconds=2)

    def slow(path: Path) -> Any:
        if pool.rank() == 0:
            write_for_a_while(timeout)
        return load(path)

    trainer = a_trainer_before_its_first_step(folder, PLANS[1], timeout=timeout.total_seconds())
    trainer.create_scheduler(6)
    with mock.patch.object(trainer_module, "_loaded", slow):
        trainer._load_optimizer_and_scheduler(f"{folder}/checkpoint-1")
    assert trainer.lr_scheduler.last_epoch == 1, "as saved"


def test_reading_a_checkpoint_of_trainer_waits_for_the_slowest_rank(three, tmp_path):
    alone_trained(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    three.run(load_slowly, str(tmp_path))


def resume_with_other_adapters(folder: str) -> None:
    options = {"r": 4, "target_modules": ["q_proj"]}
    model = peft.get_peft_model(model_of("llama"), peft.LoraConfig(**options))
    trainer = planned(folder, PLANS[1], model, max_steps=6)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")


def test_a_checkpoint_of_trainer_with_other_parameters_is_refused(three, tmp_path):
    saving = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    alone_trained(tmp_path, with_adapters(model_of("llama")), **saving)
    for error in three.run_expecting_errors(resume_with_other_adapters, str(tmp_path)):
        assert "has param groups of [8, 0] parameters, but here they are of [4, 0]" in error.message


def train_with_the_arguments_of_another(folder: str) -> Any:
    """The settings of a trainer, of one with its arguments, and of one with those that it saved."""
    as_launched()
    given, found = arguments(folder, max_steps=1, **SHARES), []
    for _ in range(3):
        trainer = PoplarTrainer(
            model_of("llama"),
            given,
            data_collator=padded,
            train_dataset=Sentences(12),
            poplar=PoplarArguments(plan=PLANS[1]),
        )
        found.append((trainer.args.to_dict(), trainer._global_batch(), trainer._replaces_nonfinite))
        path = Path(folder) / f"arguments-{pool.rank()}.bin"
        torch.save(trainer.args, path)
        given = torch.load(path, weights_only=False) if len(found) == 2 else trainer.args
    return found


def test_arguments_of_another_trainer_keep_their_meaning(three, tmp_path):
    for first, *others in three.run(train_with_the_arguments_of_another, str(tmp_path)):
        assert others == [first, first]
        assert first[1:] == (BATCH, True)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto_find_batch_size=True: leave it out": ({"auto_find_batch_size": True}, {}),
    "optim='lomo': use one of adagrad, adamw_torch": ({"optim": "lomo"}, {}),
    "ddp_bucket_cap_mb=": ({"ddp_bucket_cap_mb": 25}, {}),
    "average_tokens_across_devices=False": ({"average_tokens_across_devices": False}, {}),
    "bf16_full_eval": ({"bf16_full_eval": True}, {}),
    "dataloader_in_order=False": ({"dataloader_in_order": False}, {}),
    "dispatch_batches=True": ({"accelerator_config": {"dispatch_batches": True}}, {}),
    "train_sampling_strategy='batch_rebalance'": (
        {**SHARES, "train_sampling_strategy": "batch_rebalance"},
        {},
    ),
    "optimizers=": (
        {},
        {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None)},
    ),
    "pass drop_last=True": ({**SHARES, "num_train_epochs": 1, "max_steps": -1}, {}),
}


def refusals(folder: str) -> list[str]:
    """The messages of this rank, in the order of `REFUSED`."""
    messages = []
    for settings, given in REFUSED.values():
        as_launched()
        own = {"train_dataset": Sentences(13), "poplar": PoplarArguments(plan=PLANS[1])} | given
        with pool.catching() as caught:
            built(PoplarTrainer, folder, given=own, **settings).train()
        messages += [failure.message for failure in caught]
    return messages


def test_what_is_not_supported_says_what_to_change(three, tmp_path):
    for messages in three.run(refusals, str(tmp_path)):
        for expected, message in zip(REFUSED, messages, strict=True):
            assert expected in message


class MeanOverSamples:
    """A loss that is the mean of the samples' mean losses, whatever their numbers of labels."""

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
        return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()

    def loss_weight(self, inputs: Any) -> float:
        return float(len(inputs["labels"]))


class PlannedMeanOverSamples(MeanOverSamples, PoplarTrainer):
    pass


class AloneMeanOverSamples(MeanOverSamples, Trainer):
    pass


def train_on_samples(folder: str) -> Any:
    trainer = planned(folder, PLANS[1], trainer_class=PlannedMeanOverSamples, max_steps=4)
    trainer.train()
    return logged(trainer)


def test_loss_weight_of_the_user_replaces_the_items_that_the_trainer_counts(three, tmp_path):
    here = three.run(train_on_samples, str(tmp_path))
    alone = logged(alone_trained(tmp_path, trainer_class=AloneMeanOverSamples, max_steps=4))
    for each in here:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(alone), rtol=1e-4, atol=1e-5)


class LossOfPairs:
    """Of batches that are pairs of tensors, as torch's collate function makes them."""

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        values, targets = inputs
        return (model(values) - targets).square().mean()


class PlannedLossOfPairs(LossOfPairs, PoplarTrainer):
    pass


class AloneLossOfPairs(LossOfPairs, Trainer):
    pass


def of_pairs() -> dict[str, Any]:
    torch.manual_seed(0)
    given = {
        "train_dataset": TensorDataset(torch.randn(60, 4), torch.randn(60, 1)),
        "data_collator": default_collate,
    }
    return {"model": nn.Linear(4, 1), "given": given, "max_steps": 4}


def train_on_pairs(folder: str) -> Any:
    trainer = planned(folder, PLANS[0], trainer_class=PlannedLossOfPairs, **of_pairs())
    trainer.train()
    return logged(trainer), trainer.state.total_flos


def test_batches_may_be_pairs_of_tensors(three, tmp_path):
    alone = alone_trained(tmp_path, trainer_class=AloneLossOfPairs, **of_pairs())
    for losses, operations in three.run(train_on_pairs, str(tmp_path)):
        torch.testing.assert_close(losses, logged(alone), rtol=1e-4, atol=1e-5)
        assert operations == alone.state.total_flos


class GathersInLoss(PoplarTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.accelerator.gather(super().compute_loss(*args, **kwargs)).mean()


def gather_in_loss(folder: str) -> None:
    planned(folder, PLANS[0], trainer_class=GathersInLoss).train()


def test_a_loss_that_communicates_is_refused(three, tmp_path):
    for error in three.run_expecting_errors(gather_in_loss, str(tmp_path)):
        assert "compute_loss communicates" in error.message


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


class PlannedOwnStep(PoplarTrainerMixin, OwnStep):
    pass


def with_own_step(folder: str) -> None:
    as_launched()
    PlannedOwnStep(model_of("llama"), arguments(folder), train_dataset=Sentences(12))


def test_a_method_that_the_mixin_would_replace_is_refused(three, tmp_path):
    for error in three.run_expecting_errors(with_own_step, str(tmp_path)):
        assert "OwnStep.training_step, which it would replace" in error.message


LENGTHS = [len(sample["input_ids"]) for sample in Sentences(240).samples]


def orders(strategy: str, balanced: bool = False, column: str = "") -> list[list[int]]:
    """The samples of this rank's batches in the second epoch."""
    data: Any = Sentences(240)
    if column:
        data = datasets.Dataset.from_list(data.samples).add_column(column, LENGTHS[::-1])
    settings = {"train_sampling_strategy": strategy, "seed": 3}
    settings |= {"length_column_name": column} if column else {}
    options, given = {"balance_lengths": balanced}, {"train_dataset": data}
    trainer = planned("unused", PLANS[0], options=options, given=given, **settings)
    loader = trainer.get_train_dataloader()
    loader.set_epoch(1)
    return list(loader.batch_sampler)


def test_batches_grouped_by_length_have_samples_of_similar_lengths(three):
    def spread(by_rank: list[list[list[int]]]) -> int:
        batches = [list(chain(*parts)) for parts in zip(*by_rank, strict=True)]
        assert sorted(chain(*batches)) == list(range(len(LENGTHS)))
        return sum(max(LENGTHS[i] for i in b) - min(LENGTHS[i] for i in b) for b in batches)

    grouped, shuffled = (three.run(orders, name) for name in ("group_by_length", "random"))
    assert spread(grouped) < spread(shuffled)


@pytest.mark.parametrize("column", ["", "tokens"])
def test_global_batches_are_divided_by_the_lengths_of_the_column_or_of_the_samples(three, column):
    lengths = LENGTHS[::-1] if column else LENGTHS
    shuffled = three.run(orders, "random")
    balanced = three.run(orders, "random", balanced=True, column=column)
    for parts, plain in zip(zip(*balanced, strict=True), zip(*shuffled, strict=True), strict=True):
        batch = list(chain(*plain))
        dealt = deal(PLANS[0], [lengths[at] for at in batch])
        assert list(parts) == [[batch[place] for place in places] for places in dealt]


def group_a_stream(folder: str) -> None:
    options, given = {"balance_lengths": True}, {"train_dataset": Stream()}
    planned(folder, PLANS[0], options=options, given=given, max_steps=2).train()


def test_lengths_of_a_stream_are_refused(three, tmp_path):
    for error in three.run_expecting_errors(group_a_stream, str(tmp_path)):
        assert "balance_lengths and" in error.message
        assert "pass a dataset with __len__" in error.message


def test_options_can_be_parsed_beside_training_arguments():
    parser = HfArgumentParser((TrainingArguments, PoplarArguments))
    words = ["--output_dir", "x", "--stage", "2", "--plan", "p.json", "--memory_limit", "2GiB"]
    _, options = parser.parse_args_into_dataclasses([*words, "--seconds", "5", "--no_cache"])
    assert options == PoplarArguments(
        stage="2", plan="p.json", memory_limit="2GiB", seconds=5.0, cache=False
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage must be one of auto, 0, 1, 2, 3, got '4'"),
        ({"compute_dtype": "int8"}, "compute_dtype must be"),
        ({"reduce_dtype": "int8"}, "reduce_dtype must be"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"replan": "always"}, "replan must be one of off, advise, auto"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PoplarArguments(**options)


def test_a_plan_as_text_needs_a_stage_and_a_multiple():
    plan, _ = PoplarArguments(plan="4,2,1", stage="2").given(14, 3)
    assert plan == poplar.Plan.manual("4,2,1", stage=2, passes=2)
    with pytest.raises(ValueError, match="names no stage"):
        PoplarArguments(plan="4,2,1").given(14, 3)
    with pytest.raises(ValueError, match="is not a multiple"):
        PoplarArguments(plan="4,2,1", stage="1").given(12, 3)


def test_a_plan_must_be_of_the_global_batch_stage_and_ranks():
    plan = poplar.Plan.manual("4,2,1", stage=2, passes=2)
    assert PoplarArguments(plan=plan).given(14, 3) == (plan, None)
    with pytest.raises(ValueError, match="has a global batch of 14"):
        PoplarArguments(plan=plan).given(12, 3)
    with pytest.raises(ValueError, match="leave out stage="):
        PoplarArguments(plan=plan, stage="1").given(14, 3)
    with pytest.raises(ValueError, match="pass profile=, too"):
        PoplarArguments(plan=plan, replan="auto").given(14, 3)
    planning = {"communication": "int8", "memory_limit": "1GiB", "max_batch": 2}
    planning |= {"seconds": 30.0, "cache": False, "verify": False}
    for name, value in planning.items():
        with pytest.raises(ValueError, match=rf"{name}=.* is for planning"):
            PoplarArguments(plan=plan, **{name: value}).given(14, 3)
    with pytest.raises(ValueError, match="is for 3 ranks, but there are 2"):
        PoplarArguments(plan=plan).given(14, 2)

"""`PoplarTrainer` on three unequal ranks trains as `Trainer` does on one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks as pool
import torch
from ranks import Pool
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import poplar

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from poplar.integrations.transformers import PoplarArguments, PoplarTrainer  # noqa: E402

RANKS, BATCH, WORDS = 3, 12, 50
SHARES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
"""The batch of one process, for three ranks."""
PLANS = {
    # The ranks differ in samples, passes and shares; the last one has fewest.
    0: poplar.Plan(
        stage=0, global_batch=BATCH, micro_batches=((6,), (2, 3), (1,)), shares=(1 / 3,) * 3
    ),
    1: poplar.Plan(
        stage=1, global_batch=BATCH, micro_batches=((4, 4), (4,), ()), shares=(0.5, 0.3, 0.2)
    ),
    2: poplar.Plan(
        stage=2, global_batch=BATCH, micro_batches=((3, 4), (1, 3), (0, 1)), shares=(0.5, 0.3, 0.2)
    ),
    3: poplar.Plan(
        stage=3, global_batch=BATCH, micro_batches=((3, 4), (1, 3), (0, 1)), shares=(0.6, 0.4, 0.0)
    ),
}


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    """Three ranks; Accelerate knows only the world's group, so the common pool will not do."""
    workers = Pool(RANKS, forked=True)
    yield workers
    workers.close()


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    small = {"vocab_size": WORDS, "max_position_embeddings": 32}
    if name == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes, **small))
    if name == "bert":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForMaskedLM(BertConfig(num_attention_heads=2, **options, **sizes, **small))
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=32, **dropouts)
    )


class Sentences(Dataset[dict[str, list[int]]]):
    """Sequences of unequal lengths; some samples have few labels, and one has none."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.samples = []
        for number in range(count):
            length = int(torch.randint(4, 17, (1,), generator=generator))
            words = torch.randint(3, WORDS, (length,), generator=generator).tolist()
            hidden = torch.rand(length, generator=generator).tolist()
            labels = [w if h < 0.4 and number else -100 for w, h in zip(words, hidden, strict=True)]
            self.samples.append({"input_ids": words, "labels": labels})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> dict[str, list[int]]:
        return self.samples[at]


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([s[name] + [fill] * (longest - len(s[name])) for s in samples])

    ones = [{"mask": [1] * len(s["input_ids"])} for s in samples]
    mask = torch.tensor([o["mask"] + [0] * (longest - len(o["mask"])) for o in ones])
    return {
        "input_ids": rows("input_ids", 0),
        "labels": rows("labels", -100),
        "attention_mask": mask,
    }


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**(options | changes))


def as_launched() -> None:
    """What a launcher sets, and a state of Accelerate without the settings of earlier calls."""
    os.environ |= {
        "RANK": str(pool.rank()),
        "LOCAL_RANK": str(pool.rank()),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "ACCELERATE_USE_CPU": "true",
    }
    fresh_state()


def fresh_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def logged(trainer: Trainer) -> list[tuple[float, float, float]]:
    return [
        (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]


class Stream(IterableDataset[dict[str, list[int]]]):
    """The same sentences without a length."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(Sentences(60).samples)


class MeanOfWeights(transformers.TrainerCallback):
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


def with_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


FEATURES: dict[str, dict[str, Any]] = {
    "label smoothing": {"args": {"label_smoothing_factor": 0.1}},
    "loss function": {"trainer": {"compute_loss_func": square_loss}},
    "adapters": {"model": with_adapters},
    "recomputed activations": {"args": {"gradient_checkpointing": True}},
    "autocast": {"args": {"bf16": True}, "rtol": 2e-2},
    "compiled": {"args": {"torch_compile": True, "torch_compile_backend": "aot_eager"}},
    "mean of weights": {"trainer": {"callbacks": [MeanOfWeights]}},
    "stream": {"trainer": {"train_dataset": Stream()}},
    "in the order of the dataset": {"args": {"train_sampling_strategy": "sequential"}},
    "token counts": {"args": {"include_num_input_tokens_seen": "non_padding"}},
    "plain SGD": {"args": {"optim": "sgd", "max_grad_norm": 0.0}},
    "wide tail": {"args": {"num_train_epochs": 2, "max_steps": -1}, "samples": 55},
}


def trained(trainer_class: Any, feature: str, folder: str, sizes: dict[str, int], **options: Any):
    """What was logged, and what is special of the feature."""
    wanted = FEATURES[feature]
    own = {"train_dataset": Sentences(wanted.get("samples", 60))} | wanted.get("trainer", {})
    callbacks = [callback() for callback in own.pop("callbacks", ())]
    trainer = trainer_class(
        wanted.get("model", lambda model: model)(model_of("llama")),
        arguments(folder, **({"max_steps": 6} | wanted.get("args", {}) | sizes)),
        data_collator=padded,
        callbacks=callbacks,
        **own,
        **options,
    )
    trainer.train()
    counts = (trainer.state.num_input_tokens_seen, trainer.state.total_flos)
    return logged(trainer), [callback.mean for callback in callbacks], counts


def train_with_feature(feature: str, plan: poplar.Plan, folder: str) -> Any:
    as_launched()
    torch._dynamo.reset()
    return trained(PoplarTrainer, feature, folder, SHARES, poplar=PoplarArguments(plan=plan))


def train_on_ranks(name: str, plan: poplar.Plan, folder: str, changes: dict[str, Any]) -> Any:
    as_launched()
    trainer = PoplarTrainer(
        model_of(name),
        arguments(folder, **(SHARES | changes)),
        data_collator=padded,
        train_dataset=Sentences(60),
        poplar=PoplarArguments(plan=plan),
    )
    trainer.train()
    return logged(trainer)


def train_alone(name: str, folder: Path, **changes: Any) -> Any:
    fresh_state()
    trainer = Trainer(
        model_of(name),
        arguments(folder, **changes),
        data_collator=padded,
        train_dataset=Sentences(60),
    )
    trainer.train()
    return logged(trainer)


@pytest.mark.parametrize("stage", PLANS)
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_losses_equal_those_of_one_process(three, tmp_path, name, stage):
    here = three.run(train_on_ranks, name, PLANS[stage], str(tmp_path), {}, timeout=120)
    alone = train_alone(name, tmp_path)
    assert len(alone) == 20
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
    "save_steps": 2,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "margin",
    "lr_scheduler_type": "cosine",
}


def evaluated(trainer: Trainer) -> list[tuple[float, float]]:
    history = trainer.state.log_history
    return [(entry["eval_loss"], entry["eval_margin"]) for entry in history if "eval_loss" in entry]


def save_and_resume(plan: poplar.Plan, folder: str) -> Any:
    """Train six steps; again from the second, in mid-epoch. Returns what came of it."""
    as_launched()

    def trainer() -> PoplarTrainer:
        return PoplarTrainer(
            model_of("llama"),
            arguments(folder, **(SAVING | SHARES)),
            data_collator=padded,
            train_dataset=Sentences(30),
            eval_dataset=Fixed(),
            compute_metrics=metrics_of,
            poplar=PoplarArguments(plan=plan),
        )

    first = trainer()
    first.train()
    kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    predictions = again.predict(Fixed())
    again.save_model(f"{folder}/saved")
    return {
        "first": logged(first),
        "again": logged(again),
        "evaluated": (evaluated(first), evaluated(again)),
        "kept": kept,
        "best": first.state.best_model_checkpoint,
        "predictions": predictions.predictions,
        "epochs": (first.state.epoch, again.state.epoch),
        "step": again.state.global_step,
    }


@pytest.mark.parametrize("stage", PLANS)
def test_stop_resume_evaluate_predict_save_load(three, tmp_path, stage):
    fresh_state()
    alone = Trainer(
        model_of("llama"),
        arguments(tmp_path / "alone", **SAVING),
        data_collator=padded,
        train_dataset=Sentences(30),
        eval_dataset=Fixed(),
        compute_metrics=metrics_of,
    )
    alone.train()
    expected = alone.predict(Fixed()).predictions

    here = three.run(save_and_resume, PLANS[stage], str(tmp_path / "here"), timeout=180)[0]

    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(here["first"]), torch.tensor(logged(alone)), **close)
    assert here["again"] == here["first"], "the log before the resume, then the same bits"
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
@pytest.mark.parametrize("feature", FEATURES)
def test_features_train_with_equal_losses(three, tmp_path, feature, stage):
    here = three.run(train_with_feature, feature, PLANS[stage], str(tmp_path), timeout=120)
    fresh_state()
    torch._dynamo.reset()
    alone = trained(Trainer, feature, str(tmp_path), {})
    close = {"rtol": FEATURES[feature].get("rtol", 1e-4), "atol": 1e-5}
    assert alone[0]
    for losses, means, counts in here:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone[0]), **close)
        torch.testing.assert_close(means, alone[1], **close)
        assert counts[0] == alone[2][0]

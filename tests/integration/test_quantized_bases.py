"""Adapters on a quantised base train on unequal ranks as in one process, in every integration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lightning.pytorch as pl
import peft
import pytest
import quantized
import ranks as pool
import torch
import trl
from accelerate import Accelerator
from launched import as_launched, three_ranks
from quantized import (
    BATCH,
    OPTIONS,
    STEPS,
    adapted,
    base_of,
    collated,
    loss_fn,
    samples,
    trained_values,
)
from ranks import Pool
from safetensors.torch import load_file
from subset import choose
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader
from trainers import arguments
from transformers import PreTrainedTokenizerFast

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.integrations.accelerate import prepare
from poplar.integrations.lightning import PoplarStrategy, checkpoints, to_lightning_checkpoint
from poplar.integrations.transformers import PoplarArguments, PoplarTrainer, PoplarTrainerMixin
from poplar.zero.opaque_parameter import component_tensors

SHARES, OTHER_SHARES = (0.6, 0.3, 0.1), (0.2, 0.0, 0.8)
Result = tuple[list[float], dict[str, Tensor]]
"""Losses and adapters."""


def imported() -> None:
    """Called first, with a deadline for importing the libraries."""


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    for workers in three_ranks():
        workers.run(imported, timeout=300)
        yield workers


def plan_of(stage: int, shares: tuple[float, ...] = SHARES) -> Plan:
    """The last rank has no samples."""
    micro_batches = ((3, 4), (2, 3), (0, 0))
    return Plan(stage=stage, global_batch=BATCH, micro_batches=micro_batches, shares=shares)


def whole(model: Any, optimizer: HeteroZeroOptimizer) -> dict[str, Tensor]:
    with optimizer.full_parameters():
        return trained_values(model)


def by_optimizer(kind: str, stage: int, folder: str, shares: Any = SHARES) -> Result:
    model, plan = adapted(kind), plan_of(stage, shares)
    optimizer = optimizer_of(model, plan)
    optimizer.evaluate(loss_fn, [collated(samples()[:2])])  # changes no weight
    losses = [float(optimizer.train_step(loss_fn, b).loss) for b in batches_of(plan, STEPS)]
    return losses, whole(model, optimizer)


SETTINGS = {
    "max_steps": STEPS,
    "learning_rate": OPTIONS["lr"],
    "adam_epsilon": OPTIONS["eps"],
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}


def logged(trainer: Any) -> Result:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, whole(trainer.model, trainer.optimizer)


def by_trainer(kind: str, stage: int, folder: str) -> Result:
    as_launched()
    return logged(
        PoplarTrainer(
            adapted(kind),
            arguments(folder, **SETTINGS),
            data_collator=collated,
            train_dataset=samples(),
            poplar=PoplarArguments(plan=plan_of(stage)),
        )
    )


class PlannedSFTTrainer(PoplarTrainerMixin, trl.SFTTrainer):
    """TRL's trainer with the mixin."""


def by_sft_trainer(kind: str, stage: int, folder: str) -> Result:
    as_launched()
    words = Tokenizer(models.WordLevel({str(w): w for w in range(50)}, unk_token="0"))
    tokens = {"pad_token": "0", "eos_token": "1", "unk_token": "0"}
    same = ("output_dir", "max_steps", "logging_steps", "save_strategy", "report_to", "use_cpu")
    given = arguments(folder).to_dict()
    options = {name: given[name] for name in (*same, "disable_tqdm")} | SETTINGS
    return logged(
        PlannedSFTTrainer(
            adapted(kind),
            trl.SFTConfig(**options, bf16=False, max_length=None, gradient_checkpointing=False),
            train_dataset=datasets.Dataset.from_list(samples()),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **tokens),
            poplar=PoplarArguments(plan=plan_of(stage)),
        )
    )


def by_accelerate(kind: str, stage: int, folder: str) -> Result:
    as_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(samples(), batch_size=2, collate_fn=collated)
    model, optimizer, loader, _ = prepare(
        accelerator,
        adapted(kind),
        torch.optim.AdamW,
        loader,
        loss_fn=loss_fn,
        plan=plan_of(stage),
        **OPTIONS,
    )
    losses = []
    for batch in loader:
        total = torch.zeros(())
        for micro_batch in optimizer.micro_batches(batch):
            loss = loss_fn(model, micro_batch)
            accelerator.backward(loss)
            total += loss.detach() * len(micro_batch["labels"]) / BATCH
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total)))
    return losses, whole(accelerator.unwrap_model(model), optimizer)


class Adapted(pl.LightningModule):
    def __init__(self, kind: str):
        super().__init__()
        self.model = adapted(kind)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_fn(self.model, batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", loss_fn(self.model, batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], **OPTIONS)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def lightning_trainer(stage: int, folder: str, **options: Any) -> pl.Trainer:
    with mock.patch.dict(os.environ, LOCAL_RANK=str(pool.rank())):
        return pl.Trainer(
            **QUIET,
            default_root_dir=folder,
            accumulate_grad_batches=2,
            strategy=PoplarStrategy(plan=plan_of(stage), weight=poplar.tokens()),
            devices=pool.size(),
            **options,
        )


def lightning_loader() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=2, collate_fn=collated)


def by_lightning(kind: str, stage: int, folder: str) -> Result:
    module, run = Adapted(kind), lightning_trainer(stage, folder, max_steps=STEPS)
    with mock.patch.dict(os.environ, LOCAL_RANK=str(pool.rank())):
        run.fit(module, lightning_loader())
    return module.losses, whole(module.model, run.strategy.optimizer)


INTEGRATIONS = (by_optimizer, by_trainer, by_sft_trainer, by_accelerate, by_lightning)
QUICK = [
    (integration, "4-bit" if number % 2 else "int8", (number + 2) % 4)
    for number, integration in enumerate(INTEGRATIONS)
]
FULL = [(i, kind, stage) for i in INTEGRATIONS for kind in quantized.BASES for stage in range(4)]


@pytest.mark.every_combination
@pytest.mark.parametrize(("train", "kind", "stage"), choose(quick=QUICK, full=FULL))
def test_losses_and_adapters_equal_those_of_one_process(
    three: Pool, tmp_path: Path, train: Callable[..., Result], kind: str, stage: int
) -> None:
    losses, adapters = quantized.one_process(kind)
    for found, values in three.run(train, kind, stage, str(tmp_path)):
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-4)
        if kind == "4-bit" and train is by_sft_trainer:
            continue  # TRL rounds adapters on layers of bitsandbytes to bf16
        names = {name.removeprefix("module."): value for name, value in values.items()}
        torch.testing.assert_close(names, adapters, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", quantized.BASES)
@pytest.mark.parametrize("stage", range(1, 4))
def test_adapters_have_the_same_bits_under_other_shares(three, tmp_path, kind, stage) -> None:
    first = three.run(by_optimizer, kind, stage, str(tmp_path))[0]
    second = three.run(by_optimizer, kind, stage, str(tmp_path), OTHER_SHARES)[0]
    assert first[0] == second[0]
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)


def profiled(kind: str, stages: tuple[int, ...]) -> tuple[bool, float, float, str]:
    """Whether the base kept its bits and its bytes were counted, the loss of a step of a plan that
    was found, and the identity of the model.
    """
    model = adapted(kind)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    parts = [component_tensors(p) for p in frozen]
    before = [part.clone() for inside in parts for part in inside]
    batch = collated(samples()[:BATCH])
    options: dict[str, Any] = {"process_group": pool.group(), "cache": False, "progress": False}
    options |= {"seconds": 0.3, "max_batch": choose(quick=1, full=2), "stages": stages}
    cluster = poplar.profile_cluster(model, loss_fn, batch, **options)
    after = [part for p in frozen for part in component_tensors(p)]
    unchanged = all(map(torch.equal, before, after))
    # Small tables of quantised parameters stay on every rank.
    cut = (p.nbytes for inside in parts for p in inside if len(inside) == 1 or p.nbytes > 1024)
    counted = sum(cluster.model.unit_frozen_bytes) / sum(cut)
    plan = poplar.search(cluster, global_batch=BATCH, stages=(3,))
    (first,) = batches_of(plan, 1)
    loss = float(optimizer_of(model, plan).train_step(loss_fn, first).loss)
    return unchanged, counted, loss, cluster.identity["model"]


def test_profiling_counts_the_bytes_of_a_base_and_leaves_it_unchanged(three: Pool) -> None:
    identities = set()
    all_stages, count = choose(quick=((3,), 2), full=((0, 1, 2, 3), 3))
    for kind, stages in (("4-bit", all_stages), ("int8", (1,))):
        for unchanged, counted, loss, identity in three.run(profiled, kind, stages, ranks=count):
            assert unchanged
            assert counted == pytest.approx(1.0, rel=0.05)
            assert loss == pytest.approx(quantized.one_process(kind)[0][0], rel=1e-4)
            identities.add(identity)
    assert len(identities) == len(quantized.BASES)


def optimizer_of(model: Any, plan: Plan) -> HeteroZeroOptimizer:
    given = {"plan": plan, "process_group": pool.group()}
    return HeteroZeroOptimizer(model, torch.optim.AdamW, **given, **OPTIONS)


def batches_of(plan: Plan, steps: int) -> list[dict[str, Tensor]]:
    sampler = poplar.HeteroBatchSampler(steps * BATCH, plan, shuffle=False, rank=pool.rank())
    return list(DataLoader(samples(), batch_sampler=sampler, collate_fn=collated))


def saved_and_loaded(kind: str, stage: int, folder: str) -> tuple[list[float], str]:
    """The loss of a step after a save, and of the same step after a load at another stage; and the
    error of a load on another base.
    """
    plan, other = plan_of(stage), plan_of((stage + 2) % 4, OTHER_SHARES)
    optimizer = optimizer_of(adapted(kind), plan)
    *batches, last = batches_of(plan, 3)
    for batch in batches:
        optimizer.train_step(loss_fn, batch)
    poplar.save_checkpoint(f"{folder}/state", optimizer)
    optimizer.save_model(f"{folder}/adapters.safetensors")
    if kind == "4-bit":
        optimizer.save_model(f"{folder}/whole.safetensors", frozen=True)
    losses = [float(optimizer.train_step(loss_fn, last).loss)]
    again = optimizer_of(adapted(kind), other)
    poplar.load_checkpoint(f"{folder}/state", again)
    losses.append(float(again.train_step(loss_fn, last).loss))
    unlike = optimizer_of(adapted("int8" if kind == "4-bit" else "4-bit"), plan)
    with pool.catching() as errors:
        poplar.load_checkpoint(f"{folder}/state", unlike)
    return losses, errors[0].message


SAVED = [(kind, stage) for kind in quantized.BASES for stage in range(4)]


@pytest.mark.every_combination
@pytest.mark.parametrize(("kind", "stage"), choose(quick=[("4-bit", 3), ("int8", 1)], full=SAVED))
def test_adapters_are_saved_alone_and_load_on_the_same_base(three, tmp_path, kind, stage) -> None:
    for (first, again), error in three.run(saved_and_loaded, kind, stage, str(tmp_path)):
        assert again == pytest.approx(first, rel=1e-5)
        assert "adapters of another base" in error
    model = adapted(kind)
    adapters = load_file(tmp_path / "adapters.safetensors")
    assert adapters.keys() == trained_values(model).keys()
    stored = FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata
    of_model = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    assert of_model == adapters.keys()
    model.load_state_dict(adapters, strict=False)
    if kind == "4-bit":
        torch.testing.assert_close(
            load_file(tmp_path / "whole.safetensors"), dict(model.state_dict()), rtol=0, atol=0
        )


def losses_after_a_load(stage: int, folder: str) -> tuple[float, float, float]:
    """The loss of a trained model; of the same after more steps; and after a load."""
    module, loader = Adapted("int8"), lightning_loader()
    run = lightning_trainer(stage, folder, max_steps=2)
    with mock.patch.dict(os.environ, LOCAL_RANK=str(pool.rank())):
        run.fit(module, loader)
        run.save_checkpoint(f"{folder}/saved")
        (trained,) = run.test(module, loader, verbose=False)
        run.fit_loop.epoch_loop.max_steps = 4
        run.fit(module, loader)
        (later,) = run.test(module, loader, verbose=False)
        (loaded,) = run.test(module, loader, f"{folder}/saved", verbose=False)
    return trained["loss"], later["loss"], loaded["loss"]


@pytest.mark.parametrize("stage", choose(quick=(3,), full=range(4)))
def test_lightning_loads_adapters_that_were_saved_alone(three: Pool, tmp_path, stage) -> None:
    for trained, later, loaded in three.run(losses_after_a_load, stage, str(tmp_path)):
        assert later != pytest.approx(trained, rel=1e-4)
        assert loaded == pytest.approx(trained, rel=1e-5)

    to_lightning_checkpoint(tmp_path / "saved", tmp_path / "file")
    module = Adapted.load_from_checkpoint(tmp_path / "file", strict=False, kind="int8")
    (found,) = pl.Trainer(**QUIET, devices=1).test(module, lightning_loader(), verbose=False)
    assert found["loss"] == pytest.approx(trained, rel=1e-5)

    read = checkpoints.read_folder(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved has adapters of another base"):
        checkpoints.load_adapters(Adapted("4-bit"), read, "saved")
    name, _ = read["state_dict"].popitem()
    with pytest.raises(ValueError, match=f"saved is of another model: it lacks '{name}' and has"):
        checkpoints.load_adapters(Adapted("int8"), read, "saved")


def with_frozen_adapters(seed: int) -> Any:
    """LoRA whose `lora_A` stays random (LoRA-FA), and an adapter that is not active."""
    model = adapted("4-bit")
    torch.manual_seed(seed)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.normal_(parameter)
            parameter.requires_grad_(False)
    return model


def frozen_adapters_after_a_load(stage: int, folder: str) -> tuple[Any, Any]:
    """The values of adapters when saved, and in a model of another seed that has loaded them."""
    plan, other = plan_of(stage), plan_of((stage + 2) % 4, OTHER_SHARES)
    found = []
    for seed, own in ((1, plan), (2, other)):
        model = with_frozen_adapters(seed)
        optimizer = optimizer_of(model, own)
        if seed == 1:
            optimizer.train_step(loss_fn, batches_of(plan, 1)[0])
            poplar.save_checkpoint(f"{folder}/state", optimizer)
            optimizer.save_model(f"{folder}/adapters.safetensors")
        else:
            poplar.load_checkpoint(f"{folder}/state", optimizer)
        with optimizer.full_parameters():
            named = model.state_dict().items()
            found.append({name: value.clone() for name, value in named if "lora_" in name})
    return found[0], found[1]


@pytest.mark.every_combination
@pytest.mark.parametrize("stage", choose(quick=[1, 3], full=[0, 1, 2, 3]))
def test_frozen_values_of_adapters_are_saved_with_them(three, tmp_path, stage) -> None:
    for saved, loaded in three.run(frozen_adapters_after_a_load, stage, str(tmp_path)):
        assert any(".other." in name for name in saved)
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    written = load_file(tmp_path / "adapters.safetensors")
    torch.testing.assert_close(written, saved, rtol=0, atol=0)


def merged(kind: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The adapters after some steps, and the model into which PEFT has merged them."""
    model, plan = adapted(kind), plan_of(stage)
    optimizer = optimizer_of(model, plan)
    for batch in batches_of(plan, 2):
        optimizer.train_step(loss_fn, batch)
    with optimizer.full_parameters():
        adapters = trained_values(model)
        state = model.merge_and_unload().state_dict()
        return adapters, {name: value.clone() for name, value in state.items()}


@pytest.mark.every_combination
@pytest.mark.parametrize("stage", choose(quick=[3], full=[0, 1, 2, 3]))
def test_peft_merges_inside_full_parameters(three: Pool, stage: int) -> None:
    for adapters, state in three.run(merged, "4-bit", stage):
        alone = adapted("4-bit")
        alone.load_state_dict(adapters, strict=False)
        expected = alone.merge_and_unload().state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)


def with_added_adapter(kind: str) -> Any:
    """By the integration of transformers, which makes no `PeftModel`."""
    model = base_of(kind)
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
    model.add_adapter(peft.LoraConfig(r=4, **options))
    return model


def saved_with_added_adapter(kind: str, stage: int, folder: str) -> dict[str, Tensor]:
    """Trains and saves; returns the adapters."""
    as_launched()
    trainer = PoplarTrainer(
        with_added_adapter(kind),
        arguments(folder, **(SETTINGS | {"max_steps": 1})),
        data_collator=collated,
        train_dataset=samples(),
        poplar=PoplarArguments(plan=plan_of(stage)),
    )
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    assert trainer.model.hf_quantizer is not None
    with trainer.optimizer.full_parameters():
        adapters = peft.get_peft_model_state_dict(trainer.model)
        return {name: value.clone() for name, value in adapters.items()}


@pytest.mark.every_combination
@pytest.mark.parametrize("kind", quantized.BASES)
def test_an_added_adapter_is_saved_at_stage_3(three: Pool, tmp_path: Path, kind: str) -> None:
    expected = three.run(saved_with_added_adapter, kind, 3, str(tmp_path))[0]
    loaded = base_of(kind)
    loaded.load_adapter(str(tmp_path / "saved"))
    found = peft.get_peft_model_state_dict(loaded)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0)

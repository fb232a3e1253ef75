"""The ways to train a task on one rank: own engines, Poplar's integrations, Poplar's own loop.

A way trains a new model for some steps and returns the times at which they ended.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import poplar
from integration_runs.task import Task, loss_fn
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.data import pytree

Way = Callable[[Task, Plan, int], list[float]]
"""`way(task, plan, steps)`; the ways of other engines do not use the plan."""

LEARNING_RATE = 1e-4
INTEGRATIONS = {
    "ddp": ("own_ddp", "poplar_ddp", "poplar_gloo"),
    "fsdp2": ("own_fsdp2", "poplar_fsdp2", "poplar_gloo"),
    "transformers": ("own_trainer", "poplar_trainer", "poplar"),
    "accelerate": ("own_accelerate", "poplar_accelerate", "poplar"),
    "lightning": ("own_lightning", "poplar_lightning", "poplar"),
}
"""By integration: the library's own way, the one with Poplar, and Poplar's loop with that plan."""
WITHOUT_WEIGHTS = {"ddp": "planned_ddp", "fsdp2": "planned_fsdp2"}
"""The library's own engine with the batches of the plan and a plain backward: what the integration
itself costs is the difference to that."""
STAGES = {"fsdp2": 3}
"""The stage of an integration's plan; 0 for those that are not listed. Plans have even shares."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all ways."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def even_batches(task: Task) -> Iterator[Any]:
    """This rank's equal part of every global batch, as `DistributedSampler` gives it."""
    data = task.data()
    size = task.samples // dist.get_world_size()
    return iter(DataLoader(data, batch_size=size, sampler=DistributedSampler(data)))  # type: ignore[arg-type]


def planned_batches(task: Task, plan: Plan) -> Iterator[Any]:
    """This rank's part of every global batch by the plan."""
    data = task.data()
    sampler = HeteroBatchSampler(len(data), plan, seed=0)  # type: ignore[arg-type]
    return iter(DataLoader(data, batch_sampler=sampler))


def timed(batches: Iterator[Any], steps: int, step: Callable[[Any], object]) -> list[float]:
    """Run steps; loading their batches is part of them, as in the loops of trainers."""
    ends = []
    for batch in islice(batches, steps):
        step(batch)
        ends.append(time.perf_counter())
    return ends


def plain_step(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Any], object]:
    """The usual step of one pass."""

    def step(batch: Any) -> None:
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def passes_step(passes: Any, model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    """The step of `UnequalPasses`."""
    tokens = poplar.tokens()

    def step(batch: Any) -> None:
        for micro_batch in passes(batch, weight=tokens):
            passes.backward(loss_fn(model, micro_batch))
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_passes(
    task: Task, plan: Plan, model: Any, before_last: Callable[[], Any]
) -> Callable[[Any], object]:
    """The passes of a plan with a plain backward: as fast as the engine is, wrongly weighted.

    Args:
        before_last: the context of passes before the last.
    """
    optimizer = adamw(model.parameters())
    sizes = plan.micro_batch_sizes(dist.get_rank(), plan.samples(dist.get_rank()))

    def step(batch: Any) -> None:
        parts = pytree.split(batch, sizes)
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else before_last():
                loss_fn(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def planned_ddp(task: Task, plan: Plan, steps: int) -> list[float]:
    """DDP with the plan's batches and no weights."""
    model = DistributedDataParallel(task.new_model(), gradient_as_bucket_view=True)
    return timed(planned_batches(task, plan), steps, plain_passes(task, plan, model, model.no_sync))


def planned_fsdp2(task: Task, plan: Plan, steps: int) -> list[float]:
    """FSDP2 with the plan's batches and no weights."""
    model = sharded(task)
    return timed(planned_batches(task, plan), steps, plain_passes(task, plan, model, nullcontext))


def own_ddp(task: Task, plan: Plan, steps: int) -> list[float]:
    """DDP with even batches."""
    model = DistributedDataParallel(task.new_model(), gradient_as_bucket_view=True)
    return timed(even_batches(task), steps, plain_step(model, adamw(model.parameters())))


def poplar_ddp(task: Task, plan: Plan, steps: int) -> list[float]:
    """DDP with the passes of a plan."""
    from poplar.integrations.ddp import UnequalPasses

    model = DistributedDataParallel(task.new_model(), gradient_as_bucket_view=True)
    step = passes_step(UnequalPasses(model, plan), model, adamw(model.parameters()))
    return timed(planned_batches(task, plan), steps, step)


def sharded(task: Task) -> Any:
    """The model sharded by FSDP2, a unit per block."""
    model = task.new_model()
    for block in task.blocks(model):
        fully_shard(block)
    return fully_shard(model)


def own_fsdp2(task: Task, plan: Plan, steps: int) -> list[float]:
    """FSDP2 with even batches."""
    model = sharded(task)
    return timed(even_batches(task), steps, plain_step(model, adamw(model.parameters())))


def poplar_fsdp2(task: Task, plan: Plan, steps: int) -> list[float]:
    """FSDP2 with the passes of a plan."""
    from poplar.integrations.fsdp2 import UnequalPasses

    model = sharded(task)
    step = passes_step(UnequalPasses(model, plan), model, adamw(model.parameters()))
    return timed(planned_batches(task, plan), steps, step)


def poplar_loop(task: Task, plan: Plan, steps: int, communicator: str = "auto") -> list[float]:
    """Poplar's own engine."""
    model, tokens = task.new_model(), poplar.tokens()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, lr=LEARNING_RATE, communicator=communicator
    )

    def step(batch: Any) -> None:
        optimizer.train_step(loss_fn, batch, weight=tokens)

    try:
        return timed(planned_batches(task, plan), steps, step)
    finally:
        optimizer.release(values=False)


def training_arguments(task: Task, steps: int, folder: str) -> Any:
    """`TrainingArguments` that only train."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=task.samples // dist.get_world_size(),
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


def run_trainer(task: Task, steps: int, trainer_class: Any, **options: Any) -> list[float]:
    """A Hugging Face `Trainer`."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import TrainerCallback

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        trainer_class(
            model=task.new_model(),
            args=training_arguments(task, steps, folder),
            train_dataset=task.data(),
            callbacks=[Ends()],
            **options,
        ).train()
    return ends


def own_trainer(task: Task, plan: Plan, steps: int) -> list[float]:
    """`Trainer`, which uses DDP."""
    from transformers import Trainer

    return run_trainer(task, steps, Trainer)


def poplar_trainer(task: Task, plan: Plan, steps: int) -> list[float]:
    """`PoplarTrainer` with the plan."""
    from poplar.integrations.transformers import PoplarArguments, PoplarTrainer

    return run_trainer(task, steps, PoplarTrainer, poplar=PoplarArguments(plan=plan))  # type: ignore[arg-type]


def new_accelerator() -> Any:
    """An `Accelerator` for the existing process group."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True)


def own_accelerate(task: Task, plan: Plan, steps: int) -> list[float]:
    """A loop with `accelerator.prepare`, which uses DDP."""
    accelerator, model, data = new_accelerator(), task.new_model(), task.data()
    size = task.samples // dist.get_world_size()
    model, optimizer, loader = accelerator.prepare(
        model, adamw(model.parameters()), DataLoader(data, batch_size=size, shuffle=True)
    )

    def step(batch: Any) -> None:
        accelerator.backward(loss_fn(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    return timed(iter(loader), steps, step)


def poplar_accelerate(task: Task, plan: Plan, steps: int) -> list[float]:
    """The same loop prepared by Poplar."""
    from poplar.integrations.accelerate import prepare

    accelerator, data, tokens = new_accelerator(), task.data(), poplar.tokens()
    size = task.samples // dist.get_world_size()
    model, optimizer, loader, _ = prepare(
        accelerator,
        task.new_model(),
        torch.optim.AdamW,
        DataLoader(data, batch_size=size, shuffle=True),
        plan=plan,
        lr=LEARNING_RATE,
    )

    def step(batch: Any) -> None:
        for micro_batch in optimizer.micro_batches(batch, weight=tokens):
            accelerator.backward(loss_fn(model, micro_batch))
        optimizer.step()
        optimizer.zero_grad()

    try:
        return timed(iter(loader), steps, step)
    finally:
        optimizer.release(values=False)


def run_lightning(task: Task, steps: int, strategy: Any) -> list[float]:
    """Lightning's `Trainer`."""
    import lightning.pytorch as pl

    ends: list[float] = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = task.new_model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_fn(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

    size = task.samples // dist.get_world_size()
    pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(Module(), DataLoader(task.data(), batch_size=size, shuffle=True))
    return ends


def own_lightning(task: Task, plan: Plan, steps: int) -> list[float]:
    """Lightning's DDP."""
    return run_lightning(task, steps, "ddp")


def poplar_lightning(task: Task, plan: Plan, steps: int) -> list[float]:
    """Lightning with `PoplarStrategy`."""
    from poplar.integrations.lightning import PoplarStrategy

    return run_lightning(task, steps, PoplarStrategy(plan=plan, weight=poplar.tokens()))


WAYS: dict[str, Way] = {
    "own_ddp": own_ddp,
    "planned_ddp": planned_ddp,
    "planned_fsdp2": planned_fsdp2,
    "poplar_ddp": poplar_ddp,
    "own_fsdp2": own_fsdp2,
    "poplar_fsdp2": poplar_fsdp2,
    "own_trainer": own_trainer,
    "poplar_trainer": poplar_trainer,
    "own_accelerate": own_accelerate,
    "poplar_accelerate": poplar_accelerate,
    "own_lightning": own_lightning,
    "poplar_lightning": poplar_lightning,
    "poplar": poplar_loop,
    "poplar_gloo": partial(poplar_loop, communicator="process_group"),
}

"""Train a byte-level Llama on unequal ranks, under plain `torchrun`.

    torchrun --nproc-per-node 4 examples/train_llama.py --stage 1

Runs on GPUs (NCCL) and CPUs (gloo), on one machine or several. `train` shows what Poplar needs: a
plan, a sampler and `train_step`. The script sets up the process group and the device itself.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from llama import SIZES, Llama, LlamaConfig, next_byte_loss
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import ByteWindows, load_text
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, default_collate

import poplar
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.pair.speed import Speed, control_group, measure_speeds, sum_of_speeds

Batch = dict[str, Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZER = {"betas": (0.9, 0.95), "weight_decay": 0.1}
"""Arguments of AdamW, besides the learning rate."""


def main() -> None:
    options = parse_options()
    device = start_process_group()
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0, soft_wrap=True, highlight=False)

    config = model_config(options)
    training, held_out = load_text(
        config.context, patterns=options.text, held_out=options.held_out, limit=options.text_bytes
    )
    check_same_text(training)
    dtype = compute_dtype(options.dtype, device)
    speeds = measure(config, dtype, training, device, options)
    if options.plan == "auto":
        plan = autotuned(config, dtype, training, device, options)
    else:
        plan = make_plan(options, speeds, world_size)
    console.print(str(plan))

    torch.manual_seed(options.seed)  # the same initial weights on every rank
    model = Llama(config).to(device)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters · {config}")
    if options.compile:
        for block in model.blocks:
            block.compile()

    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.AdamW,
        plan=plan,
        compute_dtype=dtype,
        lr=options.learning_rate,
        **OPTIMIZER,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, warmup_then_cosine(options.warmup, options.steps)
    )
    sampler = HeteroBatchSampler(len(training), plan, seed=options.seed)
    loader = DataLoader(training, batch_sampler=sampler)
    evaluation = held_out_loader(held_out, options, rank, plan)

    def loss_fn(module: nn.Module, batch: Batch) -> Tensor:
        return next_byte_loss(module, to_device(batch, device))

    pace = Pace()
    steps = range(1, options.steps + 1)
    with progress(console, options.steps, lines=0) as advance:
        for step, batch in zip(steps, epochs(loader, sampler), strict=False):
            result = optimizer.train_step(loss_fn, batch, max_norm=options.clip)
            scheduler.step()
            pace.add(result.samples)
            advance(f"loss {result.loss:.2f}")
            last = step == steps[-1]
            if step % options.every == 0 or last:
                console.print(report(step, result, pace.lap(), speeds))
            if step % options.evaluate_every == 0 or last:
                with pace.paused():
                    loss = optimizer.evaluate(loss_fn, evaluation)
                bits = loss / math.log(2)
                console.print(f"step {step} · held-out loss {loss:.3f} · {bits:.3f} bits per byte")

    reached = pace.overall()

    if options.save:
        optimizer.save_model(options.save)
        console.print(f"saved {options.save}")
    if speeds:
        total = sum_of_speeds(speeds, measure(config, dtype, training, device, options))
        console.print(
            f"{reached:.4g} samples/s over all steps · "
            f"{100 * reached / total:.0f} % of sum of speeds, {total:.4g} samples/s"
        )


def start_process_group() -> torch.device:
    """Initialize the process group of `torchrun` and select this rank's device."""
    if "RANK" not in os.environ:
        raise SystemExit(
            "start this script with torchrun, for example: "
            "torchrun --nproc-per-node 4 examples/train_llama.py"
        )
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def model_config(options: argparse.Namespace) -> LlamaConfig:
    """The named size, with the individually given sizes replaced."""
    names = ("width", "layers", "heads", "kv_heads", "context")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(SIZES[options.size], recompute=options.recompute, **given)


def check_same_text(text: ByteWindows) -> None:
    """Raise on every rank if the ranks do not read the same text."""
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, text.digest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(
            f"ranks {others} read other text than rank 0; give all ranks the same files with "
            "--text, or use the same version of Python on all machines"
        )


def compute_dtype(choice: str, device: torch.device) -> torch.dtype:
    """The requested dtype; `auto` is resolved as the optimizer does, but before it exists."""
    if choice != "auto":
        return DTYPES[choice]
    if device.type == "cpu":
        return torch.float32
    # Emulated bf16 is slow, so it does not count.
    native: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(native, torch.cuda.get_device_capability(device) >= (8, 0))
    return torch.bfloat16 if all(native) else torch.float16


def measure(
    config: LlamaConfig,
    dtype: torch.dtype,
    text: ByteWindows,
    device: torch.device,
    options: argparse.Namespace,
) -> tuple[Speed, ...]:
    """Every rank's speed in plain PyTorch; empty if `--measure-seconds` is 0."""
    if options.measure_seconds == 0:
        return ()
    return measure_speeds(
        Llama(config).to(device, dtype),
        next_byte_loss,
        lambda samples: to_device(default_collate([text[i] for i in range(samples)]), device),
        max_batch=options.max_micro_batch,
        seconds=options.measure_seconds,
        group=control_group(),
    )


def autotuned(
    config: LlamaConfig,
    dtype: torch.dtype,
    text: ByteWindows,
    device: torch.device,
    options: argparse.Namespace,
) -> Plan:
    """The fastest plan for this model on these ranks."""
    model = Llama(config).to(device)
    example = default_collate([text[index] for index in range(8)])
    return poplar.autotune(
        model,
        next_byte_loss,
        to_device(example, device),
        global_batch=options.global_batch,
        stage=options.stage,
        max_batch=options.max_micro_batch,
        max_norm=options.clip,
        compute_dtype=dtype,
        lr=options.learning_rate,
        **OPTIMIZER,
    )


def make_plan(options: argparse.Namespace, speeds: tuple[Speed, ...], world_size: int) -> Plan:
    """The plan given by `--plan`, if it is not `auto`."""
    if options.plan == "even":
        micro_batch = min(options.max_micro_batch, -(-options.global_batch // world_size))
        return Plan.even(world_size, options.global_batch, micro_batch, options.stage)
    if options.plan == "proportional":
        if not speeds:
            raise ValueError(
                "--plan proportional needs measured speeds: set --measure-seconds above 0"
            )
        measured = [speed.samples_per_second for speed in speeds]
        return Plan.proportional(
            measured, options.global_batch, options.stage, options.max_micro_batch
        )
    if options.plan.endswith(".json"):
        return Plan.from_json(options.plan)
    return Plan.manual(options.plan, stage=options.stage, passes=options.passes)


def warmup_then_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: linear warm-up, then cosine decay to 10 %."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


def epochs(loader: DataLoader[Batch], sampler: HeteroBatchSampler) -> Iterator[Batch]:
    """This rank's part of each global batch, over endless epochs."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def held_out_loader(
    held_out: ByteWindows, options: argparse.Namespace, rank: int, plan: Plan
) -> DataLoader[Batch]:
    """Every n-th held-out window for each of n ranks; none for a rank that is left out."""
    windows = range(min(len(held_out), options.held_out_windows))
    active = plan.active_ranks
    own = windows[active.index(rank) :: len(active)] if rank in active else ()
    return DataLoader(Subset(held_out, own), batch_size=options.max_micro_batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def report(
    step: int, result: poplar.StepResult, samples_per_second: float, speeds: tuple[Speed, ...]
) -> str:
    """One line: `step 40 · loss 2.31 · 812 samples/s · 94 % of sum of speeds · ...`."""
    parts = [f"step {step}", f"loss {result.loss:.2f}", f"{samples_per_second:.4g} samples/s"]
    if speeds:
        parts.append(f"{100 * samples_per_second / sum_of_speeds(speeds):.0f} % of sum of speeds")
    if result.waiting_on is not None:  # on GPUs it is known later
        parts.append(f"waiting on rank {result.waiting_on}")
    return " · ".join(parts)


class Pace:
    """Samples per second of training, without paused time."""

    def __init__(self) -> None:
        self.samples = self.lap_samples = 0
        self.start = self.lap_start = time.perf_counter()

    def add(self, samples: int) -> None:
        """Count the samples of one step."""
        self.samples += samples
        self.lap_samples += samples

    def lap(self) -> float:
        """Samples per second since the last lap."""
        now = time.perf_counter()
        pace = self.lap_samples / (now - self.lap_start)
        self.lap_samples, self.lap_start = 0, now
        return pace

    def overall(self) -> float:
        """Samples per second since the start."""
        return self.samples / (time.perf_counter() - self.start)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context."""
        began = time.perf_counter()
        yield
        paused = time.perf_counter() - began
        self.start += paused
        self.lap_start += paused


@contextmanager
def progress(console: Console, steps: int, *, lines: int = 10) -> Iterator[Callable[[str], None]]:
    """Show progress; yields a function to call with a message after each step.

    Args:
        console: a progress bar if it is a terminal, else plain lines; nothing if it is quiet.
        steps: number of calls.
        lines: number of plain lines.
    """
    if not console.is_terminal:
        yield _plain_progress(console, steps, lines)
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=console.quiet) as bar:
        task = bar.add_task("", total=steps)
        yield lambda text: bar.update(task, advance=1, description=text)


def _plain_progress(console: Console, steps: int, lines: int) -> Callable[[str], None]:
    done = 0

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        if lines * done // steps > lines * (done - 1) // steps:
            console.print(f"{done}/{steps} {text}")

    return advance


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level Llama on unequal ranks. Start it with torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--plan",
        default="auto",
        help="auto (profile and search), even, proportional (to measured speeds), samples per "
        'rank ("2,2,2,15"), or a .json file',
    )
    plan.add_argument(
        "--stage", type=stage, default="auto", help="ZeRO stage 0 to 3; auto: chosen by --plan auto"
    )
    plan.add_argument(
        "--global-batch", type=positive, default=64, help="samples per step over all ranks"
    )
    plan.add_argument("--max-micro-batch", type=positive, default=16, help="most samples per pass")
    plan.add_argument(
        "--passes", type=positive, default=1, help='number of passes of a plan like "2,2,2,15"'
    )
    plan.add_argument(
        "--measure-seconds",
        type=float,
        default=10.0,
        help="seconds of plain passes to measure each rank's speed; 0: do not measure",
    )

    model = parser.add_argument_group("model")
    model.add_argument("--size", choices=tuple(SIZES), default="demo", help="a named model size")
    model.add_argument("--width", type=positive, help="channels, overrides --size")
    model.add_argument("--layers", type=positive, help="blocks, overrides --size")
    model.add_argument("--heads", type=positive, help="query heads, overrides --size")
    model.add_argument("--kv-heads", type=positive, help="key and value heads, overrides --size")
    model.add_argument("--context", type=positive, help="bytes per sample, overrides --size")
    model.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="compute dtype")
    model.add_argument("--recompute", action="store_true", help="activation checkpointing")
    model.add_argument("--compile", action="store_true", help="torch.compile each block")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=200, help="optimizer steps")
    training.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate")
    training.add_argument("--warmup", type=int, default=20, help="warm-up steps")
    training.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    training.add_argument("--seed", type=int, default=0, help="seed of weights and shuffling")
    training.add_argument("--save", metavar="FILE", help="save the weights as .safetensors")
    training.add_argument("--every", type=positive, default=10, help="steps between progress lines")
    training.add_argument(
        "--evaluate-every", type=positive, default=100, help="steps between evaluations"
    )

    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        nargs="+",
        default=(),
        metavar="GLOB",
        help="files to train on, read as bytes; default: Python's standard library",
    )
    text.add_argument("--text-bytes", type=positive, help="read about this many bytes at most")
    text.add_argument(
        "--held-out", type=float, default=0.05, help="fraction of the files held out for evaluation"
    )
    text.add_argument(
        "--held-out-windows", type=positive, default=256, help="held-out samples to evaluate on"
    )
    options = parser.parse_args()
    if options.stage == "auto" and options.plan != "auto":
        options.stage = 0
    return options


def stage(text: str) -> int | str:
    if text not in ("auto", "0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"must be 0, 1, 2, 3 or auto, got {text}")
    return text if text == "auto" else int(text)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    main()

"""The largest frozen 4-bit base on which ranks with unequal memory train LoRA, by shares.

python benchmarks/largest_base.py --limits 8 4 2 2 --output rows.jsonl

`RLIMIT_DATA` enforces the limits. The base is on disk and mapped, as `safetensors` maps it, so that
what counts is what a rank stores and unshards. Stage 3, one sample per rank, two steps.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from head_to_head.workers import WorkerContext
from limited_ranks import MIB, gains, largest, limited, on_ranks, prepare
from rows import Column, Kind, Row, Target, new_parser, report
from torch import Tensor, nn

from poplar import HeteroZeroOptimizer, Plan
from poplar.zero.opaque_parameter import SMALL_BYTES, component_tensors, is_opaque

LAYERS = 4
"""Frozen matrices of a block."""
ADAPTER_BYTES = 8192
"""From this size on, freed memory is returned to the system, as that of the adapters is when they
are sharded."""
WANTED = 1.8
EVEN, BY_MEMORY = "even", "by memory"
COLUMNS = (
    *(Column(name, name) for name in ("limits", "shares", "blocks")),
    Column("base MiB", lambda row: row["base_bytes"] / MIB, "{:.0f}"),
)


class Block(nn.Module):
    """Frozen 4-bit matrices, each with an adapter of rank 4."""

    def __init__(self, width: int) -> None:
        from bitsandbytes.nn import Linear4bit

        super().__init__()
        self.frozen = nn.ModuleList(
            Linear4bit(width, width, bias=False, compute_dtype=torch.float32).to("cpu")
            for _ in range(LAYERS)
        )
        self.down = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(4, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Residual layers."""
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = x + torch.tanh(frozen(x) + up(down(x)))
        return x


def mapped(block: Block, folder: Path, number: int) -> None:
    """Replace the memory of a block's frozen tensors by a mapped file."""
    parts = [t for p in block.parameters() if is_opaque(p) for t in component_tensors(p)]
    for index, part in enumerate(parts):
        if part.nbytes > SMALL_BYTES:
            path = folder / f"{number}-{index}"
            part.numpy().tofile(path)
            data = torch.from_file(str(path), shared=True, size=part.nbytes, dtype=torch.uint8)
            part.data = data.view(part.dtype).view(part.shape)


def attempt(
    context: WorkerContext,
    blocks: int,
    width: int,
    limits: Sequence[int],
    shares: tuple[float, ...],
    to: str,
) -> int:
    """Train two steps under the limit of this rank; returns the bytes of the base."""
    _train(nn.Sequential(Block(width)), width, shares)  # libraries allocate, threads start
    gc.collect()  # what it leaves must not count as free memory later
    folder = Path(to) / str(context.rank)
    folder.mkdir()
    with limited(limits[context.rank]):
        torch.manual_seed(0)
        made, first = [], Block(width)
        for number in range(blocks):  # equal values in memory of their own
            made.append(copy.deepcopy(first))
            for layer in made[-1].frozen:  # the copy of a layer would have its scales twice
                layer.quant_state = layer.weight.quant_state
            mapped(made[-1], folder, number)
        del first
        model = nn.Sequential(*made)
        torch.manual_seed(context.rank)
        frozen = [p for p in model.parameters() if is_opaque(p)]
        size = sum(tensor.nbytes for p in frozen for tensor in component_tensors(p))
        _train(model, width, shares)
    return size


def _train(model: nn.Module, width: int, shares: tuple[float, ...]) -> None:
    ranks = len(shares)
    plan = Plan(stage=3, global_batch=ranks, micro_batches=((1,),) * ranks, shares=shares)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, communicator="process_group", lr=1e-3
    )
    for _ in range(2):
        optimizer.train_step(lambda m, x: m(x).square().mean(), torch.randn(1, width))


@cache
def base_bytes(blocks: int, width: int, limits: tuple[int, ...], shares: tuple[float, ...]) -> int:
    """The bytes of the base if all ranks train it, else 0."""
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(attempt, len(limits), blocks, width, limits, shares, folder)
    return max(found or [0])


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """The largest base with even shares, and with shares by memory."""
    limits, total = prepare(options.limits, options.largest), sum(options.limits)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(ADAPTER_BYTES)
    for name, shares in (
        (EVEN, (1 / len(limits),) * len(limits)),
        (BY_MEMORY, tuple(limit / total for limit in options.limits)),
    ):
        given = options.width, limits, shares
        blocks = largest(lambda number, given=given: base_bytes(number, *given) > 0)
        case = {"limits": ":".join(map(str, options.limits)), "largest_mib": options.largest}
        case |= {"width": options.width, "shares": name}
        figures = {"blocks": blocks, "base_bytes": base_bytes(blocks, *given) if blocks else 0}
        yield Row.of("largest frozen base", case, figures)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """What shares by memory gain, by memory of the ranks."""
    what = "largest 4-bit base, shares by memory over even shares"
    for case, gain in gains(rows, "base_bytes", "shares", BY_MEMORY, EVEN):
        yield Target(case=case, what=what, value=gain, wanted=WANTED)


def main() -> None:
    """Find the largest bases, or show saved rows."""
    options = parse_options()
    report(options, measure(options), Kind("largest frozen base", COLUMNS, targets))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, quick="matrices of width 512, at most 64 MiB on a rank")
    parser.add_argument("--limits", type=int, nargs="+", default=[8, 4, 2, 2], help="memory ratios")
    parser.add_argument("--largest", type=int, default=960, help="MiB of the largest rank")
    parser.add_argument("--width", type=int, default=2560, help="of the matrices")
    options = parser.parse_args(arguments)
    if options.quick:
        options.width, options.largest = 512, 64
    return options


if __name__ == "__main__":
    main()

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
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path

import process_memory
import torch
from emulation import Ranks
from head_to_head.clusters import Cluster, OpenCluster
from head_to_head.workers import WorkerContext, Workers, WorkersFailed
from rows import Column, Row, Target, new_console, new_parser, print_targets, table_of, write_rows
from torch import Tensor, nn

from poplar import HeteroZeroOptimizer, Plan
from poplar.zero.opaque_parameter import SMALL_BYTES, component_tensors, is_opaque

MIB = 2**20
LAYERS = 4
"""Frozen matrices of a block."""
ADAPTER_BYTES = 8192
"""From this size on, freed memory is returned to the system, as that of the adapters is when they
are sharded."""
WANTED = 1.8
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


def mapped(block: Block, folder: Path, number: int, *, write: bool) -> None:
    """Replace the memory of a block's frozen tensors by a mapped file."""
    parts = [t for p in block.parameters() if is_opaque(p) for t in component_tensors(p)]
    for index, part in enumerate(parts):
        if part.nbytes > SMALL_BYTES:
            path = folder / f"{number}-{index}"
            if write:
                part.numpy().tofile(path)
            data = torch.from_file(str(path), shared=True, size=part.nbytes, dtype=torch.uint8)
            part.data = data.view(part.dtype).view(part.shape)


def attempt(
    context: WorkerContext, blocks: int, width: int, limit: int, shares: tuple[float, ...], to: str
) -> int:
    """Train two steps under the limit of this rank; returns the bytes of the base."""
    _train(nn.Sequential(Block(width)), width, shares)  # libraries allocate, threads start
    gc.collect()  # what it leaves must not count as free memory later
    process_memory.release_freed_memory()
    allowed = process_memory.private_bytes() + limit
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
    try:
        torch.manual_seed(0)
        made, first = [], Block(width)
        for number in range(blocks):  # equal values in memory of their own
            made.append(copy.deepcopy(first))
            for layer in made[-1].frozen:  # the copy of a layer would have its scales twice
                layer.quant_state = layer.weight.quant_state
            mapped(made[-1], Path(to) / str(context.rank), number, write=True)
        del first
        model = nn.Sequential(*made)
        torch.manual_seed(context.rank)
        frozen = [p for p in model.parameters() if is_opaque(p)]
        size = sum(tensor.nbytes for p in frozen for tensor in component_tensors(p))
        _train(model, width, shares)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    return size


def _train(model: nn.Module, width: int, shares: tuple[float, ...]) -> None:
    ranks = len(shares)
    plan = Plan(stage=3, global_batch=ranks, micro_batches=((1,),) * ranks, shares=shares)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, communicator="process_group", lr=1e-3
    )
    for _ in range(2):
        optimizer.train_step(lambda m, x: m(x).square().mean(), torch.randn(1, width))


def trains(blocks: int, width: int, limits: Sequence[int], shares: tuple[float, ...]) -> int:
    """The bytes of the base if all ranks train it, else 0."""
    cluster = OpenCluster(Cluster(name="base", cores=(0,) * len(limits)), Ranks(()), None)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(len(limits)):
            (Path(folder) / str(rank)).mkdir()
        try:
            with Workers(cluster, f"{blocks} blocks") as workers:
                own = tuple(limits)
                return max(workers.call(_attempt_of_rank, blocks, width, own, shares, folder))
        except WorkersFailed as error:
            if not error.is_out_of_memory:
                raise
            return 0


def _attempt_of_rank(
    context: WorkerContext,
    blocks: int,
    width: int,
    limits: tuple[int, ...],
    shares: tuple[float, ...],
    folder: str,
) -> int:
    return attempt(context, blocks, width, limits[context.rank], shares, folder)


def largest(width: int, limits: Sequence[int], shares: tuple[float, ...]) -> tuple[int, int]:
    """The most blocks that train, and the bytes of their base."""
    # A fifth more than a byte for two elements: scales, and what else a rank stores of a block.
    block = LAYERS * width * width * 0.6
    high = max(
        2, int(min(limit / share for limit, share in zip(limits, shares, strict=True)) / block)
    )
    low, found = 0, 0
    while size := trains(high, width, limits, shares):
        low, high, found = high, high + max(1, high // 8), size
    while high - low > max(1, high // 32):
        middle = (low + high) // 2
        if size := trains(middle, width, limits, shares):
            low, found = middle, size
        else:
            high = middle
    return low, found


def main() -> None:
    """Find the largest base with even shares, and with shares by memory."""
    options = parse_options()
    process_memory.prepare_rank_processes()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(ADAPTER_BYTES), "OMP_NUM_THREADS": "1"}
    resource.setrlimit(resource.RLIMIT_STACK, (MIB, resource.RLIM_INFINITY))  # threads' count
    unit = options.largest * MIB // max(options.limits)
    limits, rows = [unit * limit for limit in options.limits], []
    total = sum(options.limits)
    for name, shares in (
        ("even", (1 / len(limits),) * len(limits)),
        ("by memory", tuple(limit / total for limit in options.limits)),
    ):
        blocks, size = largest(options.width, limits, shares)
        case = {"limits": ":".join(map(str, options.limits)), "largest_mib": options.largest}
        case |= {"width": options.width, "shares": name}
        rows.append(Row.of("largest frozen base", case, {"blocks": blocks, "base_bytes": size}))
    console = new_console()
    console.print(table_of(rows, COLUMNS))
    ratio = rows[1]["base_bytes"] / rows[0]["base_bytes"]
    what = "largest 4-bit base, shares by memory over even shares"
    target = Target(case=rows[0]["limits"], what=what, value=ratio, wanted=WANTED, at_most=False)
    print_targets([target], console)
    if options.output:
        write_rows(options.output, rows)


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

"""The largest model that ranks with unequal memory train, with and without state in host memory.

python benchmarks/largest_model.py --limits 8 4 2 2 --output rows.jsonl
python benchmarks/largest_model.py --peers fsdp2      # without DeepSpeed, which `make peers` gets

`RLIMIT_DATA` enforces the limits. What Poplar keeps in host memory is in shared memory, which does
not count. Poplar trains plans of the planner at stage 3; FSDP2 and DeepSpeed's ZeRO-3 train equal
shares. All compute in bf16; DeepSpeed and Poplar keep fp32 masters. One sample per rank, two steps.
FSDP2 with its CPU offload is computed: CPU ranks have no device to offload from. It keeps all
values, gradients and state on the host, so that host memory alone limits it. The row is the largest
model in as much host memory as Poplar used; with more host memory FSDP2 holds larger models than
Poplar, whose values and gradients stay on the devices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from head_to_head.workers import WorkerContext
from limited_ranks import MIB, gains, largest, limited, on_ranks, prepare
from rows import Column, Kind, Row, Target, new_parser, report
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from poplar import HeteroZeroOptimizer, Plan
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.search import Choice, search
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.optimizers.flat_adamw import FlatAdamW

LAYERS = 4
"""Matrices of a block."""
FSDP2_STATE_BYTES = 16
"""Per element: values, gradients and both moments in fp32."""
HOST_BYTES = 12
"""Per element that Poplar keeps on the host: fp32 masters and both moments."""
HELD_BYTES = 4 * MIB
"""What threads and the allocator take beside tensors."""
WANTED = 1.5
ON_DEVICES, ON_HOST = "Poplar", "Poplar, state on the host"
COLUMNS = (
    *(Column(name, name) for name in ("limits", "engine", "blocks")),
    Column("million parameters", lambda row: row["numel"] / 1e6, "{:.1f}"),
    Column("state on host by rank", "host_state"),
)


class Block(nn.Module):
    """Residual layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Of a batch."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def model_of(blocks: int, width: int) -> nn.Sequential:
    """A model on meta, so that each rank makes its share only."""
    with torch.device("meta"):
        return nn.Sequential(*(Block(width) for _ in range(blocks)))


def plan_of(blocks: int, width: int, limits: Sequence[int], host_state: Choice) -> Plan | None:
    """The planner's plan; None: none fits."""
    devices = tuple(
        DeviceProfile(
            name=f"{limit // MIB} MiB",
            memory_bytes=limit,
            points=(BatchPoint(batch=1, seconds=0.01, activation_bytes=MIB),),
            optimizer_seconds=0.01,
            host_optimizer_seconds=0.1,
            host_memory_bytes=10**12,
            held_bytes=HELD_BYTES,
        )
        for limit in limits
    )
    rates = (1e-9,) * len(limits)
    model = ModelProfile(
        unit_numels=(LAYERS * width**2,) * blocks,
        unit_names=tuple(map(str, range(blocks))),
        param_bytes=2.0,
        grad_bytes=2.0,
        optimizer_bytes=float(HOST_BYTES),
    )
    network = NetworkProfile(
        reduce_scatter_seconds=0.01,
        all_gather_seconds=0.01,
        send_seconds_per_byte=rates,
        receive_seconds_per_byte=rates,
        receive_buffers="step",
    )
    cluster = ClusterProfile(devices=devices, model=model, network=network)
    try:
        return search(
            cluster,
            global_batch=len(limits),
            stages=[3],
            host_state=host_state,
            leave_out="never",
        )
    except NoPlanFits:
        return None


def keep_host_memory_apart() -> None:
    """Put what is in host memory into shared memory, which `RLIMIT_DATA` does not count."""
    divide, state_of = FlatParameter.divide, FlatAdamW.state_of

    def divided(flat: FlatParameter, *args: Any) -> None:
        divide(flat, *args)
        if flat.is_hosted:
            flat.master.share_memory_()

    def shared_state_of(inner: FlatAdamW, values: Tensor) -> dict[str, Any]:
        state = state_of(inner, values)
        for name in ("exp_avg", "exp_avg_sq") if values.is_shared() else ():
            state[name].share_memory_()
        return state

    FlatParameter.divide, FlatAdamW.state_of = divided, shared_state_of  # type: ignore[method-assign]


def train_poplar(blocks: int, width: int, plan: Plan) -> None:
    """Two steps of a plan."""
    optimizer = HeteroZeroOptimizer(
        model_of(blocks, width),
        torch.optim.AdamW,
        plan=plan,
        units=list(map(str, range(blocks))),
        compute_dtype=torch.bfloat16,
        communicator="process_group",
        lr=1e-3,
    )
    for _ in range(2):
        optimizer.train_step(lambda m, x: m(x).float().square().mean(), torch.randn(1, width))


def train_fsdp2(blocks: int, width: int, _: None = None) -> None:
    """Two steps with equal shares."""
    model = model_of(blocks, width)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        model(torch.randn(1, width)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_deepspeed(blocks: int, width: int, _: None = None) -> None:
    """Two steps of ZeRO-3 with equal shares, and buffers of one block.

    ZeRO-3's settings for least memory: no prefetch, no small parameters kept whole, no reuse.
    """
    from head_to_head.deepspeed_engine import deepspeed

    block = LAYERS * width**2
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": block,
            "sub_group_size": block,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": block,
            "stage3_max_reuse_distance": 0,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    for _ in range(2):
        engine.backward(engine(torch.randn(1, width).bfloat16()).float().square().mean())
        engine.step()
    engine.destroy()


PEERS = {"fsdp2": ("FSDP2", train_fsdp2), "deepspeed": ("DeepSpeed ZeRO-3", train_deepspeed)}
"""By their names on the command line."""


def attempt(
    context: WorkerContext,
    train: Callable[[int, int, Any], None],
    blocks: int,
    width: int,
    limits: tuple[int, ...],
    plan: Plan | None,
) -> None:
    """Train under the limit of this rank."""
    keep_host_memory_apart()
    warm_up = None if plan is None else Plan.even(context.size, context.size, 1, 3)
    torch.manual_seed(context.rank)
    train(2, width, warm_up)  # libraries allocate, threads start
    with limited(limits[context.rank]):
        train(blocks, width, plan)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """The largest model of each engine."""
    limits, width = prepare(options.limits, options.largest), options.width
    numel = LAYERS * width**2

    def row(engine: str, blocks: int, plan: Plan | None = None) -> Row:
        case = {"limits": ":".join(map(str, options.limits)), "largest_mib": options.largest}
        parts = " ".join(f"{part:.0%}" for part in plan.host_state) if plan is not None else ""
        found = {"blocks": blocks, "numel": numel * blocks, "host_state": parts}
        return Row.of("largest model", {**case, "width": width, "engine": engine}, found)

    def trains(train: Callable[..., None], blocks: int, plan: Plan | None = None) -> bool:
        given = train, blocks, width, limits, plan
        return on_ranks(attempt, len(limits), *given) is not None

    for peer in options.peers:
        name, train = PEERS[peer]
        yield row(name, largest(lambda blocks, train=train: trains(train, blocks)))
    choices: tuple[tuple[str, Choice], ...] = ((ON_DEVICES, "never"), (ON_HOST, "auto"))
    for engine, host_state in choices:

        def plan_for(blocks: int, host_state: Choice = host_state) -> Plan | None:
            return plan_of(blocks, width, limits, host_state)

        blocks = largest(lambda number: plan_for(number) is not None)
        while blocks and not trains(train_poplar, blocks, plan_for(blocks)):
            blocks -= max(1, blocks // 32)
        plan = plan_for(blocks) if blocks else None
        yield row(engine, blocks, plan)
    if plan is None:  # not even one block trains
        return
    on_host = sum(s * plan.part_on_host(rank) for rank, s in enumerate(plan.shares))
    host_bytes = HOST_BYTES * on_host * blocks  # by elements of a block
    offloaded = int(host_bytes / FSDP2_STATE_BYTES)
    yield row("FSDP2, all offloaded, as much host memory (computed)", offloaded)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """What state on the host gains, by memory of the ranks."""
    what = "largest model with state on the host over without"
    for case, gain in gains(rows, "numel", "engine", ON_HOST, ON_DEVICES):
        yield Target(case=case, what=what, value=gain, wanted=WANTED)


def main() -> None:
    """Find the largest models, or show saved rows."""
    options = parse_options()
    report(options, measure(options), Kind("largest model", COLUMNS, targets))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, quick="matrices of width 256, at most 64 MiB on a rank")
    parser.add_argument("--limits", type=int, nargs="+", default=[8, 4, 2, 2], help="memory ratios")
    parser.add_argument("--largest", type=int, default=320, help="MiB of the largest rank")
    parser.add_argument(
        "--peers", choices=PEERS, nargs="*", default=[*PEERS], help="(default: all)"
    )
    parser.add_argument("--width", type=int, default=512, help="of the matrices")
    options = parser.parse_args(arguments)
    if options.quick:
        options.width, options.largest = 256, 64
    return options


if __name__ == "__main__":
    main()

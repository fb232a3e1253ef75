"""`poplar profile`: measure every rank and the network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from poplar.cli.options import AsJson, Debug, Device, Function, of_rank, parse_sizes, parse_stages
from poplar.cli.output import command_output, notes, table
from poplar.values.formatting import format_bytes, format_rate, format_seconds
from poplar.values.profile import ClusterProfile, DeviceProfile


def profile(
    function: Function,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write; cluster.json unless --json."),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Largest micro-batch to measure.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Memory per rank: 8GiB, or 8GiB,4GiB by rank.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate duration.")] = 60.0,
    lengths: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A text file with the length of each sample of the dataset, such as its tokens: "
            "numbers between spaces or line breaks.",
        ),
    ] = None,
    length_quantile: Annotated[
        float,
        typer.Option(help="With --lengths: memory is enough for this part of all micro-batches."),
    ] = 0.99,
    stages: Annotated[
        str, typer.Option(help="ZeRO stages to measure: auto, or as in 0,2.")
    ] = "auto",
    cache: Annotated[bool, typer.Option(help="Use an earlier profile of the same job.")] = True,
    device: Device = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure every rank and the network between the ranks.

    For several ranks: torchrun --nproc-per-node 2 -m poplar profile train.py:workload
    """
    limits = parse_sizes(memory_limit) if memory_limit is not None else None
    measured_stages = parse_stages(stages)
    with command_output(as_json=as_json, debug=debug) as result:
        from poplar import profile_cluster
        from poplar.cli.process_group import chosen_device, joined
        from poplar.cli.workload import load

        own_device = chosen_device(device)
        with joined(own_device) as world:
            work = load(function).to(own_device)
            cluster = profile_cluster(
                work.model,
                work.loss_fn,
                work.example_batch,
                optimizer_class=work.optimizer_class,
                max_batch=max_batch,
                memory_limit=of_rank(limits, world.rank, world.size),
                stages=measured_stages,
                lengths=None if lengths is None else read_lengths(lengths),
                length_quantile=length_quantile,
                seconds=seconds,
                cache=cache,
                **work.optimizer_arguments,
            )
        result.document = cluster.to_dict()
        result.show(*_shown(cluster))
        path = output if output is not None else None if as_json else Path("cluster.json")
        if path is not None and world.rank == 0:
            cluster.to_json(path)
            result.show(f"written to {path}; next: poplar plan {path} --global-batch B")


def read_lengths(path: Path) -> list[float]:
    """The numbers in a text file.

    Raises:
        ValueError: there is something else in it.
    """
    words = path.read_text(encoding="utf-8").split()
    try:
        return [float(word) for word in words]
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; expected the length of each sample, as numbers between spaces or "
            "line breaks"
        ) from None


def _shown(cluster: ClusterProfile) -> list[Table | Text]:
    """A table of the ranks, the collectives, and the notes."""
    ranks = table("rank", "device", "memory", "batches", "best speed", "optimizer step")
    for rank, device in enumerate(cluster.devices):
        ranks.add_row(
            str(rank),
            device.name,
            format_bytes(device.memory_bytes),
            f"1 to {device.max_batch}, {len(device.points)} measured",
            _best_speed(device),
            format_seconds(device.optimizer_seconds),
        )
    network = cluster.network
    summary = Text(
        f"{cluster.model.numel:,} trained elements in {len(cluster.model.unit_numels)} units; "
        f"reduce-scatter of all gradients {format_seconds(network.reduce_scatter_seconds)}, "
        f"all-gather of all parameters {format_seconds(network.all_gather_seconds)}"
    )
    return [ranks, summary, *notes(cluster)]


def _best_speed(device: DeviceProfile) -> str:
    best = max(device.points, key=lambda point: point.batch / point.seconds)
    return f"{format_rate(best.batch / best.seconds)} at {best.batch}"

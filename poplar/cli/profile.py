"""`poplar profile`: measure every rank and the network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poplar.cli.options import (
    AsJson,
    Debug,
    Device,
    Function,
    of_rank,
    output_file,
    parse_stages,
    writable,
)
from poplar.cli.output import Output, command_output
from poplar.values.formatting import format_bytes, format_rate, format_seconds
from poplar.values.profile import ClusterProfile, DeviceProfile


def profile(
    function: Function,
    output: Annotated[
        Path | None, output_file("The file to write; cluster.json unless --json.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Largest micro-batch to measure.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Memory per rank: 8GiB, or 8GiB,4GiB by rank.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate duration.")] = 60.0,
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
    some_stages = parse_stages(stages)
    chosen = {} if some_stages is None else {"stages": some_stages}
    if output is None and not as_json:
        output = writable(Path("cluster.json"))
    with command_output(as_json=as_json, debug=debug) as result:
        from poplar import profile_cluster
        from poplar.cli.process_group import chosen_device, joined
        from poplar.cli.workload import load

        own_device = chosen_device(device)
        with joined(own_device) as (rank, world_size):
            work = load(function).to(own_device, whole=False)
            cluster = profile_cluster(
                work.model,
                work.loss_fn,
                work.example_batch,
                optimizer_class=work.optimizer_class,
                max_batch=max_batch,
                memory_limit=of_rank(memory_limit, rank, world_size),
                seconds=seconds,
                cache=cache,
                **chosen,
                **work.optimizer_arguments,
            )
        result.document = cluster.to_dict()
        _show(result, cluster)
        if output is not None and rank == 0:
            cluster.to_json(output)
            result.show(f"written to {output}; next: poplar plan {output} --global-batch B")


def _show(output: Output, cluster: ClusterProfile) -> None:
    """Show the ranks, the collectives, and the notes."""
    output.show_table(
        ("rank", "device", "memory", "batches", "best speed", "optimizer step"),
        *(
            (
                str(rank),
                device.name,
                format_bytes(device.memory_bytes),
                f"1 to {device.max_batch}, {len(device.points)} measured",
                _best_speed(device),
                format_seconds(device.optimizer_seconds),
            )
            for rank, device in enumerate(cluster.devices)
        ),
    )
    network = cluster.network
    output.show(
        f"{cluster.model.numel:,} trained elements in {len(cluster.model.unit_numels)} units; "
        f"reduce-scatter of all gradients {format_seconds(network.reduce_scatter_seconds)}, "
        f"all-gather of all parameters {format_seconds(network.all_gather_seconds)}",
        *(f"note: {note}" for note in cluster.notes),
    )


def _best_speed(device: DeviceProfile) -> str:
    best = max(device.points, key=lambda point: point.batch / point.seconds)
    return f"{format_rate(best.batch / best.seconds)} at {best.batch}"

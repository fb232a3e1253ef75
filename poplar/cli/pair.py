"""`poplar pair`: the standard measurement of the cards of this machine or job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from poplar.cli.options import AsJson, Debug, Device, output_file
from poplar.cli.output import command_output

CPU_RANKS = 2
CPU_NOTE = (
    "No GPU: CPU ranks train tiny models. This shows that the command works; its speeds say "
    "nothing about GPUs."
)


def pair(
    minutes: Annotated[float, typer.Option(min=0.1, help="Approximate duration.")] = 5.0,
    output: Annotated[Path | None, output_file("The file to write the row to.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure what unequal cards reach together, beside an equal split, DDP and FSDP2.

    Two sizes of a Llama are trained in full and by LoRA. Starts one process per visible GPU; on
    several hosts: torchrun ... -m poplar pair. The row has no names of hosts or users, no paths,
    addresses, serial numbers or UUIDs.
    """
    ranks = _ranks_to_start(device)
    if ranks > 1:
        words = [f"--minutes={minutes}", f"--device={device}"]
        words += [f"--output={output}"] if output is not None else []
        words += [*(["--json"] if as_json else []), *(["--debug"] if debug else [])]
        raise typer.Exit(_start(ranks, words))
    with command_output(as_json=as_json, debug=debug) as result:
        from poplar.cli.process_group import chosen_device, joined
        from poplar.pair.measure import measure

        own_device = chosen_device(device)
        with joined(own_device) as (rank, _):

            def report(line: str) -> None:
                if rank == 0:
                    print(line, file=sys.stderr, flush=True)

            row = measure(own_device, minutes, report)
            if output is not None and rank == 0:
                row.to_json(output)
        result.document = row.to_dict()
        result.show(str(row), *([CPU_NOTE] if own_device.type == "cpu" else []))
        if output is not None:
            result.show(f"written to {output}")


def _ranks_to_start(device: str) -> int:
    """One per GPU, or two on the CPU; 1: this process is a rank, or no others can be started."""
    import torch

    if "RANK" in os.environ:
        return 1
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return 1 if device == "cuda" else CPU_RANKS


def _start(ranks: int, words: list[str]) -> int:
    """Run this command on so many ranks of this host; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if Path("/sys/class/net/lo").exists():  # the host name may not resolve to an own address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    launch = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}"]
    try:
        run(parse_args([*launch, "-m", "poplar", "pair", *words]))
    except ChildFailedError:  # the ranks have printed their errors
        return 1
    return 0

"""Options and arguments that several commands have, and the parsing of their values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from poplar.planner.search import CHOICES, POLICIES
from poplar.values.plan import STRATEGIES

_STAGES = range(len(STRATEGIES))


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """A parser that accepts one of several values."""
    known = tuple(choices)

    def parser(text: str) -> str:
        if text not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}; got {text!r}")
        return text

    return parser


def of_rank(limits: str | None, rank: int, world_size: int) -> str | None:
    """The memory limit for one rank, of one for all as in `8GiB` or one per rank: `8GiB,4GiB`.

    Raises:
        ValueError: neither one limit nor one per rank.
    """
    if limits is None:
        return None
    parts = limits.split(",")
    if len(parts) not in (1, world_size):
        raise ValueError(
            f"{len(parts)} memory limits for {world_size} ranks; give one for all, or one per rank"
        )
    return parts[0] if len(parts) == 1 else parts[rank]


def parse_stages(text: str) -> tuple[int, ...] | None:
    """ZeRO stages, as in `0,2`; `auto`: None."""
    if text.strip() == "auto":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) in _STAGES for part in parts):
        raise typer.BadParameter(
            f"expected auto or stages from 0 to 3, as in 0,2; got {text!r}", param_hint="stage"
        )
    return tuple(sorted({int(part) for part in parts}))


def writable(path: Path | None) -> Path | None:
    """The file that a command will write, checked before its work; creates the file's folder.

    Raises:
        BadParameter: it cannot be written. Only rank 0 writes, and checks.
    """
    if path is None or os.environ.get("RANK", "0") != "0":
        return path
    reason: str | None = f"{path} is a folder" if path.is_dir() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    if reason is None and not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "no permission"
    if reason is not None:
        raise typer.BadParameter(f"cannot write {path}: {reason}")
    return path


def output_file(description: str) -> Any:
    """The option `--output`: a file that rank 0 writes at the end."""
    return typer.Option("--output", "-o", help=description, callback=writable)


def _choice(name: str, description: str, metavar: str = "WHEN") -> Any:
    return typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=metavar,
        parser=one_of(CHOICES[name]),
        help=description,
    )


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="TYPE",
        parser=one_of(("auto", "cuda", "cpu")),
        help="cuda, cpu, or auto: CUDA if there is a device.",
    ),
]
Function = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function that returns a poplar.cli.workload.Workload, or (model, loss_fn, batch).",
    ),
]
ProfileFile = Annotated[
    Path, typer.Argument(metavar="CLUSTER.json", exists=True, dir_okay=False, help="A profile.")
]
PlanFile = Annotated[
    Path, typer.Option("--plan", metavar="PLAN.json", exists=True, dir_okay=False, help="A plan.")
]
RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.json", exists=True, dir_okay=False, help="A recorded run.")
]
GlobalBatch = Annotated[int, typer.Option(min=1, help="Samples of one optimizer step.")]
Stages = Annotated[
    str, typer.Option(help="ZeRO stages, as in 1 or 0,2; auto: those that were profiled, or all.")
]
MaxMicroBatch = Annotated[int | None, typer.Option(min=1, help="Most samples of one pass.")]
Factors = Annotated[
    str,
    _choice(
        "factored", "auto: linear layers may send factors instead of gradients; never: they do not."
    ),
]
HostStates = Annotated[
    str,
    _choice(
        "host_state",
        "auto: ranks may keep optimizer state in host memory, if that was measured; never: they do "
        "not.",
    ),
]
LeavingOut = Annotated[
    str,
    _choice(
        "leave_out",
        "auto: ranks that slow the others down may be left out; never: all ranks take part.",
    ),
]
Precisions = Annotated[
    str,
    _choice(
        "communication",
        "exact, int8 or int4: the precision in which ranks send; less than exact adds noise to the "
        "gradient. auto: fewer bits where the step becomes clearly faster.",
        "PRECISION",
    ),
]
Recomputation = Annotated[
    str,
    _choice(
        "recompute",
        "auto: ranks may recompute activations, if that was measured; never: they do not.",
    ),
]
Policy = Annotated[
    str, _choice("policy", f"How samples are assigned: {', '.join(POLICIES)}.", "NAME")
]

"""`poplar checkpoint`: what a checkpoint contains, and its conversion for other programs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poplar.cli.options import AsJson, Debug, one_of
from poplar.cli.output import Output, command_output, table
from poplar.values.formatting import format_bytes

if TYPE_CHECKING:
    from poplar.checkpoint.files.opened import OpenedCheckpoint

commands = typer.Typer(
    help="Inspect and convert checkpoints.", no_args_is_help=True, pretty_exceptions_enable=False
)
_Folder = Annotated[
    Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A checkpoint.")
]


@commands.command()
def inspect(
    folder: _Folder,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[
        bool, typer.Option(help="Read all files and compare their checksums.")
    ] = True,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint contains, and check that it is as it was written.

    It is safe for a checkpoint of a stranger: nothing in it is run, and no value is unpickled.
    """
    with command_output(as_json=as_json, debug=debug) as output:
        from poplar.checkpoint.files.opened import OpenedCheckpoint

        opened = OpenedCheckpoint(folder)
        if verify:
            opened.verify()
        output.document = _document(opened, verify)
        _show(output, opened, tensors)


@commands.command()
def convert(
    folder: _Folder,
    to_path: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            parser=one_of(("torch", "safetensors")),
            help="torch: everything, for torch.load; safetensors: the weights.",
        ),
    ],
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            parser=one_of(("model", "stored")),
            help="Of the weights: as the model computes, or as stored (trained ones: fp32).",
        ),
    ] = "model",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the content of a checkpoint for programs that do not read it.

    It is safe for a checkpoint of a stranger: nothing in it is run. A checkpoint with objects of
    classes cannot be converted to torch.
    """
    with command_output(as_json=as_json, debug=debug) as output:
        from poplar.checkpoint.conversion import convert as convert_checkpoint

        convert_checkpoint(folder, to_path, to, dtype=dtype)  # type: ignore[arg-type]
        output.document = {"written": str(to_path)}
        output.show(f"written: {to_path}")


def _document(opened: OpenedCheckpoint, verified: bool) -> dict[str, Any]:
    manifest = opened.manifest
    return {
        "folder": str(opened.folder),
        "written_by": None if manifest is None else dict(manifest.versions),
        "version": None if manifest is None else manifest.version,
        "step": None if manifest is None else manifest.step,
        "world_size": None if manifest is None else manifest.world_size,
        "stage": None if manifest is None else manifest.stage,
        "optimizer": None if manifest is None else manifest.optimizer,
        "state": [] if manifest is None else list(manifest.state),
        "files": {} if manifest is None else _file_sizes(opened),
        "verified": verified and manifest is not None,
        "tensors": {
            name: {
                "shape": list(found.size),
                "dtype": _dtype_name(found),
                "parts": len(found.chunks),
            }
            for name in sorted(opened.described)
            if (found := opened.tensor(name)) is not None
        },
    }


def _file_sizes(opened: OpenedCheckpoint) -> dict[str, int]:
    assert opened.manifest is not None
    return {name: stored.length for name, stored in opened.manifest.files.items()}


def _show(output: Output, opened: OpenedCheckpoint, every_tensor: bool) -> None:
    document = output.document
    facts = table("checkpoint", str(opened.folder))
    if opened.manifest is None:
        facts.add_row("written by", "torch.distributed.checkpoint, without checksums")
    else:
        versions = ", ".join(f"{name} {v}" for name, v in opened.manifest.versions.items())
        facts.add_row("written by", f"{versions}; format {document['version']}")
        facts.add_row("step", "not given" if document["step"] is None else str(document["step"]))
        ranks = document["world_size"]
        noun = "rank" if ranks == 1 else "ranks"
        facts.add_row("plan", f"stage {document['stage']} on {ranks} {noun}")
        facts.add_row("optimizer", document["optimizer"])
        facts.add_row("further state", ", ".join(document["state"]) or "none")
        total = format_bytes(sum(document["files"].values()))
        facts.add_row("files", f"{len(document['files'])}, {total}")
        checked = "all as written" if document["verified"] else "not compared"
        facts.add_row("checksums", checked)
    contents = table("content", "tensors", "dtype", "bytes")
    for (kind, dtype), (count, count_bytes) in sorted(_summary(opened).items()):
        contents.add_row(kind, str(count), dtype, format_bytes(count_bytes))
    output.show(facts, contents)
    if every_tensor:
        listed = table("tensor", "shape", "dtype", "parts")
        for name, tensor in document["tensors"].items():
            shape = "x".join(map(str, tensor["shape"])) or "scalar"
            listed.add_row(name, shape, tensor["dtype"], str(tensor["parts"]))
        output.show(listed)


def _summary(opened: OpenedCheckpoint) -> dict[tuple[str, str], tuple[int, int]]:
    """By kind of content and dtype, the tensors and their bytes."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name in opened.described:
        found = opened.tensor(name)
        if found is None:
            continue
        path = opened.paths.get(name, ())
        kind = f"optimizer: {path[3]}" if path[:2] == ("optim", "state") else name.split(".")[0]
        key = (kind, _dtype_name(found))
        counts[key] += 1
        sizes[key] += found.size.numel() * found.properties.dtype.itemsize
    return {key: (counts[key], sizes[key]) for key in counts}


def _dtype_name(found: Any) -> str:
    return str(found.properties.dtype).removeprefix("torch.")

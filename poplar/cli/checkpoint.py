"""`poplar checkpoint`: what a checkpoint contains, and its conversion for other programs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poplar.cli.options import AsJson, Debug, one_of, writable
from poplar.cli.output import Output, command_output
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
    to_path: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write.", callback=writable)
    ],
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
    """What the checkpoint contains; of a folder without a manifest, only its tensors."""
    document: dict[str, Any] = {"folder": str(opened.folder), "verified": False}
    if (manifest := opened.manifest) is not None:
        document |= {
            "written_by": dict(manifest.versions),
            "version": manifest.version,
            "step": manifest.step,
            "world_size": manifest.world_size,
            "stage": manifest.stage,
            "optimizer": manifest.optimizer,
            "state": list(manifest.state),
            "files": {name: stored.length for name, stored in manifest.files.items()},
            "verified": verified,
        }
    described = {name: opened.tensor(name) for name in sorted(opened.described)}
    return document | {
        "tensors": {
            name: {
                "shape": list(found.size),
                "dtype": _dtype_name(found),
                "parts": len(found.chunks),
            }
            for name, found in described.items()
            if found is not None
        }
    }


def _show(output: Output, opened: OpenedCheckpoint, every_tensor: bool) -> None:
    document = output.document
    facts = [("checkpoint", document["folder"])]
    if opened.manifest is None:
        facts.append(("written by", "torch.distributed.checkpoint, without checksums"))
    else:
        versions = ", ".join(f"{name} {v}" for name, v in document["written_by"].items())
        step, ranks = document["step"], document["world_size"]
        total = format_bytes(sum(document["files"].values()))
        facts += [
            ("written by", f"{versions}; format {document['version']}"),
            ("step", "not given" if step is None else str(step)),
            ("plan", f"stage {document['stage']} on {ranks} rank{'s' if ranks > 1 else ''}"),
            ("optimizer", document["optimizer"]),
            ("further state", ", ".join(document["state"]) or "none"),
            ("files", f"{len(document['files'])}, {total}"),
            ("checksums", "all as written" if document["verified"] else "not compared"),
        ]
    output.show_table(*facts)
    output.show_table(
        ("content", "tensors", "dtype", "bytes"),
        *(
            (kind, str(count), dtype, format_bytes(count_bytes))
            for (kind, dtype), (count, count_bytes) in sorted(_summary(opened).items())
        ),
    )
    if every_tensor:
        output.show_table(
            ("tensor", "shape", "dtype", "parts"),
            *(
                (
                    name,
                    "x".join(map(str, tensor["shape"])) or "scalar",
                    tensor["dtype"],
                    str(tensor["parts"]),
                )
                for name, tensor in document["tensors"].items()
            ),
        )


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

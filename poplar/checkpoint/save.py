"""`save_checkpoint`: the ranks agree on what each of them writes; `save_job` writes it."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from poplar.checkpoint.digests import digest
from poplar.checkpoint.manifest import Manifest
from poplar.checkpoint.names import canonical
from poplar.checkpoint.random_state import random_state
from poplar.checkpoint.save_job import PendingSave, SaveJob, aside_name
from poplar.checkpoint.training_state import (
    Checkpointed,
    Entries,
    TrainingParts,
    check_idle,
    optimizer_name,
    saved_entries,
)
from poplar.comm import Control
from poplar.plan import Plan
from poplar.zero.agreement import run_on_all_ranks

STATE = "poplar.state."
RANK = "poplar.rank."
SCALER = "poplar.scaler"


def save_checkpoint(
    folder: str | Path, optimizer: Checkpointed, *, state: Mapping[str, Any] | None = None
) -> None:
    """Save the training state in a new folder. Collective, between steps.

    Model, optimizer, plan and the random states of all ranks are saved. Nothing is gathered: every
    rank writes its part. Any plan, stage and number of ranks can load it, and so can
    `torch.distributed.checkpoint.load` without Poplar.

    Args:
        folder: a folder that all ranks see. It appears when the checkpoint is complete.
        state: by name, further objects with `state_dict` and `load_state_dict` (a scheduler, a
            sampler, a scaler), or values that can be pickled. Equal on all ranks.

    Raises:
        FileExistsError: the folder exists.
        OSError, ValueError, RuntimeError: it cannot be saved, or a step is in progress.
        RankFailed: another rank failed. Nothing remains of the checkpoint.
    """
    start_save(folder, optimizer, state=state).wait()


def start_save(
    folder: str | Path,
    optimizer: Checkpointed,
    *,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    replaces: bool = False,
    copy: Callable[[dict[MetadataIndex, Any]], dict[MetadataIndex, Any]] | None = None,
    after: Callable[[], None] | None = None,
) -> PendingSave:
    """Start to save; `wait` on the result. Collective.

    Args:
        folder: as for `save_checkpoint`.
        optimizer: as for `save_checkpoint`.
        state: as for `save_checkpoint`.
        step: stored in the manifest.
        replaces: an existing checkpoint is replaced once the new one is complete.
        copy: copies what this rank writes, so that training may go on before it is written.
        after: called on the first rank, in the writing thread, when the checkpoint is complete.
    """
    path = Path(os.path.abspath(folder))
    parts = optimizer.training_parts()
    control, doing = parts.control, f"save_checkpoint({str(folder)!r})"
    values: dict[str, Any] = {}

    def prepare() -> Entries:
        check_idle(parts, "save_checkpoint()")
        values.update({name: state_of(value) for name, value in (state or {}).items()})
        if control.group.rank == 0:
            _make_folder(path, replaces)
        return saved_entries(parts)

    try:
        entries = run_on_all_ranks(control, prepare, doing=doing)
        buffers = _own_buffers(parts, values, doing)
        agreed = _agree(control, _with_further_values(parts, entries, values, buffers), doing)

        def make_job() -> SaveJob:
            _check_complete(agreed.metadata)
            if (device := parts.engine.flats[0].device).type == "cuda":
                torch.cuda.synchronize(device)  # the thread that writes has another stream
            return SaveJob(
                folder=path,
                rank=control.group.rank,
                world_size=control.group.size,
                items=agreed.items,
                values=agreed.values if copy is None else copy(agreed.values),
                metadata=agreed.metadata,
                aliases=entries.aliases,
                manifest=_manifest(parts, values, step),
                plan=None if parts.plan is None else _plan_text(parts.plan),
                replaces=replaces,
                timeout_seconds=control.group.timeout.total_seconds(),
            )

        job = run_on_all_ranks(control, make_job, doing=doing)
    except BaseException:
        if control.group.rank == 0:
            shutil.rmtree(aside_name(path), ignore_errors=True)
        raise
    return PendingSave(job, control, after=after)


def _own_buffers(parts: TrainingParts, values: Mapping[str, Any], doing: str) -> dict[str, Tensor]:
    """The buffers of this rank that differ from the first rank's. Collective.

    Raises:
        ValueError: the ranks have different values in `state`.
    """
    buffers = {canonical(name): buffer for name, buffer in parts.model.named_buffers()}
    mine = (
        {name: digest(value) for name, value in values.items()},
        {name: digest(buffer) for name, buffer in buffers.items()},
    )
    by_rank = parts.control.exchange_objects(mine, what=doing)
    first_values, first_buffers = by_rank[0]
    for rank, (of_values, _) in enumerate(by_rank):
        differing = [
            name
            for name in sorted(first_values.keys() | of_values.keys())
            if first_values.get(name) != of_values.get(name)
        ]
        if differing:
            raise ValueError(
                f"state {differing} of rank {rank} is not that of rank 0, but one is saved for all "
                "ranks. (DataLoader workers move a sampler ahead of training: save "
                "sampler.state_dict(steps_done=...).) To save what differs by rank, collect it "
                "with torch.distributed.all_gather_object and save the list"
            )
    return {name: b for name, b in buffers.items() if mine[1][name] != first_buffers.get(name)}


def _with_further_values(
    parts: TrainingParts,
    entries: Entries,
    values: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
) -> Entries:
    """Add the random state of this rank and, on the first one, scaler and `state`."""
    rank, device = parts.control.group.rank, parts.engine.flats[0].device
    own = {"random": random_state(device), "buffers": {n: b.cpu() for n, b in buffers.items()}}
    extra: dict[str, Any] = {f"{RANK}{rank}": own}
    if rank == 0:
        extra.update({STATE + name: value for name, value in values.items()})
        if parts.scaler is not None:
            extra[SCALER] = parts.scaler.state_dict()
    paths = {**entries.paths, **{name: tuple(name.split(".", 2)) for name in extra}}
    return replace(entries, values={**entries.values, **extra}, paths=paths)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What this rank writes, and what all ranks write together."""

    items: Sequence[WriteItem]
    values: dict[MetadataIndex, Any]
    metadata: Metadata


def _agree(control: Control, entries: Entries, doing: str) -> Agreed:
    """Decide which rank writes what. Collective."""
    group = control.group
    mine = create_default_local_save_plan(dict(entries.values), group.rank == 0)
    by_rank = control.exchange_objects((mine.items, entries.paths), what=doing)
    plans, metadata = create_default_global_save_plan(
        dedup_save_plans([SavePlan(items) for items, _ in by_rank], True)
    )
    paths = {name: where for _, paths in reversed(by_rank) for name, where in paths.items()}
    items, own = plans[group.rank].items, dict(entries.values)
    return Agreed(
        items=items,
        values={item.index: _resolve(own, item) for item in items},
        metadata=replace(
            metadata, planner_data=paths, version=CURRENT_DCP_VERSION, storage_meta=StorageMeta()
        ),
    )


def state_of(value: Any) -> Any:
    """What is saved of an object: its `state_dict()`, or itself."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def _make_folder(path: Path, replaces: bool) -> None:
    if path.exists() and not replaces:
        raise FileExistsError(
            f"{path} exists; save to another folder, or remove it first. (CheckpointManager makes "
            "a folder per step.)"
        )
    aside = aside_name(path)
    if aside.exists():  # of a save that was interrupted
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def _resolve(values: dict[str, Any], item: WriteItem) -> Any:
    """The part of a value that an item stores."""
    if item.tensor_data is None:
        return values[item.index.fqn]
    part: Tensor = find_state_dict_object(values, item.index)
    return part.detach()


def _check_complete(metadata: Metadata) -> None:
    """Check that the parts of all ranks make up every tensor."""
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            assert stored == math.prod(tensor.size), f"{name}: {stored} of {tensor.size}"


def _plan_text(plan: Plan) -> str:
    return json.dumps(plan.to_dict(), indent=2) + "\n"


def _manifest(parts: TrainingParts, state: Mapping[str, Any], step: int | None) -> Manifest:
    import poplar

    return Manifest(
        step=step,
        world_size=parts.control.group.size,
        stage=parts.stage,
        optimizer=optimizer_name(parts),
        versions={
            "poplar": poplar.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        computes_in={
            canonical(name): str(flat.dtype).removeprefix("torch.")
            for flat in parts.engine.trained
            if flat.dtype is not torch.float32
            for name in flat.names
        },
        state=sorted(state),
    )

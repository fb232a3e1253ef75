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

from poplar.checkpoint.collection import no_garbage_collection
from poplar.checkpoint.digests import digest
from poplar.checkpoint.files.manifest import Manifest
from poplar.checkpoint.files.save_job import PendingSave, SaveJob, aside_name, remove
from poplar.checkpoint.names import canonical
from poplar.checkpoint.random_state import random_state
from poplar.checkpoint.training_state import (
    Checkpointed,
    Entries,
    TrainingParts,
    check_idle,
    optimizer_name,
    saved_entries,
)
from poplar.comm import Control
from poplar.comm.host_topology import host_id
from poplar.values.errors import agreed
from poplar.values.plan import Plan
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
        PoplarError: a trained parameter has values that are NaN or infinite.
        RankFailed: another rank failed. Nothing remains of the checkpoint.
    """
    save_now(folder, optimizer, state=state)


def save_now(
    folder: str | Path,
    optimizer: Checkpointed,
    *,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    replaces: bool = False,
) -> None:
    """Save, and return when the checkpoint is complete. Arguments as for `start_save`."""
    with optimizer.collective_calls.running("save_checkpoint()"):
        start_save(folder, optimizer, state=state, step=step, replaces=replaces).wait()


@no_garbage_collection()
def start_save(
    folder: str | Path,
    optimizer: Checkpointed,
    *,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    replaces: bool = False,
    agreement: Agreement | None = None,
    copy: Callable[[dict[MetadataIndex, Any]], dict[MetadataIndex, Any]] | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> PendingSave:
    """Start to save; `wait` on the result. Collective.

    Args:
        folder: as for `save_checkpoint`.
        optimizer: as for `save_checkpoint`.
        state: as for `save_checkpoint`.
        step: stored in the manifest.
        replaces: an existing checkpoint is replaced once the new one is complete.
        agreement: of the last save of this optimizer, which is updated; None: of no other save.
        copy: copies what this rank writes, so that training may go on before it is written.
        before: called on the first rank before the folder is made.
        after: called on the first rank, in the writing thread, when the checkpoint is complete.
    """
    path = Path(os.path.abspath(folder))
    parts = optimizer.training_parts()
    control, doing = parts.engine.control, f"save_checkpoint({str(folder)!r})"
    parts.reject_nonfinite(doing)
    agreement = Agreement() if agreement is None else agreement

    def prepare() -> Content:
        check_idle(parts, "save_checkpoint()")
        values = {name: state_of(value) for name, value in (state or {}).items()}
        if control.group.rank == 0:
            if before is not None:
                before()
            _make_folder(path, replaces)
        return _content(parts, values)

    pending: list[PendingSave] = []
    try:
        content = run_on_all_ranks(control, prepare, doing=doing)
        agreement.agree(control, content, path.name, doing)
        entries = content.entries

        def start() -> None:
            if (device := parts.engine.flats[0].device).type == "cuda":
                torch.cuda.synchronize(device)  # the thread that writes has another stream
            own = dict(entries.values)
            items = agreement.by_rank[control.group.rank]
            written = {item.index: _resolve(own, item) for item in items}
            job = SaveJob(
                folder=path,
                rank=control.group.rank,
                items=agreement.by_rank,
                values=written if copy is None else copy(written),
                metadata=agreement.metadata,
                aliases=entries.aliases,
                manifest=_manifest(parts, content.state, step),
                plan=None if parts.plan is None else _plan_text(parts.plan),
                replaces=replaces,
                timeout_seconds=control.group.timeout.total_seconds(),
                on_this_host=agreement.on_this_host,
            )
            asynchronous = copy is not None
            pending.append(PendingSave(job, control, asynchronous=asynchronous, after=after))

        run_on_all_ranks(control, start, doing=doing)
    except BaseException:
        for save in pending:
            save.cancel()
        if control.group.rank == 0:
            shutil.rmtree(aside_name(path), ignore_errors=True)
        raise
    pending[0].begin()
    return pending[0]


@dataclass(frozen=True, kw_only=True)
class Content:
    """What this rank adds to a checkpoint."""

    entries: Entries
    state: Mapping[str, int]
    """By name in `state`, a digest of the value, which is equal on all ranks."""
    buffers: Mapping[str, Tensor]
    own_buffers: dict[str, Tensor]
    """Part of `entries`: the buffers that differ from the first rank's, once that is known."""


def _content(parts: TrainingParts, values: Mapping[str, Any]) -> Content:
    """The training state, the random state of this rank and, on the first one, scaler and `state`.

    Local.
    """
    entries = saved_entries(parts)
    rank, device = parts.engine.control.group.rank, parts.engine.flats[0].device
    own_buffers: dict[str, Tensor] = {}
    own = {"random": random_state(device), "buffers": own_buffers}
    extra: dict[str, Any] = {f"{RANK}{rank}": own}
    if rank == 0:
        extra.update({STATE + name: value for name, value in values.items()})
        if parts.scaler is not None:
            extra[SCALER] = parts.scaler.state_dict()
    paths = {**entries.paths, **{name: tuple(name.split(".", 2)) for name in extra}}
    return Content(
        entries=replace(entries, values={**entries.values, **extra}, paths=paths),
        state={name: digest(value) for name, value in values.items()},
        buffers={canonical(name): buffer for name, buffer in parts.engine.model.named_buffers()},
        own_buffers=own_buffers,
    )


class Agreement:
    """Which rank writes what. Kept between saves: a rank sends its part only if it has changed."""

    metadata: Metadata
    on_this_host: Sequence[int]
    """The ranks on the host of this rank."""

    def __init__(self) -> None:
        self._by_rank: list[tuple[list[WriteItem], Mapping[str, Any]]] = []
        self._plans: list[SavePlan] = []

    @property
    def by_rank(self) -> list[Sequence[WriteItem]]:
        """By rank, what it writes."""
        return [plan.items for plan in self._plans]

    def agree(self, control: Control, content: Content, name: str, doing: str) -> None:
        """Exchange what has changed, and set `content.own_buffers`. Collective.

        Args:
            control: the control channel.
            content: of this rank.
            name: of the checkpoint's folder.
            doing: for errors.

        Raises:
            ValueError: the ranks have different values in `state`, or save to different folders.
        """
        rank, entries = control.group.rank, content.entries
        part = create_default_local_save_plan(dict(entries.values), rank == 0).items, entries.paths
        is_known = bool(self._by_rank) and self._by_rank[rank] == part
        buffers = {name: digest(buffer) for name, buffer in content.buffers.items()}
        own = name, host_id(), content.state, buffers, None if is_known else part
        received = control.exchange_objects(own, what=doing)
        names = [name for name, *_ in received]
        if names != [name] * len(names):
            raise agreed(ValueError(f"the ranks save different checkpoints; by rank: {names}"))
        self.on_this_host = [r for r, (_, host, *_) in enumerate(received) if host == own[1]]
        if any(changed is not None for *_, changed in received):
            self._set([changed or self._by_rank[r] for r, (*_, changed) in enumerate(received)])
        _check_equal_state([of_state for _, _, of_state, *_ in received])
        first = received[0][3]
        differing = {n: b.cpu() for n, b in content.buffers.items() if buffers[n] != first.get(n)}
        content.own_buffers.update(differing)

    def _set(self, by_rank: list[tuple[list[WriteItem], Mapping[str, Any]]]) -> None:
        """Divide what all ranks have among them."""
        plans, metadata = create_default_global_save_plan(
            dedup_save_plans([SavePlan(items) for items, _ in by_rank], True)
        )
        _check_complete(metadata)
        paths = {name: where for _, paths in reversed(by_rank) for name, where in paths.items()}
        self._by_rank, self._plans = by_rank, plans
        self.metadata = replace(
            metadata, planner_data=paths, version=CURRENT_DCP_VERSION, storage_meta=StorageMeta()
        )


def _check_equal_state(by_rank: Sequence[Mapping[str, int]]) -> None:
    """Check that all ranks save the same `state`, given its digests."""
    first = by_rank[0]
    for rank, digests in enumerate(by_rank):
        differing = [
            name
            for name in sorted(first.keys() | digests.keys())
            if first.get(name) != digests.get(name)
        ]
        if differing:
            raise agreed(
                ValueError(
                    f"state {differing} of rank {rank} is not that of rank 0, but one is saved for "
                    "all ranks. (DataLoader workers move a sampler ahead of training: save "
                    "sampler.state_dict(steps_done=...).) To save what differs by rank, collect it "
                    "with torch.distributed.all_gather_object and save the list"
                )
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
    remove(aside)  # of a save that was interrupted
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
        world_size=parts.engine.control.group.size,
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
        state=tuple(sorted(state)),
    )

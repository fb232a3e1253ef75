"""`save_checkpoint`: the ranks agree on what each of them writes; `save_job` writes it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poplar.checkpoint.collection import no_garbage_collection
from poplar.checkpoint.files.data_file import DataFile
from poplar.checkpoint.files.manifest import Manifest
from poplar.checkpoint.files.new_files import aside_name, check_no_writer
from poplar.checkpoint.files.save_job import (
    PendingSave,
    SaveJob,
    data_file_of,
    data_files,
    remove,
)
from poplar.checkpoint.files.staging import Staging
from poplar.checkpoint.frozen_base import base_of, description_of, saves_base
from poplar.checkpoint.random_state import random_state
from poplar.checkpoint.save_plan import Agreement, Content
from poplar.checkpoint.saved_values import State, digest, refused_classes, with_python_numbers
from poplar.checkpoint.training_state import (
    Checkpointed,
    TrainingParts,
    check_idle,
    model_values,
    saved_buffers,
    saved_entries,
)
from poplar.values.canonical_name import canonical
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.opaque_parameter import is_opaque_buffer, opaque_tensors

STATE = "poplar.state."
RANK = "poplar.rank."
SCALER = "poplar.scaler"


def save_checkpoint(
    folder: str | Path,
    optimizer: Checkpointed,
    *,
    state: Mapping[str, Any] | None = None,
    frozen: bool | None = None,
) -> None:
    """Save the training state in a new folder. Collective, between steps.

    Model, optimizer, plan and the random states of all ranks are saved. Nothing is gathered: every
    rank writes its part. Any plan, stage and number of ranks can load it, and so can
    `torch.distributed.checkpoint.load` without Poplar. Of a PEFT model, or on a quantised base,
    adapters are saved alone; they load into a model with the same base.

    Args:
        folder: a folder that all ranks see. It appears when the checkpoint is complete.
        state: by name, further objects with `state_dict` and `load_state_dict` (a scheduler, a
            sampler, a scaler), or values that can be pickled. Equal on all ranks.
        frozen: frozen parameters are saved, too; default: unless adapters are saved alone.

    Raises:
        FileExistsError: the folder exists, or another save is writing there.
        OSError, ValueError, RuntimeError: it cannot be saved, or a step is in progress.
        PoplarError: a trained parameter has values that are NaN or infinite.
        RankFailed: another rank failed. Nothing remains of the checkpoint.
    """
    save_now(folder, optimizer, state=state, frozen=frozen)


def save_now(
    folder: str | Path,
    optimizer: Checkpointed,
    *,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    replaces: bool = False,
    frozen: bool | None = None,
) -> None:
    """Save, and return when the checkpoint is complete. Arguments as for `Saver`."""

    def save() -> None:
        saver = Saver(optimizer, frozen=frozen)
        saver.start(folder, state=state, step=step, replaces=replaces).wait()

    optimizer.collective_calls.call("save_checkpoint()", save)


class Saver:
    """Saves the training state of one optimizer, and keeps between saves what stays the same.

    Args:
        asynchronous: what this rank writes is copied, so that training may go on meanwhile.
    """

    def __init__(
        self, optimizer: Checkpointed, *, asynchronous: bool = False, frozen: bool | None = None
    ) -> None:
        self._optimizer, self._frozen = optimizer, frozen
        self._agreement = Agreement()
        self._checked = False
        self._staging = Staging() if asynchronous else None

    @no_garbage_collection()
    def start(
        self,
        folder: str | Path,
        *,
        state: Mapping[str, Any] | None = None,
        step: int | None = None,
        replaces: bool = False,
    ) -> PendingSave:
        """Start to save; `wait` on the result. Collective.

        Args:
            step: stored in the manifest.
            replaces: an existing checkpoint is replaced once the new one is complete.
        """
        parts = self._optimizer._training_parts()
        if self._agreement.changes_of_ranks != parts.changes_of_ranks:
            self._agreement = Agreement(parts.changes_of_ranks)
        agreement = self._agreement
        control, doing = parts.engine.control, f"save_checkpoint({str(folder)!r})"
        rank = control.group.rank
        parts.reject_nonfinite(doing)

        made: list[DataFile] = []

        def prepare() -> tuple[Path, Content, dict[str, int]]:
            path = Path(os.path.abspath(folder))
            check_idle(parts, "save_checkpoint()")
            frozen = _saves_base(parts, self._frozen)
            content = content_of(parts, State.of(state or {}), frozen, rank)
            buffers = {name: digest(value) for name, value in content.buffers.items()}
            if rank == 0 and not self._checked:
                _warn_of_refused(content.entries.values)
                self._checked = True
            if rank == 0:
                made.append(_make_folder(path, replaces))
            return path, content, buffers

        pending: list[PendingSave] = []
        try:
            path, content, buffers = run_on_all_ranks(control, prepare, doing=doing)
            whose = parts.engine.buffer_rank
            agreement.agree(control, content, buffers, whose, path.name, doing)

            def start() -> None:
                if (device := parts.engine.flats[0].device).type == "cuda":
                    torch.cuda.synchronize(device)  # the thread that writes has another stream
                values = agreement.values_of(content.entries, rank)
                job = SaveJob(
                    folder=path,
                    rank=rank,
                    names=control.group.names,
                    items=agreement.by_rank,
                    values=values if self._staging is None else self._staging.copy(values),
                    metadata=agreement.metadata,
                    aliases=content.entries.aliases,
                    manifest=manifest_of(parts, content, step),
                    plan=None if parts.plan is None else json.dumps(parts.plan.to_dict(), indent=2),
                    replaces=replaces,
                    timeout_seconds=control.group.timeout.total_seconds(),
                    on_this_host=agreement.on_this_host,
                )
                own = made[0] if made else None
                is_asynchronous = self._staging is not None
                pending.append(PendingSave(job, control, own, asynchronous=is_asynchronous))

            run_on_all_ranks(control, start, doing=doing)
        except BaseException:
            for save in pending:
                save.cancel()
            for file in made:
                shutil.rmtree(file.path.parent, ignore_errors=True)
                file.close()
            raise
        pending[0].begin()
        return pending[0]


def _saves_base(parts: TrainingParts, frozen: bool | None) -> bool:
    if frozen and opaque_tensors(parts.engine.model):
        raise ValueError(
            "frozen=True, but quantised parameters cannot be loaded in place; leave frozen= out to "
            "save the adapters, and save the whole model with optimizer.save_model(frozen=True)"
        )
    return saves_base(parts.engine.model, frozen)


def content_of(parts: TrainingParts, state: State, frozen: bool, rank: int) -> Content:
    """A rank's training state, the random state of this one and, for rank 0, scaler and `state`.

    Local. `frozen` and `rank` as for `saved_entries`.
    """
    entries, device = saved_entries(parts, frozen=frozen, rank=rank), parts.engine.flats[0].device
    own_buffers: dict[str, Any] = {}
    own = {"random": random_state(device), "buffers": own_buffers}
    extra: dict[str, Any] = {f"{RANK}{rank}": own}
    if rank == 0:
        extra.update({STATE + name: value for name, value in state.values.items()})
        if parts.scaler is not None:
            extra[SCALER] = parts.scaler.state_dict()
    paths = {**entries.paths, **{name: tuple(name.split(".", 2)) for name in extra}}
    values = {name: with_python_numbers(value) for name, value in entries.values.items()}
    extra_states = {n: with_python_numbers(value) for n, value in entries.extra_states.items()}
    return Content(
        entries=replace(entries, values={**values, **extra}, paths=paths),
        state=state.digests,
        buffers={
            name: buffer
            for name, buffer in saved_buffers(parts.engine.model).items()
            if frozen or not is_opaque_buffer(buffer)
        }
        | extra_states,
        own_buffers=own_buffers,
        has_base=frozen,
    )


def _warn_of_refused(values: Mapping[str, Any]) -> None:
    """Warn of values that can be saved, but are not loaded by default."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and (classes := refused_classes(value)):
            warnings.warn(
                f"the checkpoint has {', '.join(classes)} in {name.removeprefix(STATE)!r}, which "
                "load_checkpoint refuses by default; save numbers, strings, tensors, dicts and "
                "lists instead, or load with weights_only=False",
                stacklevel=2,
            )


def _make_folder(path: Path, replaces: bool) -> DataFile:
    """Make the folder, and the file of the first rank, which shows other saves that it is used."""
    if path.exists() and not replaces:
        raise FileExistsError(
            f"{path} exists; save to another folder, or remove it first. (CheckpointManager makes "
            "a folder per step.)"
        )
    aside = aside_name(path)
    with suppress(FileExistsError):  # also a file, in which no folder can be made
        path.parent.mkdir(parents=True)
    check_no_writer(data_files(aside))
    remove(aside)  # of a save that was interrupted
    aside.mkdir()
    return DataFile(aside / data_file_of(0))


def manifest_of(parts: TrainingParts, content: Content, step: int | None) -> Manifest:
    """What describes this content, without its files."""
    import poplar

    engine = parts.engine
    base = {} if content.has_base else base_of(engine, model_values(parts))
    return Manifest(
        step=step,
        world_size=parts.engine.control.group.size,
        stage=parts.stage,
        optimizer=parts.update.name,
        versions={
            "poplar": poplar.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        computes_in={
            canonical(name): str(flat.dtype).removeprefix("torch.")
            for flat in engine.trained
            if flat.dtype is not torch.float32
            for name in flat.names
        },
        state=tuple(sorted(content.state)),
        base=description_of(engine.model, base),
    )

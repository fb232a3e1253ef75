"""`MemoryCheckpoints`: the training state of the last steps, in memory that outlives the ranks.

[Note: what survives]
torchrun ends all ranks when one fails, so state is kept in files in memory. After a step, each rank
writes its part into one of two slots in turn. A rank that is killed while it writes loses this step
only, and all ranks have the one before: a step needs all ranks, so none saves a step before all
have saved the last one. If a host is lost, other hosts have its parts if there are spares.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from poplar.checkpoint.collection import no_garbage_collection
from poplar.checkpoint.files.savers import claim, release
from poplar.checkpoint.frozen_base import saves_base
from poplar.checkpoint.load import Load, load_as, load_opened
from poplar.checkpoint.save import RANK, content_of, manifest_of
from poplar.checkpoint.save_plan import Content, check_equal_state
from poplar.checkpoint.saved_values import State
from poplar.checkpoint.training_state import Checkpointed, TrainingParts, check_idle
from poplar.comm.host_topology import Hosts, host_id
from poplar.comm.point_to_point import Message
from poplar.elastic.agent_folder import agent_folder, private_folder
from poplar.elastic.memory_state import MemoryState, files_in, find, newest_whole, path_of
from poplar.elastic.shard_file import START, Description, Mark, ShardFile, mark_in, write_shard
from poplar.values.errors import agreed
from poplar.values.schema import Count, checked
from poplar.zero.agreement import exchange_results, run_on_all_ranks
from poplar.zero.collective_calls import CollectiveCalls, collective

_LOADING = "MemoryCheckpoints.load_latest()"
_SAVING = "MemoryCheckpoints.save()"


class MemoryCheckpoints:
    """Saves the training state in memory, and loads it after a restart.

        memory = MemoryCheckpoints(optimizer, state={"sampler": sampler, "scheduler": scheduler})
        step = memory.load_latest() or checkpoints.load_latest() or 0

    `torchrun` starts all ranks again if one fails, or if hosts are lost or join. Ranks with another
    plan, stage or number load what those before have saved, as they load a checkpoint. Files belong
    to the agent of torchrun that started the rank, and last as long as it does. All methods but
    `remove` are collective.

    Args:
        optimizer: whose training state is saved.
        state: as for `save_checkpoint` and `load_checkpoint`; read at every call.
        spare_shards: on how many other hosts each rank's part is saved, too, so that as many hosts
            may be lost; at most as many as there are. At stage 0 only random states are sent.
        folder: in memory, for the ranks of this host; it must outlive them. Ranks with different
            folders count as ranks of different hosts. Only this user may be able to write to it.
            With a name, it may also be a sticky folder such as `/dev/shm`. Default: in `/dev/shm`.
        name: letters, digits, `_` and `-`. If a program saves several optimizers, as those of a
            GAN, each needs another name, under which its files are kept.

    Raises:
        ValueError: `spare_shards` is less than 0, or `name` has other characters.
        PermissionError: another user may have written to the folder, from which objects are loaded,
            or with a name can replace it in `folder`.
    """

    def __init__(
        self,
        optimizer: Checkpointed,
        *,
        state: Mapping[str, Any] | None = None,
        spare_shards: int = 0,
        folder: str | Path | None = None,
        name: str = "",
    ) -> None:
        if spare_shards < 0:
            raise ValueError(f"spare_shards must be at least 0, got {spare_shards}")
        if not re.fullmatch(r"[\w-]*", name):
            raise ValueError(f"name must consist of letters, digits, _ and -, got {name!r}")
        root = agent_folder() if folder is None else Path(os.path.abspath(folder))
        self.folder = private_folder(root, name)
        self.values: dict[str, Any] = {}
        """By name, what `load_latest` found that has no `load_state_dict`."""
        self._optimizer, self._state = optimizer, state if state is not None else {}
        self._spares = spare_shards
        self._slots: _Slots | None = None

    @property
    def collective_calls(self) -> CollectiveCalls:
        """Those of the optimizer."""
        return self._optimizer.collective_calls

    @collective
    def save(self, step: int) -> None:
        """Save the training state after `step` steps. Collective, between steps.

        This and later steps that were saved before are discarded: training has gone back from them.

        Args:
            step: a whole number, at least 0, equal on all ranks.

        Raises:
            OSError: there is too little memory; says how much is needed.
            RuntimeError: in the middle of a step.
            PoplarError: as `save_checkpoint`. The steps that have been saved stay.
            ValueError: another object saves in the same folder, or the ranks have different steps
                or values in `state`.
        """
        parts = self._optimizer._training_parts()
        parts.reject_nonfinite(_SAVING)

        def check() -> int:
            check_idle(parts, _SAVING)
            claim(self.folder, self, advice="give each of them another name=")
            number: int = checked(Count, step, "step")
            return number

        self._slots_of(parts).save(parts, check, self._state)

    def _slots_of(self, parts: TrainingParts) -> _Slots:
        """Those of the ranks that train now. Collective."""
        last = self._slots
        if last is not None and last.changes == parts.changes_of_ranks:
            return last
        self._slots = _Slots(parts, self.folder, self._spares)
        own = -1 if last is None else last.changes
        newest = max(parts.engine.control.exchange_objects(own, what=_SAVING))
        if last is not None and own == newest:  # else it had been left out
            last.keep_last_step()
        return self._slots

    def load_latest(self) -> int | None:
        """Load the newest step of which all parts are in memory on some host. Collective.

        Returns:
            The step; None if there is none. If parts of steps are in memory, a warning says which
            are missing.

        Raises:
            ValueError, RankFailed: as `load_checkpoint`.
        """
        latest, values = load_as(_LOADING, self._optimizer, self._load, self._state)
        if latest is not None:
            self.values = values
        return latest

    def remove(self) -> None:
        """Free the memory on this host: training is over. Local."""
        self._slots = None
        release(self.folder, self)
        _remove(self.folder)

    def _load(self) -> tuple[int | None, Load | None]:
        control = self._optimizer._training_parts().engine.control
        rank = control.group.rank
        self._slots = None  # their files may be removed
        found = exchange_results(control, lambda: find(self.folder), what=_LOADING)
        whole, missing = newest_whole(found)
        if whole is None:
            if missing and rank == 0:
                text = "the training state in memory is not whole: %s"
                logging.getLogger("poplar").warning(text, missing)
            _remove(self.folder)
            return None, None

        def described() -> dict[int, Description]:
            """The parts that this rank serves."""
            own = [owner for owner, server in whole.servers.items() if server == rank]
            return {o: ShardFile(path_of(self.folder, whole.slot, o)).description() for o in own}

        by_rank = exchange_results(control, described, what=_LOADING)
        by_owner = dict(sorted((o, part) for own in by_rank for o, part in own.items()))
        open_state = partial(MemoryState, self.folder, whole, rank, by_owner)
        load = load_opened(open_state, self._optimizer, self._state, _LOADING)
        _remove(self.folder, but=whole.slot)
        return whole.step, load


class _Slots:
    """Two slots of files, which the ranks write in turn until other ranks train."""

    def __init__(self, parts: TrainingParts, folder: Path, spares: int) -> None:
        """Agree on the name of the files and on who has spares. Collective."""
        self.control, self._folder = parts.engine.control, folder
        self.changes = parts.changes_of_ranks
        self._pinned = parts.engine.flats[0].device.type == "cuda"
        group, control = self.control.group, self.control
        # Their memory is free before the second slot is written.
        self._has_older = bool(files_in(folder))
        own = (*host_id(), str(folder)), uuid4().hex
        by_rank = control.exchange_objects(own, what=_SAVING)
        hosts, self._tag = Hosts.of([host for host, _ in by_rank]), by_rank[0][1]
        holders = [holders_of(hosts, owner, spares) for owner in range(group.size)]
        self._holders = holders[group.rank]
        self._held = [owner for owner, ranks in enumerate(holders) if group.rank in ranks]
        self._has_spares = any(holders)
        self._files: dict[int, tuple[ShardFile, ShardFile]] = {}
        self._saves = 0

    def keep_last_step(self) -> None:
        """Free all but the slot that was written last, by all ranks. Local."""
        if self._saves:
            _remove(self._folder, but=f"{self._tag}-{(self._saves - 1) % 2}-")

    @no_garbage_collection()
    def save(
        self, parts: TrainingParts, check: Callable[[], int], state: Mapping[str, Any]
    ) -> None:
        """Save a step into the slot that was not written last. Collective.

        If it fails on a rank, the next save writes the same slot on all ranks.

        Args:
            check: returns the step, or raises on this rank.
        """
        rank, engine = self.control.group.rank, parts.engine
        has_all = engine.strategy.replicates_state
        base = saves_base(engine.model, None)
        contents: dict[int, Content] = {}
        added: list[State] = []

        def prepare() -> tuple[int, Mapping[str, int]]:
            step = check()
            added.append(State.of(state))
            contents[rank] = content_of(parts, added[0], base, rank)
            return step, added[0].digests

        prepared = exchange_results(self.control, prepare, what=_SAVING)
        by_name, steps = self.control.group.by_name, [step for step, _ in prepared]
        if len(set(steps)) > 1:
            raise agreed(ValueError(f"the ranks save different steps; by rank: {by_name(steps)}"))
        check_equal_state(by_name([digests for _, digests in prepared]))
        step = steps[rank]
        if self._saves == 1:  # all ranks have saved a step, so nothing older is needed
            _remove(self._folder, but=self._tag)
            self._has_older = False
        contents[rank].own_buffers.update(contents[rank].buffers)
        by_rank = {rank: contents[rank].entries.values[f"{RANK}{rank}"]}
        if self._has_spares and has_all:
            by_rank = dict(enumerate(self.control.exchange_objects(by_rank[rank], what=_SAVING)))

        def write() -> Mark:
            """Returns the mark of this rank's own part."""
            held = self._held if has_all else ()
            spares = {owner: content_of(parts, added[0], base, owner) for owner in held}
            written: dict[int, Mark] = {}
            for owner, content in (contents | spares).items():
                entries, manifest = content.entries, manifest_of(parts, content, step)
                own = {**entries.values, f"{RANK}{owner}": by_rank[owner]}
                described = Description({}, own, entries.paths, entries.aliases, manifest)
                files, ranks = self._reserved(owner), self.control.group.size
                written[owner] = write_shard(files, step, ranks, described)
            return written[rank]

        marks = exchange_results(self.control, write, what=_SAVING)
        if self._has_spares and not has_all:
            self._send_spares(marks)
        self._saves += 1
        self._discard_from(step)

    def _discard_from(self, step: int) -> None:
        """Discard this and later steps that were saved before: training has gone back. Local."""

        def is_discarded(mark: Mark | None) -> bool:
            return mark is not None and mark.step >= step

        for other in (self._next_files(owner)[0] for owner in self._files):
            if is_discarded(other.mark):
                other.begin()
        # Those of other objects; all ranks of this host do so at the same time.
        for path in files_in(self._folder) if self._has_older else ():
            if not path.name.startswith(self._tag) and is_discarded(mark_in(path)):
                path.unlink(missing_ok=True)

    def _next_files(self, owner: int) -> tuple[ShardFile, ShardFile]:
        """The files with a rank's part: the one to write now, and the one to write next."""
        if owner not in self._files:
            paths = [path_of(self._folder, f"{self._tag}-{slot}", owner) for slot in (0, 1)]
            first, second = (ShardFile(path, pinned=self._pinned) for path in paths)
            self._files[owner] = first, second
        first, second = self._files[owner]
        return (second, first) if self._saves % 2 else (first, second)

    def _reserved(self, owner: int) -> Sequence[ShardFile]:
        """Those of `_next_files` that get memory now, so that too little of it shows early."""
        return self._next_files(owner)[: 1 if self._has_older else 2]

    def _send_spares(self, marks: Sequence[Mark]) -> None:
        """Copy what this rank has written to its holders. `marks`: by rank. Collective."""

        def reserve() -> None:
            for owner in self._held:
                for file in self._reserved(owner):
                    file.reserve(marks[owner].end)

        run_on_all_ranks(self.control, reserve, doing=_SAVING)
        rank = self.control.group.rank
        sent = self._next_files(rank)[0].bytes[START : marks[rank].end]
        messages = [Message(holder, sent, incoming=False) for holder in self._holders]
        for owner in self._held:
            file = self._next_files(owner)[0]
            file.begin()
            messages.append(Message(owner, file.bytes[START : marks[owner].end], incoming=True))
        self.control.send_and_receive(messages, what=_SAVING)
        for owner in self._held:
            self._next_files(owner)[0].finish(marks[owner])


def holders_of(hosts: Hosts, owner: int, spares: int) -> list[int]:
    """The ranks that have a spare of a rank's part: one on each of the next hosts."""
    host = hosts.host_of(owner)
    place = hosts.members[host].index(owner)
    others = hosts.members[host + 1 :] + hosts.members[:host]
    return [ranks[place % len(ranks)] for ranks in others[:spares]]


def _remove(folder: Path, but: str = "-") -> None:
    """Remove the files in a folder whose name does not start with `but`."""
    for path in files_in(folder):
        if not path.name.startswith(but):
            path.unlink(missing_ok=True)

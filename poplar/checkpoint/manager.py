"""`CheckpointManager`: the checkpoints of one training, a folder per step."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from poplar.checkpoint.files.new_files import aside_name
from poplar.checkpoint.files.save_job import PendingSave, SaveJob, discard, remove, replaced_name
from poplar.checkpoint.files.savers import claim
from poplar.checkpoint.load import Load, load_as, load_now
from poplar.checkpoint.save import Saver
from poplar.checkpoint.training_state import Checkpointed
from poplar.values.schema import Count, checked
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.collective_calls import CollectiveCalls, collective

_NAME = "step-{step:08d}"
_FINISHED = re.compile(r"step-(\d{8,})(\.replaced)?")


class CheckpointManager:
    """Saves checkpoints as `folder/step-00001000`, loads the last one, and removes old ones.

        checkpoints = poplar.CheckpointManager("checkpoints", optimizer, keep=3)
        step = checkpoints.load_latest() or 0

    A process may end at any moment: the last complete checkpoint stays, and what is incomplete is
    never loaded. All methods are collective.

    Args:
        folder: a folder that all ranks see; it is made. If a program saves several optimizers, as
            those of a GAN, each needs another folder.
        optimizer: whose training state is saved.
        state: as for `save_checkpoint` and `load_checkpoint`; read at every call.
        keep: the number of checkpoints that are kept: the one that was saved last and those with
            the highest steps. None: all.
        asynchronous: `save` returns when the state has been copied to host memory, of the size of
            what this rank writes, and a thread writes the copy.
        frozen: as for `save_checkpoint`.

    Raises:
        ValueError: `keep` is less than 1.
    """

    def __init__(
        self,
        folder: str | Path,
        optimizer: Checkpointed,
        *,
        state: Mapping[str, Any] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
        frozen: bool | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}; None keeps all checkpoints")
        self.folder = Path(os.path.abspath(folder))
        self.values: dict[str, Any] = {}
        """By name, what `load_latest` found that has no `load_state_dict`."""
        self._optimizer = optimizer
        self._state = state if state is not None else {}
        self._keep = keep
        self._asynchronous = asynchronous
        self._saver = Saver(optimizer, asynchronous=asynchronous, frozen=frozen)
        self._pending: PendingSave | None = None

    @property
    def collective_calls(self) -> CollectiveCalls:
        """Those of the optimizer."""
        return self._optimizer.collective_calls

    @collective
    def save(self, step: int) -> None:
        """Save the training state after `step` steps. Collective, between steps.

        It first waits for an earlier asynchronous save, as a change of the ranks that train does. A
        checkpoint of the same step is replaced.

        Args:
            step: a whole number, at least 0, equal on all ranks.

        Raises:
            OSError, ValueError, RuntimeError, RankFailed: as `save_checkpoint`; also for an earlier
                asynchronous save.
            TypeError: `step` is no whole number.
            ValueError: another object saves in the same folder.
        """
        self._finish()
        parts = self._optimizer._training_parts()
        control = parts.engine.control

        def prepare() -> int:
            number: int = checked(Count, step, "step")
            claim(self.folder, self, advice="give each CheckpointManager another folder")
            if control.group.rank == 0:
                self._clean()
            return number

        number = run_on_all_ranks(control, prepare, doing="CheckpointManager.save()")
        path = self.folder / _NAME.format(step=number)
        self._pending = self._saver.start(path, state=self._state, step=number, replaces=True)
        if self._asynchronous:
            parts.unfinished[self] = self._finish
        else:
            self._finish()

    @collective
    def wait(self) -> None:
        """Wait until the last save is complete, and remove old checkpoints. Collective.

        Raises:
            OSError, RankFailed: it failed, and the earlier checkpoints are still there; or it is
                complete, and older ones could not be removed.
        """
        self._finish()

    def _finish(self) -> None:
        """As `wait`, also as part of a call."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        parts = self._optimizer._training_parts()
        parts.unfinished.pop(self, None)
        pending.wait()
        if self._keep is not None:
            run_on_all_ranks(
                parts.engine.control,
                lambda: self._prune(pending.job),
                doing="removing checkpoints",
            )

    def load_latest(self, *, weights_only: bool = True) -> int | None:
        """Load the checkpoint with the highest step. Collective, between steps.

        Args:
            weights_only: as for `load_checkpoint`.

        Returns:
            Its step; None if there is no checkpoint.

        Raises:
            DamagedCheckpoint: it is damaged. To go on from an earlier one, move its folder away.
            ValueError, RankFailed: as `load_checkpoint`.
        """
        load = partial(self._load_latest, weights_only)
        latest, values = load_as("load_latest()", self._optimizer, load, self._state)
        if latest is not None:
            self.values = values
        return latest

    def _load_latest(self, weights_only: bool) -> tuple[int | None, Load | None]:
        """The step of the latest checkpoint, and what has been loaded of it."""
        self._finish()
        control = self._optimizer._training_parts().engine.control
        found = run_on_all_ranks(control, self._finished, doing="load_latest()")
        latest = control.exchange_objects(max(found, default=None), what="load_latest()")[0]
        if latest is None:
            return None, None
        path = found.get(latest, self.folder / _NAME.format(step=latest))
        return latest, load_now(path, self._optimizer, self._state, weights_only=weights_only)

    def _clean(self) -> None:
        """Make the folder, and remove what is incomplete and not written by another program."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("step-*.incomplete"):
            discard(leftover)

    def _finished(self) -> dict[int, Path]:
        """The complete checkpoints by step."""
        if not self.folder.exists():
            return {}
        found: dict[int, Path] = {}
        for path in sorted(self.folder.iterdir(), reverse=True):  # `.replaced` comes first
            if match := _FINISHED.fullmatch(path.name):
                found[int(match[1])] = path
        return found

    def _prune(self, saved: SaveJob) -> None:
        """Remove all but `keep` checkpoints on the first rank, never the one just saved."""
        if saved.rank != 0 or self._keep is None:
            return
        others = sorted(self._finished().keys() - {saved.manifest.step}, reverse=True)
        try:
            for step in others[self._keep - 1 :]:
                self._remove(self.folder / _NAME.format(step=step))
        except OSError as error:
            raise OSError(
                error.errno,
                f"the checkpoint {str(saved.folder)!r} is complete, but older ones could not be "
                f"removed: {error.strerror}",
                error.filename,
            ) from error

    def _remove(self, path: Path) -> None:
        aside = aside_name(path)  # no longer loaded, even if its removal is interrupted
        if path.exists():
            path.rename(aside)
        for old in (aside, replaced_name(path)):
            with contextlib.suppress(OSError):
                remove(old)

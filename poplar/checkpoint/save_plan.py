"""`Agreement`: which rank writes what of a checkpoint, and what all ranks must save alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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

from poplar.checkpoint.training_state import Entries
from poplar.comm import Control
from poplar.comm.host_topology import host_id
from poplar.values.errors import agreed


@dataclass(frozen=True, kw_only=True)
class Content:
    """What this rank adds to a checkpoint."""

    entries: Entries
    state: Mapping[str, int]
    """By name in `state`, a digest of the value, which is equal on all ranks."""
    buffers: Mapping[str, Any]
    """By name, the buffers and extra states of modules, which may differ between ranks."""
    own_buffers: dict[str, Any]
    """Part of `entries`: of `buffers`, what differs from those of all, once these are known."""
    has_base: bool
    """Whether frozen parameters are part of `entries`."""


class Agreement:
    """Which rank writes what. Kept between saves: a rank sends its part only if it has changed.

    Args:
        changes_of_ranks: as in `TrainingParts`; other ranks need another agreement.
    """

    metadata: Metadata
    on_this_host: Sequence[int]
    """The ranks on the host of this rank."""

    def __init__(self, changes_of_ranks: int = 0) -> None:
        self.changes_of_ranks = changes_of_ranks
        self._by_rank: list[tuple[list[WriteItem], Mapping[str, Any]]] = []
        self._plans: list[SavePlan] = []

    def values_of(self, entries: Entries, rank: int) -> dict[MetadataIndex, Any]:
        """By item that a rank writes, its part of a value."""
        values = dict(entries.values)
        return {item.index: _resolve(values, item) for item in self.by_rank[rank]}

    @property
    def by_rank(self) -> list[Sequence[WriteItem]]:
        """By rank, what it writes."""
        return [plan.items for plan in self._plans]

    def agree(
        self,
        control: Control,
        content: Content,
        buffers: Mapping[str, int],
        buffer_rank: int,
        name: str,
        doing: str,
    ) -> None:
        """Exchange what has changed, and set `content.own_buffers`. Collective.

        Args:
            buffers: the digests of its `buffers`.
            buffer_rank: the rank whose buffers are saved for all.
            name: of the checkpoint's folder.

        Raises:
            ValueError: the ranks have different values in `state`, or save to different folders.
        """
        rank, entries = control.group.rank, content.entries
        part = create_default_local_save_plan(dict(entries.values), rank == 0).items, entries.paths
        is_known = bool(self._by_rank) and self._by_rank[rank] == part
        own = name, host_id(), content.state, buffers, None if is_known else part
        received = control.exchange_objects(own, what=doing)
        names = [name for name, *_ in received]
        if names != [name] * len(names):
            by_rank = control.group.by_name(names)
            raise agreed(ValueError(f"the ranks save different checkpoints; by rank: {by_rank}"))
        self.on_this_host = [r for r, (_, host, *_) in enumerate(received) if host == own[1]]
        if any(changed is not None for *_, changed in received):
            self._set([changed or self._by_rank[r] for r, (*_, changed) in enumerate(received)])
        check_equal_state(control.group.by_name([of_state for _, _, of_state, *_ in received]))
        of_all = received[buffer_rank][3]
        differing = {n: b for n, b in content.buffers.items() if buffers[n] != of_all.get(n)}
        content.own_buffers.update(
            {n: b.cpu() if isinstance(b, Tensor) else b for n, b in differing.items()}
        )

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


def check_equal_state(by_rank: Mapping[int, Mapping[str, int]]) -> None:
    """Check that all ranks save the same `state`, given its digests."""
    first_rank, first = next(iter(by_rank.items()))
    for rank, digests in by_rank.items():
        differing = [
            name
            for name in sorted(first.keys() | digests.keys())
            if first.get(name) != digests.get(name)
        ]
        if differing:
            raise agreed(
                ValueError(
                    f"state {differing} of rank {rank} is not that of rank {first_rank}, but one "
                    "is saved for all ranks. (DataLoader workers move a sampler ahead of training: "
                    "save sampler.state_dict(steps_done=...).) To save what differs by rank, "
                    "collect it with torch.distributed.all_gather_object and save the list"
                )
            )


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

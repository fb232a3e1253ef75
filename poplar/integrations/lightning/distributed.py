"""What every strategy of Lightning on several processes does: launch, process group, messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from poplar.comm.deadline import WATCHDOG_MARGIN


class DistributedStrategy(ParallelStrategy):
    """One process per device, started by a launcher such as torchrun, else by Lightning.

    Args:
        timeout: of Poplar's waits, before that of the process group; None: the defaults.
        backend: of the process group; None: by the device.
    """

    def __init__(self, timeout: timedelta | None, backend: str | None) -> None:
        super().__init__()
        self.num_nodes = 1
        self._timeout, self._backend = timeout, backend

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning synchronizes what is logged."""
        return True

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, len(self.parallel_devices), self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Tell the environment the ranks, if it does not know them from its launcher."""
        assert self.parallel_devices is not None
        local = len(self.parallel_devices)
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * local + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * local)
        vars(rank_zero_only)["rank"] = self.global_rank

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
        options: dict[str, Any] = {}
        if self._timeout is not None:
            options["timeout"] = self._timeout + WATCHDOG_MARGIN
        if self.root_device.type != "cpu":
            options["device_id"] = self.root_device
        assert self.cluster_environment is not None
        _init_dist_connection(self.cluster_environment, backend, **options)

    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            devices = None if self.root_device.type == "cpu" else [self.root_device.index]
            dist.barrier(device_ids=devices)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum, mean, ... over ranks of a tensor; other values are unchanged."""
        if not isinstance(tensor, Tensor):
            return tensor
        if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.double()  # the mean of counts is no integer
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

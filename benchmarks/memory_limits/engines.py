"""Engines that train a model which no rank can hold, each built as its documentation says.

Poplar and FSDP2 take a model on `meta` and give every rank its part. DeepSpeed divides each module
as soon as it is created (`zero.Init`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from head_to_head.engine import Configuration, Engine
from head_to_head.poplar_engine import Poplar
from torch import nn

from poplar import HeteroZeroOptimizer

if TYPE_CHECKING:
    from memory_limits.task import GrowingLlama


class PoplarFromMeta(Poplar):
    """Built from `meta`; a plan or even shares."""

    def __init__(self, task: GrowingLlama, configuration: Configuration, rank: int) -> None:
        Engine.__init__(self, task, configuration, rank)
        self.optimizer = HeteroZeroOptimizer(
            task.new_model(),
            torch.optim.AdamW,
            plan=configuration.plan,
            communicator="process_group",
            compute_dtype=torch.float32,
            device="cpu",
            lr=task.learning_rate,
        )


def new_engine(task: GrowingLlama, configuration: Configuration, rank: int) -> Engine:
    """The engine of a configuration. Collective.

    Raises:
        ImportError: the engine is not installed.
    """
    if configuration.provider == "poplar":
        return PoplarFromMeta(task, configuration, rank)
    if configuration.provider == "fsdp2":
        return _fsdp2(task, configuration, rank)
    return _deepspeed(task, configuration, rank)


def _fsdp2(task: GrowingLlama, configuration: Configuration, rank: int) -> Engine:
    from head_to_head.torch_engines import FSDP2

    class FSDP2FromMeta(FSDP2):
        """Sharded on `meta`; then every rank allocates and fills its part."""

        def distribute(self, model: nn.Module) -> nn.Module:
            model = super().distribute(model)
            model.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().normal_(std=0.02)
            return model

    return FSDP2FromMeta(task, configuration, rank)


def _deepspeed(task: GrowingLlama, configuration: Configuration, rank: int) -> Engine:
    from head_to_head.deepspeed_engine import DeepSpeed, deepspeed

    class DeepSpeedFromInit(DeepSpeed):
        """Each module is divided as soon as it is created."""

        def new_model(self) -> nn.Module:
            with deepspeed.zero.Init(config_dict_or_path=self.config(), dtype=torch.float32):
                return task.new_real_model()

    return DeepSpeedFromInit(task, configuration, rank)

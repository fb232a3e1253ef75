"""What is looked at in the steps of one model besides its gradient: model, data, loss and state.

An engine calls these methods at the same places of every step. Most of them look at the first steps
only, where most mistakes show.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from poplar.comm import Control
from poplar.zero.checks.first_batches import FirstBatches
from poplar.zero.checks.forward_state import ForwardStateCheck
from poplar.zero.checks.loss_mean import FirstLossCheck
from poplar.zero.checks.model_checks import batch_norms, reject_batch_norm, warn_of_outside
from poplar.zero.checks.model_structure import ModelStructure
from poplar.zero.checks.replica_check import ReplicaCheck
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.strategy import Strategy


class StepChecks:
    """The checks of the steps of one model."""

    def __init__(
        self,
        model: nn.Module,
        control: Control,
        *,
        looking: int,
        allow_forward_state: bool,
        flats: Sequence[FlatParameter] = (),
        strategy: Strategy | None = None,
    ) -> None:
        """
        Args:
            looking: the rank that looks at the loss and at the lengths of its samples.
            allow_forward_state: ranks may have state of their own.
            strategy: has the values of `flats`; None: another engine has the parameters.
        """
        looks = control.group.rank == looking
        self._model, self._control = model, control
        self._batch_norms = batch_norms(model)
        self._is_first = True
        self._allows_forward_state = allow_forward_state
        self.batches = FirstBatches(control, looks=looks)
        self.loss = FirstLossCheck(looks=looks)
        self._looks_at_graph = looks and control.group.size > 1
        self.follow(flats, strategy)

    def follow(self, flats: Sequence[FlatParameter], strategy: Strategy | None) -> None:
        """Look at these parameters from now on, as from the first step on."""
        self.loss.may_read(strategy is not None and not strategy.shards_parameters)
        options: Any = {"flats": flats, "strategy": strategy, "allowed": self._allows_forward_state}
        self.forward_state = ForwardStateCheck(self._model, self._control, **options)
        trained = [flat for flat in flats if strategy is not None and flat.trained]
        self.replicas = ReplicaCheck(trained, self._control, strategy)

    def expect_artificial_data(self) -> None:
        """Look at neither data, loss and state nor the mode of the model; for measurements."""
        self._is_first = self._looks_at_graph = False
        for check in (self.batches, self.loss, self.forward_state):
            check.skip()

    def open_step(self) -> None:
        """Note the state before a step; raise if a BatchNorm is not allowed. Local."""
        reject_batch_norm(self._batch_norms, allowed=self._allows_forward_state)
        self.forward_state.open()

    def look_at_graph(self, loss: Tensor, *, stacklevel: int) -> None:
        """Warn if the first loss, before its backward, trains more than the model. Local."""
        if self._looks_at_graph:
            self._looks_at_graph = False
            warn_of_outside(self._model, loss, stacklevel=stacklevel + 1)

    def check_structure(
        self, structure: ModelStructure, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Check that the optimizer still trains the model as it is. Local."""
        structure.check(groups)
        if self._is_first and not self._model.training and self._control.group.rank == 0:
            warnings.warn(
                "the model is in evaluation mode, so dropout is off: call model.train() before "
                "training (from_pretrained() returns models in evaluation mode)",
                stacklevel=5,
            )
        self._is_first = False

"""`TrainerOptimizer`: a `HeteroZeroOptimizer` as `Trainer` handles optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from poplar.optimizer import HeteroZeroOptimizer
from poplar.zero.collective_calls import collective
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.optimizers.granularity import OptimizerFactory
from poplar.zero.steps.evaluation import Evaluation
from poplar.zero.steps.step_result import StepResult


class TrainerOptimizer(HeteroZeroOptimizer):
    """Takes the call of `step()` that `Trainer` makes after a `train_step` as its end.

    Its param groups are parts of those of `Trainer`: empty ones are left out, and embeddings stand
    apart if `Trainer` would keep their state in 32 bits.

    Args:
        params: param groups, as `Trainer.create_optimizer` forms them.
        owner: the model; not named `model`, which `Trainer` would take for the parameters.
        optimizer_class: the class of the update.
        engine: further arguments of `HeteroZeroOptimizer`.
        **options: of `optimizer_class`; trainers read the learning rate among them.
    """

    # Keeps `Accelerator.prepare` from wrapping it, which would load its state dict.
    _is_accelerate_prepared = True

    result: StepResult | None = None
    """Of the last step."""
    _is_in_step = False
    _completed = True
    _may_skip = False

    def __init__(
        self,
        params: Any,
        *,
        owner: nn.Module,
        optimizer_class: OptimizerFactory,
        engine: Mapping[str, Any],
        **options: Any,
    ) -> None:
        apart = _kept_in_32_bits(owner, optimizer_class, options)
        in_32_bits = {**options, "optimizer_class": optimizer_class, "optim_bits": 32}
        self._sizes = [len(group["params"]) for group in params]
        self._parts: list[tuple[int, list[int]]] = []
        """By own param group: the group of `Trainer`, and positions of parameters in it."""
        groups = []
        for index, group in enumerate(params):
            for positions, is_apart in _parts_of(group["params"], apart):
                members = [group["params"][position] for position in positions]
                groups.append({**(in_32_bits if is_apart else {}), **group, "params": members})
                self._parts.append((index, positions))
        super().__init__(owner, optimizer_class, params=groups, **engine, **options)
        self._skips_nonfinite = engine.get("on_nonfinite") == "skip"

    def states_of_trainer(
        self, state: Mapping[str, Any], schedule: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """State dicts that `Trainer` has saved, with the param groups of this optimizer.

        Args:
            state: of its optimizer.
            schedule: of its scheduler, where lists by param group are named after learning rates.

        Raises:
            ValueError: they have other parameters.
        """
        saved = state["param_groups"]
        sizes = [len(group["params"]) for group in saved]
        if sizes != self._sizes:
            raise ValueError(
                f"the saved optimizer has param groups of {sizes} parameters, but here they are of "
                f"{self._sizes}; use the same model and adapters"
            )
        groups = [
            {**saved[index], "params": [saved[index]["params"][position] for position in positions]}
            for index, positions in self._parts
        ]
        by_group = {
            name: [values[index] for index, _ in self._parts]
            for name, values in schedule.items()
            if "lr" in name and isinstance(values, list)
        }
        return {**state, "param_groups": groups}, {**schedule, **by_group}

    def train_step(self, *args: Any, **kwargs: Any) -> StepResult:
        """As of the base class. Collective."""
        self._is_in_step = True
        try:
            result = super().train_step(*args, **kwargs)
        finally:
            self._is_in_step = False
        scaler = kwargs.get("scaler") or self._training.scaler
        self._may_skip = self._skips_nonfinite or scaler is not None
        self.result, self._completed = result, False
        return result

    @collective
    @torch.no_grad()
    def loss_before_step(self, loss_fn: LossFunction, batches: Iterable[Any]) -> float:
        """As `evaluate`, with the same weight for all batches, which may be of the next step.

        Collective.
        """
        training = self._training
        loss_fn = training.calls.of_user(loss_fn)
        return Evaluation(training.engine, loss_fn, lambda _: 1.0, training.splitter).run(batches)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Does nothing after `train_step`, which has updated the parameters.

        Raises:
            RuntimeError: there was no `train_step` since the last call.
        """
        if self._is_in_step:
            return super().step(closure)
        if self._completed:
            raise RuntimeError(
                "optimizer.step() without a training_step: PoplarTrainer.training_step runs the "
                "passes and the update of a step; call it once per step"
            )
        self._completed = True
        return None

    step.hooked = True  # type: ignore[attr-defined]  # torch does not run the hooks around it

    @property
    def step_was_skipped(self) -> bool:
        """The step was not applied, so the schedule does not advance; `Accelerator` asks for it.

        Without a loss scale and with `on_nonfinite="raise"`, such a step ends training, and nothing
        is read from the device.
        """
        return self._may_skip and self.result is not None and self.result.skipped


def _kept_in_32_bits(
    model: nn.Module, optimizer_class: OptimizerFactory, options: Mapping[str, Any]
) -> set[int]:
    """Ids of the weights of embeddings, if `Trainer` would keep their state in 32 bits.

    It tells bitsandbytes so, which looks for the parameter itself and would not find its shards.
    """
    if "bitsandbytes" not in str(optimizer_class) or options.get("optim_bits") != 8:
        return set()
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _parts_of(params: Sequence[Any], apart: Collection[int]) -> Iterator[tuple[list[int], bool]]:
    """Positions of the parameters of a group: first those that stay together, then those apart."""
    for is_apart in (False, True):
        positions = [at for at, p in enumerate(params) if (id(p) in apart) is is_apart]
        if positions:
            yield positions, is_apart

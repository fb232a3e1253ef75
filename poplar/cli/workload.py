"""What the command line profiles and verifies: a function that returns a `Workload`.

    # train.py
    def workload():
        return Workload(model, loss_fn, example_batch)

    poplar profile train.py:workload -o cluster.json

Every rank calls the function and must build the same model; `load` seeds torch before the call.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from poplar.data import pytree
from poplar.zero.weights.materialization import is_on_meta

_SEED = 0


@dataclass(frozen=True)
class Workload:
    """A model, its loss function, an example batch and an optimizer."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    """`loss_fn(model, batch)` returns the loss of the batch, as for `train_step`."""
    example_batch: Any
    """A pytree of tensors with samples along dim 0, or what `CollateMicroBatches(collate)` makes of
    samples. Samples are repeated where more are needed."""
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_arguments: Mapping[str, Any] = field(default_factory=dict)
    """As for `HeteroZeroOptimizer`, such as `lr`, `units`, `compute_dtype`, `weights`, `device`."""
    weight: Callable[[Any], Any] | None = None
    """As for `train_step`, such as `poplar.tokens()`; None: the number of samples."""
    loss: Literal["mean", "sum", "global_mean"] = "mean"
    """As for `train_step`."""

    def __post_init__(self) -> None:
        pytree.samples_in(self.example_batch)  # raises unless it is a batch

    def to(self, device: torch.device, *, whole: bool) -> Workload:
        """This workload on `device`; the model is moved in place.

        Args:
            whole: False: a model on `meta`, or one for which the optimizer has `device=`, is left
                to the optimizer, which gives it to the ranks in parts.

        Raises:
            ValueError: the whole model is wanted, but it is on `meta`.
        """
        batch = pytree.to(self.example_batch, device)
        moved, arguments = replace(self, example_batch=batch), self.optimizer_arguments
        if is_on_meta(self.model):
            if whole:
                raise ValueError(
                    "this command needs the whole model on every rank, but parameters of "
                    "Workload.model are on `meta`; return a smaller one that is built without "
                    "poplar.parameters_on_meta()"
                )
            return replace(moved, optimizer_arguments={"device": device, **arguments})
        if whole or "device" not in arguments:
            self.model.to(device)
        return moved

    def batch_of(self, samples: int) -> Any:
        """A batch of exactly `samples` samples: those of the example, repeated as needed."""
        available = pytree.samples_in(self.example_batch)
        return pytree.select(self.example_batch, [index % available for index in range(samples)])


def load(address: str) -> Workload:
    """Call the function at `address`, as in `train.py:workload`.

    The folder of the file is added to `sys.path`, as when Python runs the file. The function takes
    no arguments and returns a `Workload`, or the tuple `(model, loss_fn, example_batch)`.

    Raises:
        ValueError: there is no such file or function, or it returns something else.
        Exception: raised by the file or the function.
    """
    where, colon, name = address.rpartition(":")
    if not colon or not where.endswith(".py") or not name:
        raise ValueError(
            f"expected a file, a colon and a function, as in train.py:workload; got {address!r}"
        )
    torch.manual_seed(_SEED)
    module = _run_file(Path(where))
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{where} has no function {name!r}")
    returned = function()
    if isinstance(returned, Workload):
        return returned
    if isinstance(returned, tuple) and len(returned) == 3:
        return Workload(*returned)
    raise ValueError(
        f"{address} must return a poplar.cli.workload.Workload or the tuple (model, loss_fn, "
        f"example_batch), got {type(returned).__name__}"
    )


def _run_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"file {path} does not exist")
    # The bare name may be that of another module ("train", "json").
    name = f"poplar_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module

"""The graph of a model's loss on a global batch, if it computes what the model computes.

The losses and their gradients are compared. A graph has the operators of one forward pass. It does
not have the backward of a custom `torch.autograd.Function`, hooks on tensors, and whatever Python
decides anew in each pass: numbers that change, random choices, branches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from poplar.data import pytree
from poplar.programmes.graph.graph import BUFFER, INPUT, LEAVES, PARAMETER
from poplar.programmes.rules.registry import whole_call
from poplar.programmes.run.exported_graph import ExportedLoss, export_loss
from poplar.programmes.run.function_modes import HooksRefused
from poplar.programmes.run.local_execution import run_local
from poplar.system.autograd_graph import nodes_from
from poplar.system.out_of_memory import is_out_of_memory
from poplar.values.errors import NotExportable
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.optimizers.granularity import Granularity
from poplar.zero.preserved_state import model_preserved

_SAMPLES = (2, 8)
"""Fewest and most samples in a compared batch; within them, as many as the example has."""
_BATCHES = 3
"""Batches compared after the export. Python code may choose something else in each."""
_MOST_ELEMENTS = 1 << 20
"""Most elements of the parameters whose gradients are compared in a step."""
_EVERY_STEP = 256
"""Steps from one comparison to the next; the first ones are after 0, 1, 2, 4, 8, ... steps."""
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Relative differences of equal computations."""
_SMALL = 1e-3
"""Norm of a gradient, relative to that of all, below which differences are relative to all."""
_PROBED = 4096
"""Elements of a gradient that are compared, besides its norm."""
_HIDDEN = ("torch.utils.checkpoint",)
"""Modules whose `autograd.Function`s have the backward of the operators in them."""


def check_computation(
    model: nn.Module,
    loss: str,
    compute_dtype: torch.dtype | None,
    granularity: Granularity | None,
) -> None:
    """Raise unless programmes of a model can compute what its steps shall compute.

    Args:
        model: the values of its parameters are not read.
        loss: as for `train_step`.
        compute_dtype: of the parameters in a step; None: their own dtypes.
        granularity: of the optimizer; None: not known.

    Raises:
        NotExportable: a loss that is no mean, another dtype, or an optimizer that is not
            elementwise.
    """
    if granularity not in (None, "elements"):
        raise NotExportable(
            f"the optimizer has the granularity {granularity!r}, but programmes cut parameters "
            "anywhere, which needs an elementwise optimizer such as AdamW"
        )
    if loss != "mean":
        raise NotExportable(f"loss={loss!r}, but programmes need a loss that is a mean")
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if compute_dtype is not None and own != {compute_dtype}:
        raise NotExportable(
            f"compute_dtype is {compute_dtype}, but programmes compute in the dtypes of the "
            "parameters; convert the model, or pass the dtype of its parameters as compute_dtype"
        )


class CheckedExport:
    """A graph that has the loss and the gradients of the model, in the modes of its modules.

    Args:
        model: with its whole parameters; not changed.
        loss_fn: `loss_fn(model, batch)` -> mean loss.
        example: a batch of any number of samples.
        global_batch: samples of the graph's batch.

    Raises:
        NotExportable: as `export_loss`, or the graph computes something else than the model.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, example: Any, global_batch: int
    ) -> None:
        self.model = model
        self._loss_fn, self._example, self._global_batch = loss_fn, example, global_batch
        least, most = _SAMPLES
        self._few = min(max(least, pytree.samples_in(example)), most, global_batch)
        if any(t.is_meta for t in chain(model.parameters(), model.buffers())):
            raise NotExportable("the model is on meta, and a programme divides real values")
        for name, parameter in self._trained.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise NotExportable(
                    f"the parameter {name!r} has a hook, which would get only a rank's part of the "
                    "gradient"
                )
        batches = [self._samples(range(first, first + self._few)) for first in range(_BATCHES)]
        with torch.enable_grad(), model_preserved(model, self._device), self._enough_memory():
            # What a first forward keeps, such as a mask, would have no values after an export.
            self._eager_loss(batches[0])
            self.exported: ExportedLoss = self._export(range(global_batch))
            self._exported_few = self.exported
            if self._few != global_batch:
                self._exported_few = self._export(range(self._few))
            for batch in batches:
                self._compare(batch, self._trained)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @staticmethod
    def is_due(step: int) -> bool:
        """Whether to compare the graph with the model after so many steps of a training."""
        return not step & (step - 1) or not step % _EVERY_STEP

    def check(self, batch: Any, step: int) -> None:
        """Compare the graph with the model in a step of a training.

        Args:
            batch: at least one sample, of this step.
            step: number of the steps before.

        Raises:
            NotExportable: they differ.
        """
        if pytree.samples_in(batch) < self._few:  # equal samples would make ties, as in routing
            few = self._samples(range(step, step + self._few))
        else:
            few = pytree.take(batch, range(self._few))
        few = pytree.to(few, self._device)
        with model_preserved(self.model, self._device):
            self._compare(few, _smallest(self._trained, _MOST_ELEMENTS))

    @contextmanager
    def _enough_memory(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise NotExportable(
                f"this rank has too little memory to compare its graph with the model, on "
                f"{self._few} samples"
            ) from error

    def _export(self, samples: Sequence[int]) -> ExportedLoss:
        batch = self._samples(samples)
        if not pytree.rows_are_samples(batch, len(samples)):
            raise NotExportable(
                "the samples of a collated batch are not rows of its tensors, and a programme "
                "divides them along dim 0"
            )
        return export_loss(self.model, self._loss_fn, batch)

    def _samples(self, indices: Sequence[int]) -> Any:
        known = pytree.samples_in(self._example)
        return pytree.take(self._example, [index % known for index in indices])

    @property
    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _compare(self, batch: Any, trained: Mapping[str, Tensor]) -> None:
        """Compare the losses of a batch of few samples, and their gradients."""
        with torch.enable_grad():
            eager = self._eager_loss(batch)
            _refuse_custom_functions(eager)
            eager_loss, eager_probes = float(eager.detach()), _probes(eager, trained)
            del eager
            graph = self._graph_loss(batch)
        # Of the values that are computed, also under autocast.
        nodes = self._exported_few.graph.nodes.values()
        kinds = {kind.dtype for node in nodes for kind in node.outputs if kind.is_floating}
        rounding = max(_ROUNDING.get(getattr(torch, dtype), 1.0) for dtype in kinds)
        _compare_losses(float(graph.detach()), eager_loss, rounding)
        _compare_gradients(_probes(graph, trained), eager_probes, rounding)

    def _eager_loss(self, batch: Any) -> Tensor:
        with HooksRefused():
            return self._loss_fn(self.model, pytree.copied(batch))

    @property
    def fingerprint(self) -> str:
        """Equal on ranks whose graphs are the same, with constants of the same types."""
        exported = self.exported
        constants = {name: (tuple(t.shape), t.dtype) for name, t in exported.constants.items()}
        described = repr((exported.graph, sorted(constants.items())))
        return hashlib.sha256(described.encode()).hexdigest()

    def _graph_loss(self, batch: Any) -> Tensor:
        exported, model = self._exported_few, self.model
        given: dict[str, Mapping[str, Tensor]] = {
            PARAMETER: dict(model.named_parameters()),
            BUFFER: dict(model.named_buffers()),
            INPUT: exported.tensors(batch, self._device),
        }
        values: dict[str, Any] = {}
        for name, node in exported.graph.nodes.items():
            if node.operator in LEAVES:
                value = given.get(node.operator, {}).get(node.source)
                values[name] = exported.constants[name] if value is None else value
            else:
                call = whole_call(exported.graph, node)
                values[name] = run_local(call, values.__getitem__, self._device)
        loss: Tensor = values[exported.graph.output]
        return loss


def _refuse_custom_functions(loss: Tensor) -> None:
    for node in nodes_from(loss.grad_fn):
        kind = getattr(node, "_forward_cls", None)  # of functions that are written in Python
        if kind is None:
            continue
        if kind.__name__ == "BackwardHookFunction":
            raise NotExportable(
                "a module has a backward hook (register_full_backward_hook), and a graph has none"
            )
        if not kind.__module__.startswith(_HIDDEN):
            raise NotExportable(
                f"the forward pass calls the torch.autograd.Function {kind.__qualname__}, whose "
                "backward a graph does not have; use operators of torch, or torch.library"
            )


def _smallest(trained: Mapping[str, Tensor], most_elements: int) -> dict[str, Tensor]:
    """The smallest parameters with so many elements together; at least one."""
    kept: dict[str, Tensor] = {}
    for name, parameter in sorted(trained.items(), key=lambda item: item[1].numel()):
        if kept and parameter.numel() > most_elements:
            break
        kept[name] = parameter
        most_elements -= parameter.numel()
    return kept


def _probes(loss: Tensor, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norm and some elements of each parameter's gradient; float64 on the CPU."""
    if not loss.requires_grad or not trained:
        return {}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    probes = {}
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            flat = gradient.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _PROBED)].double()
            norm = torch.linalg.vector_norm(flat, dtype=torch.float64).view(1)
            probes[name] = torch.cat((norm, some)).cpu()
    return probes


def are_close(own: float, expected: float, difference: float) -> bool:
    """Whether two values differ by no more. Of two that are not finite nothing is known: True."""
    if math.isfinite(own) and math.isfinite(expected):
        return abs(own - expected) <= difference
    return not math.isfinite(own) and not math.isfinite(expected)


def _compare_losses(graph: float, eager: float, rounding: float) -> None:
    if not are_close(graph, eager, rounding * max(abs(graph), abs(eager))):
        raise NotExportable(
            f"a batch has the loss {eager:.6g}, but {graph:.6g} in the graph of torch.export, "
            "which keeps Python numbers, random choices and branches of the call that it records; "
            "give what changes as a tensor or a number in the batch"
        )


def _compare_gradients(
    graph: Mapping[str, Tensor], eager: Mapping[str, Tensor], rounding: float
) -> None:
    total = math.hypot(*filter(math.isfinite, (float(probe[0]) for probe in eager.values())))
    for name in {**eager, **graph}:
        # An unused parameter has no gradient, or one of zeros.
        some = next(probes[name] for probes in (eager, graph) if name in probes)
        own, expected = (probes.get(name, torch.zeros_like(some)) for probes in (graph, eager))
        norms = float(own.norm()), float(expected.norm())
        scale = max(*norms, _SMALL * total)
        if not are_close(*norms, math.inf) or float((own - expected).norm()) > rounding * scale:
            raise NotExportable(
                f"the gradient of {name!r} is another one (norm {float(own[0]):.6g}, not "
                f"{float(expected[0]):.6g}) in the graph of torch.export, which keeps Python "
                "numbers of the call that it records and has no hooks"
            )

"""Whether an exported graph computes what the model computes: the loss and its gradients.

A graph has the operators of one forward pass. It does not have the backward of a custom
`torch.autograd.Function`, hooks on tensors, and whatever Python decides anew in each pass: numbers
that change, random choices, branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from poplar.programmes.graph.graph import BUFFER, CONSTANT, INPUT, PARAMETER
from poplar.programmes.rules.registry import local_call, strategies_of
from poplar.programmes.run.exported_graph import ExportedLoss
from poplar.programmes.run.function_modes import HooksRefused
from poplar.programmes.run.local_execution import run_local
from poplar.values.errors import NotExportable

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Relative differences of equal computations."""
_SMALL = 1e-3
"""Norm of a gradient, relative to that of all, below which differences are relative to all."""
_PROBED = 4096
"""Elements of a gradient that are compared, besides its norm."""
_HIDDEN = ("torch.utils.checkpoint",)
"""Modules whose `autograd.Function`s have the backward of the operators in them."""


class EagerComparison:
    """Compares a graph with the model and the loss function that it was exported from.

    Args:
        model, loss_fn: as for `export_loss`.
        exported: their graph, for a batch of few samples.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        exported: ExportedLoss,
    ) -> None:
        self._model, self._loss_fn, self._exported = model, loss_fn, exported

    def check(self, batch: Any, *, most_elements: int | None = None) -> None:
        """Compare the losses of a batch, and their gradients.

        Args:
            batch: with the shapes of the graph's batch.
            most_elements: of the parameters whose gradients are compared, the smallest first; at
                least one parameter. None: all gradients.

        Raises:
            NotExportable: they differ, or the forward pass registers hooks on tensors, or has an
                `autograd.Function` of its own.
        """
        named = dict(self._model.named_parameters())
        trained = _smallest(named, most_elements)
        with torch.enable_grad():
            with HooksRefused():
                eager = self._loss_fn(self._model, batch)
            _refuse_custom_functions(eager)
            eager_loss, eager_probes = float(eager.detach()), _probes(eager, trained)
            del eager
            graph = self._graph_loss(named, batch)
        rounding = max(_ROUNDING.get(dtype, 1.0) for dtype in self._dtypes())
        _compare_losses(float(graph.detach()), eager_loss, rounding)
        _compare_gradients(_probes(graph, trained), eager_probes, rounding)

    def _dtypes(self) -> Iterator[torch.dtype]:
        """The dtypes of the values that are computed, also under autocast."""
        for node in self._exported.graph.nodes.values():
            yield from (getattr(torch, kind.dtype) for kind in node.outputs if kind.is_floating)

    def _graph_loss(self, parameters: Mapping[str, Tensor], batch: Any) -> Tensor:
        graph, device = self._exported.graph, next(iter(parameters.values())).device
        tensors = self._exported.tensors(batch, device)
        buffers = dict(self._model.named_buffers())
        values: dict[str, Any] = {}
        for name, node in graph.nodes.items():
            if node.operator == PARAMETER:
                values[name] = parameters[node.source]
            elif node.operator == INPUT:
                values[name] = tensors[node.source]
            elif node.operator == BUFFER and node.source in buffers:
                values[name] = buffers[node.source]
            elif node.operator in (BUFFER, CONSTANT):
                values[name] = self._exported.constants[name]
            else:
                by_all = next(strategies_of(graph, node))
                call = local_call(graph, node, by_all.inputs, by_all.output, (1,), 0)
                values[name] = run_local(call, values.__getitem__, device)
        loss: Tensor = values[graph.output]
        return loss


def _refuse_custom_functions(loss: Tensor) -> None:
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        waiting += [following for following, _ in node.next_functions]
        if not isinstance(node, BackwardCFunction):
            continue
        kind = node._forward_cls
        if kind.__name__ == "BackwardHookFunction":
            raise NotExportable(
                "a module has a backward hook (register_full_backward_hook), and a graph has none"
            )
        if not kind.__module__.startswith(_HIDDEN):
            raise NotExportable(
                f"the forward pass calls the torch.autograd.Function {kind.__qualname__}, whose "
                "backward a graph does not have; use operators of torch, or torch.library"
            )


def _smallest(named: Mapping[str, Tensor], most_elements: int | None) -> dict[str, Tensor]:
    """Trained parameters by name."""
    trained = {name: p for name, p in named.items() if p.requires_grad}
    if most_elements is None:
        return trained
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


def _compare_losses(graph: float, eager: float, rounding: float) -> None:
    if abs(graph - eager) > rounding * max(abs(graph), abs(eager)) or (graph != graph) != (
        eager != eager
    ):
        raise NotExportable(
            f"a batch has the loss {eager:.6g}, but {graph:.6g} in the graph of torch.export, "
            "which keeps Python numbers, random choices and branches of the call that it records; "
            "give what changes as a tensor or a number in the batch"
        )


def _compare_gradients(
    graph: Mapping[str, Tensor], eager: Mapping[str, Tensor], rounding: float
) -> None:
    total = sum(float(probe[0]) ** 2 for probe in eager.values()) ** 0.5
    for name in {**eager, **graph}:
        # An unused parameter has no gradient, or one of zeros.
        some = next(probes[name] for probes in (eager, graph) if name in probes)
        own, expected = (probes.get(name, torch.zeros_like(some)) for probes in (graph, eager))
        scale = max(float(own.norm()), float(expected.norm()), _SMALL * total)
        if float((own - expected).norm()) > rounding * scale:
            raise NotExportable(
                f"the gradient of {name!r} is another one (norm {float(own[0]):.6g}, not "
                f"{float(expected[0]):.6g}) in the graph of torch.export, which keeps Python "
                "numbers of the call that it records and has no hooks"
            )

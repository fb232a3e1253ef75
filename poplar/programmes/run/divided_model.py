"""The parameters of a model under a programme: each rank keeps its own part of the sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from poplar.comm.communicator import Communicator
from poplar.programmes.graph.graph import Graph
from poplar.programmes.graph.placement import REPLICATED, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.collectives import convert, own_part


class DividedModel:
    """A model whose sharded parameters hold this rank's part, until `restore`.

    Its `state_dict` and the `forward` of each module with sharded parameters raise but in the
    contexts of `with_whole_shapes`: they would take the parts for the whole parameters.

    Args:
        comm: the transport; its ranks are those of the programme.
        model: with the same values on all ranks.
        programme: its placements of parameters.
        graph: of the loss of this model.
    """

    def __init__(
        self, comm: Communicator, model: nn.Module, programme: Programme, graph: Graph
    ) -> None:
        self._comm, self.model, self._ratios = comm, model, programme.ratios
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        """Of the whole parameters."""
        self._placements = {
            name: placement
            for name, placement in programme.parameters(graph).items()
            if isinstance(placement, Sharded)
        }
        for name in self._placements:
            self.parameters[name].data = self.own(name, self.parameters[name].data).clone()
        self._is_whole = False
        divided = {id(self.parameters[name]) for name in self._placements}
        self._handles = [
            *(
                module.register_forward_pre_hook(self._refuse_forward)
                for module in model.modules()
                if not divided.isdisjoint(map(id, module.parameters()))
            ),
            *(
                module.register_state_dict_pre_hook(self._refuse_state)
                for module in model.modules()
            ),
        ]

    @property
    def sharded(self) -> frozenset[str]:
        """Names of the parameters of which this rank holds a part."""
        return frozenset(self._placements)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor with one value per element of a parameter: a view."""
        return own_part(whole, self._placements[name], self._ratios, self._comm.group.rank)

    def whole(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor from the parts of the ranks of a sharded parameter. Collective."""
        what, placement = f"collecting {name!r}", self._placements[name]
        with torch.no_grad():
            return convert(
                self._comm, own.detach(), placement, REPLICATED, self.shapes[name], self._ratios,
                what=what,
            )  # fmt: skip

    @contextmanager
    def with_whole_shapes(
        self, made_of: Callable[[str], Tensor]
    ) -> Iterator[dict[str, nn.Parameter]]:
        """A context in which the model has other parameters in the place of the sharded ones.

        The parameters themselves stay as they are: an autograd graph of a step may still expect
        gradients in the shapes of the parts.

        Args:
            made_of: the value in the place of a parameter, by its name.
        """
        names = {id(self.parameters[name]): name for name in self._placements}
        places = [
            (module, key, parameter)
            for module in self.model.modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in names
        ]
        made = {
            name: nn.Parameter(made_of(name), requires_grad=self.parameters[name].requires_grad)
            for name in self._placements
        }
        try:
            self._is_whole = True
            for module, key, parameter in places:
                module._parameters[key] = made[names[id(parameter)]]
            yield made
        finally:
            self._is_whole = False
            for module, key, parameter in places:
                module._parameters[key] = parameter

    def repeated(self, name: str) -> Tensor:
        """A tensor of the whole shape of a sharded parameter, from this rank's part.

        The part is repeated, each time 1 % larger, so that no values are equal, and nothing is
        communicated. Zeros, if the rank has no part.
        """
        part, shape, dim = (
            self.parameters[name].data,
            self.shapes[name],
            self._placements[name].dim,
        )
        if not part.numel():
            return part.new_zeros(shape)
        places = torch.arange(shape[dim], device=part.device)
        factors = (1.0 + 0.01 * (places // part.shape[dim])).to(part.dtype)
        whole = part.index_select(dim, places % part.shape[dim])
        return whole * factors.view(-1, *(1,) * (len(shape) - dim - 1))

    def restore(self) -> None:
        """Give all parameters their whole values. Collective."""
        for name in self._placements:
            parameter = self.parameters[name]
            parameter.data = self.whole(name, parameter.data)
        self.detach()

    def detach(self) -> None:
        """Let the model run again, whatever its parameters hold."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _refuse_forward(self, module: nn.Module, arguments: Any) -> None:
        if not self._is_whole:
            raise RuntimeError(
                f"the parameters of this {type(module).__name__} are divided over ranks by a "
                "programme, so its forward has no meaning; call train_step() or evaluate() of the "
                "training, or release() it first"
            )

    def _refuse_state(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._is_whole:
            raise RuntimeError(
                "model.state_dict() would have only this rank's parts of the parameters that a "
                "programme divides over ranks; call state_dict() or save_model() of the training, "
                "on all ranks"
            )

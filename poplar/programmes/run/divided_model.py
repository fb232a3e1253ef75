"""The parameters of a model under a programme: each rank keeps its own part of the sharded ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from poplar.comm.communicator import Communicator
from poplar.programmes.graph.placement import REPLICATED, Placement, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.conversion import convert, own_part


class DividedModel:
    """A model whose sharded parameters hold this rank's part, until `restore`.

    Args:
        comm: the transport; its ranks are those of the programme.
        model: with the same values on all ranks.
        programme: its placements of parameters.

    Raises:
        ValueError: the programme places a parameter that the model does not have.
    """

    def __init__(self, comm: Communicator, model: nn.Module, programme: Programme) -> None:
        self._comm, self.model, self._ratios = comm, model, programme.ratios
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        unknown = programme.parameters.keys() - self.parameters.keys()
        if unknown:
            raise ValueError(
                f"the programme places parameters that the model does not have: {sorted(unknown)}"
            )
        self._shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self._placements = {
            name: placement
            for name, placement in programme.parameters.items()
            if isinstance(placement, Sharded)
        }
        for name in self._placements:
            self.parameters[name].data = self.own(name, self.parameters[name].data).clone()

    @property
    def sharded(self) -> frozenset[str]:
        """Names of the parameters of which this rank holds a part."""
        return frozenset(self._placements)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole parameter."""
        return self._shapes[name]

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor with one value per element of a parameter: a view."""
        placement: Placement = self._placements.get(name, REPLICATED)
        return own_part(whole, placement, self._ratios, self._comm.group.rank)

    def whole(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor from the parts of the ranks. Collective if the parameter is sharded."""
        if name not in self._placements:
            return own
        what = f"collecting {name!r}"
        shape, placement = self._shapes[name], self._placements[name]
        with torch.no_grad():
            return convert(
                self._comm, own.detach(), placement, REPLICATED, shape, self._ratios, what=what
            )

    @contextmanager
    def stand_ins(self) -> Iterator[bool]:
        """A context in which the sharded parameters have whole shapes, with this rank's values.

        These values are repeated, so that nothing is communicated. False: this rank has none of a
        parameter, whose values are zeros. The modules have other parameters inside: an autograd
        graph of a step may still expect gradients in the shapes of the parts.
        """
        names = {id(self.parameters[name]): name for name in self._placements}
        places = [
            (module, key, parameter)
            for module in self.model.modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in names
        ]
        made: dict[str, nn.Parameter] = {}
        for name, placement in self._placements.items():
            own = self.parameters[name]
            whole = _repeated(own.data, placement.dim, self._shapes[name])
            made[name] = nn.Parameter(whole, requires_grad=own.requires_grad)
        try:
            for module, key, parameter in places:
                module._parameters[key] = made[names[id(parameter)]]
            yield all(self.parameters[name].numel() for name in made)
        finally:
            for module, key, parameter in places:
                module._parameters[key] = parameter

    def restore(self) -> None:
        """Give all parameters their whole values. Collective."""
        for name in self._placements:
            parameter = self.parameters[name]
            parameter.data = self.whole(name, parameter.data)


def _repeated(part: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape from a part of `dim`, in turns, each 1 % larger: no equal values."""
    if not part.numel():
        return part.new_zeros(shape)
    places = torch.arange(shape[dim], device=part.device)
    factors = (1.0 + 0.01 * (places // part.shape[dim])).to(part.dtype)
    whole = part.index_select(dim, places % part.shape[dim])
    return whole * factors.view(-1, *(1,) * (len(shape) - dim - 1))

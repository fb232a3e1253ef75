"""`model.state_dict()` and `load_state_dict()` of a model whose parameters an engine manages.

Where parameters are sharded (stage 3), a state dict has a `ParameterShard` for each one, which
`torch.distributed.checkpoint` saves and loads. No rank ever holds a whole parameter for it.
Nothing is sent, so by [Note: differences] in `zero.stages.strategy` the values are those that the
ranks compute with; the state dict of the optimizer has the exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poplar.checkpoint.state_dicts.place import Place, elements_of, places_of
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.model_hook import ModelHook
from poplar.zero.opaque_parameter import AbsentBytes
from poplar.zero.update import ShardedUpdate


class ModelState:
    """The hooks that read and write the parameters' values in state dicts.

    Loading copies every value once. It also updates the fp32 masters of parameters in lower
    precision: to the loaded values if these have more precision than the parameters.
    """

    def __init__(self, engine: Engine, update: ShardedUpdate) -> None:
        self._engine, self._update = engine, update
        self._places = {id(place.parameter): place for place in places_of(engine.flats)}
        self._units = {flat: unit for unit in engine.units for flat in unit.flats}

    def register(self) -> Iterator[RemovableHandle]:
        """Register the hooks on all modules."""
        after_saving = ModelHook(self._after_saving)
        before_loading = ModelHook(self._before_loading)
        after_loading = ModelHook(self._after_loading)
        for module in self._engine.model.modules():
            yield module.register_state_dict_post_hook(after_saving)
            yield module.register_load_state_dict_pre_hook(before_loading)
            yield module.register_load_state_dict_post_hook(after_loading)

    def _after_saving(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace the sharded parameters by what this rank stores of them."""
        if self._engine.values.may_read(module):
            return
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            place = self._places.get(id(tensor))
            if place is not None and self._is_sharded(place) and prefix + name in state:
                state[prefix + name] = self._shard(place)
            elif isinstance(tensor, AbsentBytes):  # which has no values here, not even a shard
                for key in [key for key in state if f"{key}.".startswith(f"{prefix}{name}.")]:
                    del state[key]

    def _is_sharded(self, place: Place) -> bool:
        return self._engine.values.is_sharded(self._units[place.flat])

    def _shard(self, place: Place) -> Tensor:
        """A view of what this rank stores of a sharded parameter."""
        from poplar.checkpoint.state_dicts.shard_tensor import ParameterShard

        flat = place.flat
        # The checkpoint may be loaded in place.
        self._engine.strategy.wait_for_readers(flat)
        part, owners = place.part(flat.shard), place.owners(self._engine)
        return ParameterShard(part, place.parameter.shape, place.owned[0], owners)

    def _before_loading(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        _metadata: Any,
        _strict: bool,
        _missing: list[str],
        _unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Load sharded parameters, and the masters of all."""
        for name, parameter in module._parameters.items():
            key = prefix + name
            place, value = self._places.get(id(parameter)), state.get(key)
            if place is None or parameter is None or not isinstance(value, Tensor):
                continue
            if value.shape != parameter.shape:
                continue  # `load_state_dict` reports it
            if self._is_sharded(place):
                try:
                    self._load_shard(place, elements_of(value, value.shape, place.owned, key))
                except (TypeError, ValueError) as error:
                    errors.append(str(error))
                state[key] = parameter  # which `load_state_dict` copies to itself
                continue
            if not self._engine.values.may_write(module):
                raise RuntimeError(
                    "the model was loaded inside full_parameters(), which drops changes at stage "
                    "3 and with masters=True; use full_parameters(writeback=True), or load outside"
                )
            if _is_wider(value, place.flat):
                self._load_master(place, elements_of(value, value.shape, place.owned, key))

    def _load_shard(self, place: Place, part: Tensor) -> None:
        flat = place.flat
        self._engine.strategy.wait_for_readers(flat)
        place.part(flat.shard).copy_(part)
        if _is_wider(part, flat):
            self._load_master(place, part)

    def _load_master(self, place: Place, part: Tensor) -> None:
        place.part(place.flat.master).copy_(part)

    def _after_loading(self, module: nn.Module, *_: Any) -> None:
        """Update the masters of the module's own parameters, each once."""
        for parameter in module._parameters.values():
            place = self._places.get(id(parameter))
            if place is None or not place.flat.trained:
                continue
            if self._engine.strategy.shards_parameters and not self._is_sharded(place):
                continue  # full_parameters() does it at its end
            start, stop = place.flat.span(place.position)
            self._update.refresh(place.flat, start, stop)


def _is_wider(value: Tensor, flat: FlatParameter) -> bool:
    """Whether the values have more precision than the parameters, which have masters."""
    return flat.has_masters and value.dtype.itemsize > flat.dtype.itemsize

"""The model of a rank that the plan leaves out, whose values are old outside `full_parameters`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from poplar.zero.model_hook import EngineHook, ModelHook


class LeftOutModel:
    """Hooks that refuse state dicts and forwards of old values.

    Nothing else would tell these from current ones: a program that saves `model.state_dict()` on
    rank 0, or calls the model there, runs on when rank 0 is left out.
    """

    def __init__(self, model: nn.Module, rank: int, old: Collection[nn.Parameter]) -> None:
        """`old`: the parameters whose values are not kept."""
        why = (
            f"rank {rank} is left out by the plan, so it has no state and, outside "
            "full_parameters(), no current parameters; "
        )
        self.no_state, self._no_forward = why + _SAVE, why + _CALL
        """The errors."""
        self._model = model
        self._old = frozenset(old)
        """The parameters that have old values."""

    def register(self) -> Iterator[RemovableHandle]:
        """Register the hooks on all modules."""
        before_saving = ModelHook(self._before_saving)
        before_forward = EngineHook(self._before_forward)
        for module in self._model.modules():
            yield module.register_state_dict_pre_hook(before_saving)
            yield module.register_forward_pre_hook(before_forward, prepend=True)

    def _before_saving(self, module: nn.Module, *_: object) -> None:
        self._refuse(module, self.no_state)

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        self._refuse(module, self._no_forward)

    def _refuse(self, module: nn.Module, why: str) -> None:
        # With submodules, of which some are never called: `nn.ParameterList`, fused attention.
        if self._old and not self._old.isdisjoint(module.parameters()):
            raise RuntimeError(why)

    @contextmanager
    def current(self, names: Sequence[str]) -> Iterator[None]:
        """A context in which the parameters with these names have current values."""
        known, before = dict(self._model.named_parameters()), self._old
        self._old = before - {known[name] for name in names if name in known}
        try:
            yield
        finally:
            self._old = before


_SAVE = (
    "call this on the active ranks only (optimizer.is_active), or save by what all ranks call: "
    "poplar.save_checkpoint(), optimizer.save_model() or optimizer.full_state_dict(to=...)"
)
_CALL = (
    "call the model in `with optimizer.full_parameters():` of its optimizer, which all ranks enter "
    "(around the whole step, if another model's loss calls it), or on the active ranks only "
    "(optimizer.is_active); or let all ranks train, by leave_out='never' for the plan and for "
    "follow_drift()"
)

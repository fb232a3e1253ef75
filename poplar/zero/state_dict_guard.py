"""Makes `model.state_dict()` and `load_state_dict()` safe while parameters are sharded."""

from __future__ import annotations

from typing import Any

from torch import nn

from poplar.zero.engine import Engine
from poplar.zero.model_hook import ModelHook
from poplar.zero.update import ShardedUpdate


def guard_model_state(engine: Engine, update: ShardedUpdate) -> None:
    """Raise on saving or loading sharded parameters; copy loaded values to the masters."""

    def before_saving(module: nn.Module, *_: Any) -> None:
        engine.strategy.updated.finish()
        if not engine.may_read(module):
            raise RuntimeError(
                "the model's parameters are sharded (stage 3), so model.state_dict() would be "
                "incomplete; use `with optimizer.full_parameters(): model.state_dict()` on all "
                "ranks, or optimizer.save_model(path)"
            )

    def before_loading(module: nn.Module, *_: Any) -> None:
        engine.strategy.updated.finish()
        if not engine.may_write(module):
            raise RuntimeError(
                "the model's parameters are sharded (stage 3), so nothing can be loaded into "
                "them; load inside `with optimizer.full_parameters(writeback=True):` on all ranks"
            )

    def after_loading(*_: Any) -> None:
        if not engine.strategy.shards_parameters:
            for flat in engine.trained:
                update.refresh(flat)

    saving, loading, loaded = map(ModelHook, (before_saving, before_loading, after_loading))
    for module in engine.model.modules():
        engine.hooks.append(module.register_state_dict_pre_hook(saving))
        engine.hooks.append(module.register_load_state_dict_pre_hook(loading))
        engine.hooks.append(module.register_load_state_dict_post_hook(loaded))

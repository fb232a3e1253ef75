"""Makes `model.state_dict()` and `load_state_dict()` safe while parameters are sharded."""

from __future__ import annotations

from typing import Any

from poplar.zero.engine import Engine
from poplar.zero.update import ShardedUpdate


def guard_model_state(engine: Engine, update: ShardedUpdate) -> None:
    """Raise on saving or loading sharded parameters; copy loaded values to the masters."""

    def before_saving(*_: Any) -> None:
        engine.strategy.updated.finish()
        if not engine.values_are_readable:
            raise RuntimeError(
                "the model's parameters are sharded (stage 3), so model.state_dict() would be "
                "incomplete; use `with optimizer.full_parameters(): model.state_dict()` on all "
                "ranks, or optimizer.save_model(path)"
            )

    def before_loading(*_: Any) -> None:
        engine.strategy.updated.finish()
        if not engine.values_are_writable:
            raise RuntimeError(
                "the model's parameters are sharded (stage 3), so nothing can be loaded into "
                "them; load inside `with optimizer.full_parameters(writeback=True):` on all ranks"
            )

    def after_loading(*_: Any) -> None:
        if not engine.strategy.shards_parameters:
            for flat in engine.trained:
                update.refresh(flat)

    for module in engine.model.modules():
        engine.hooks.append(module.register_state_dict_pre_hook(before_saving))
        engine.hooks.append(module.register_load_state_dict_pre_hook(before_loading))
        engine.hooks.append(module.register_load_state_dict_post_hook(after_loading))

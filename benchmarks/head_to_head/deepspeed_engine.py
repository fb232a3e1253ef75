"""DeepSpeed's ZeRO stages 0 to 3, on CPU ranks and gloo."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch

from head_to_head.engine import Configuration, Engine, micro_batches
from head_to_head.task import Batch, Task

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")

try:
    import deepspeed
except ImportError as missing:
    raise ImportError(f"DeepSpeed is not installed ({missing}); `make peers` does that") from None

# DeepSpeed would compile this operator at start, which takes minutes on a slow rank. Only inference
# uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel(logging.ERROR)
# DeepSpeed calls two collectives by their deprecated names.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


class DeepSpeed(Engine):
    """`deepspeed.initialize` with torch's fused AdamW, as all other engines."""

    def __init__(self, task: Task, configuration: Configuration, rank: int) -> None:
        super().__init__(task, configuration, rank)
        model = task.new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, fused=True)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config(), dist_init_required=False
        )

    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        passes = self.configuration.plan.micro_batches[self.rank]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": passes[0],
            "gradient_accumulation_steps": len(passes),
            "train_batch_size": self.configuration.plan.global_batch,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "wall_clock_breakdown": False,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if self.configuration.stage:
            stage = self.configuration.stage
            config["zero_optimization"] = {"stage": stage, **SETTINGS.get(stage, {})}
        return config

    def step(self, batch: Batch | None) -> float:
        assert batch is not None, f"{self.configuration.name}: every rank has samples"
        sizes = self.configuration.plan.micro_batches[self.rank]
        total = 0.0
        for part in micro_batches(batch, sizes):
            loss = self.task.loss_fn(self.engine, part)
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss.detach()) / len(sizes)
        return total

    def close(self) -> None:
        self.engine.destroy()


SETTINGS: dict[int, dict[str, Any]] = {3: {"stage3_param_persistence_threshold": 0}}
"""By stage, values that are faster than DeepSpeed's defaults. See "DeepSpeed's settings" in
`benchmarks/README.md`."""

"""Hugging Face's `Trainer` on unequal devices: profile, plan, exact gradients, ZeRO-0 to 3.

    from poplar.integrations.transformers import PoplarArguments, PoplarTrainer

    trainer = PoplarTrainer(model, args, train_dataset=data, poplar=PoplarArguments(stage="auto"))

`PoplarTrainerMixin` does the same for other trainers: `class MyTrainer(PoplarTrainerMixin,
SFTTrainer)`. The private methods of `Trainer` that it overrides or calls are listed in `trainer`.
"""

# ruff: noqa: E402 (what is missing is said before it is imported)

from poplar.integrations.versions import check_version

check_version("transformers")
check_version("accelerate")

from poplar.integrations.transformers.arguments import PoplarArguments
from poplar.integrations.transformers.trainer import PoplarTrainer, PoplarTrainerMixin

__all__ = ["PoplarArguments", "PoplarTrainer", "PoplarTrainerMixin"]

"""A plugin of axolotl: its trainer on unequal GPUs.

torchrun --nproc-per-node 2 -m axolotl.cli.train llama3_qlora.yaml
"""

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin

from poplar.integrations.transformers import PoplarTrainerMixin


class PlannedTrainer(PoplarTrainerMixin, AxolotlTrainer): ...


class PoplarPlugin(BasePlugin):
    """Makes axolotl build `PlannedTrainer`."""

    def get_trainer_cls(self, cfg):
        return PlannedTrainer

    def get_training_args(self, cfg):
        # Ranks run different numbers of passes, and counting tokens would wait in each of them.
        return {"average_tokens_across_devices": True, "include_tkps": False}

"""Lightning: `Trainer(strategy="poplar")`, once this module is imported.

`PoplarStrategy` replaces Lightning's "ddp" or "fsdp" for a LightningModule with automatic
optimization and one optimizer. The module stays as it is.
"""

from poplar.integrations.versions import check_version

check_version("lightning")

from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402 (after the check)

from poplar.integrations.lightning.checkpoints import to_lightning_checkpoint  # noqa: E402
from poplar.integrations.lightning.progress_callback import PoplarMonitor  # noqa: E402
from poplar.integrations.lightning.strategy import PoplarStrategy  # noqa: E402

__all__ = ["PoplarMonitor", "PoplarStrategy", "to_lightning_checkpoint"]

PoplarStrategy.register_strategies(StrategyRegistry)

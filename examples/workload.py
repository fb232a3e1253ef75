"""What the other examples train, as the command line takes it: one function per model and size.

    poplar profile examples/workload.py:demo -o cluster.json
    torchrun --nproc-per-node 2 -m poplar profile examples/workload.py:demo -o cluster.json
    poplar plan cluster.json --global-batch 64 -o plan.json
    torchrun --nproc-per-node 2 -m poplar verify examples/workload.py:demo --plan plan.json

A function builds the model as the training script does, and a batch of what it trains on.
"""

from __future__ import annotations

from encoder import SIZES as ENCODER_SIZES
from encoder import Encoder, MaskedBytes, masked_byte_loss
from llama import SIZES, Llama, LlamaConfig, next_byte_loss
from text import load_text
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from poplar.workload import Workload

SAMPLES = 16
"""In the example batch: enough that repeating them does not make every rank's data alike."""

BYTES_OF_TEXT = 1 << 20
"""How much text is read: a profile needs a few samples, not all of them."""


def tiny() -> Workload:
    """Trains in milliseconds: to see what the commands print."""
    return _workload(SIZES["tiny"])


def demo() -> Workload:
    """What `examples/demo.py` trains."""
    return _workload(SIZES["demo"])


def base() -> Workload:
    """The size of GPT-2, for one or a few GPUs."""
    return _workload(SIZES["base"])


def encoder() -> Workload:
    """The other kind of model: BERT's, as large as the demo's Llama, filling in masked bytes."""
    config = ENCODER_SIZES["demo"]
    windows, _ = load_text(config.context, limit=BYTES_OF_TEXT)
    return Workload(Encoder(config), masked_byte_loss, _batch(MaskedBytes(windows)))


workload = demo


def _workload(config: LlamaConfig) -> Workload:
    windows, _ = load_text(config.context, limit=BYTES_OF_TEXT)
    return Workload(Llama(config), next_byte_loss, _batch(windows))


def _batch(data: Dataset[dict[str, Tensor]]) -> dict[str, Tensor]:
    return default_collate([data[index] for index in range(SAMPLES)])

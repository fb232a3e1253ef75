"""Workloads for the command line: one function per model and size of the examples.

poplar profile examples/workload.py:demo -o cluster.json
torchrun --nproc-per-node 2 -m poplar profile examples/workload.py:demo -o cluster.json
poplar plan cluster.json --global-batch 64 -o plan.json
torchrun --nproc-per-node 2 -m poplar verify examples/workload.py:demo --plan plan.json

`workload` is the demo's.
"""

from __future__ import annotations

from encoder import SIZES as ENCODER_SIZES
from encoder import Encoder, MaskedBytes, masked_byte_loss
from llama import SIZES, Llama, LlamaConfig, next_byte_loss
from text import load_text
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from poplar.cli.workload import Workload

SAMPLES = 16
"""Samples in the example batch."""

BYTES_OF_TEXT = 1 << 20
"""Text to read; a profile needs only a few samples."""


def tiny() -> Workload:
    """A pass takes milliseconds: for trying the commands."""
    return _workload(SIZES["tiny"])


def demo() -> Workload:
    """The model of `examples/demo.py`."""
    return _workload(SIZES["demo"])


def base() -> Workload:
    """A model of GPT-2's size, for one or a few GPUs."""
    return _workload(SIZES["base"])


def encoder() -> Workload:
    """A BERT-like model of the size of the demo's Llama."""
    config = ENCODER_SIZES["demo"]
    windows, _ = load_text(config.context, limit=BYTES_OF_TEXT)
    return Workload(Encoder(config), masked_byte_loss, _batch(MaskedBytes(windows)))


workload = demo


def _workload(config: LlamaConfig) -> Workload:
    windows, _ = load_text(config.context, limit=BYTES_OF_TEXT)
    return Workload(Llama(config), next_byte_loss, _batch(windows))


def _batch(data: Dataset[dict[str, Tensor]]) -> dict[str, Tensor]:
    return default_collate([data[index] for index in range(SAMPLES)])

"""Samplers that give every rank its part of a global batch, and batches as pytrees."""

from poplar.data.micro_batch_collation import CollateMicroBatches
from poplar.data.sampler import HeteroBatchSampler
from poplar.data.stream import StreamSplit, split_stream

__all__ = ["CollateMicroBatches", "HeteroBatchSampler", "StreamSplit", "split_stream"]

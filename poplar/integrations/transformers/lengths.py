"""The lengths of the samples of a dataset, as `Trainer` finds them, and the order that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

ADVICE = (
    "pass PoplarArguments(balance_lengths=True), which changes no gradient, or "
    "TrainingArguments(train_sampling_strategy='group_by_length')"
)
"""What evens out the lengths of the ranks."""


def lengths_of(dataset: Any, column: str, processing_class: Any) -> list[int]:
    """The length of each sample.

    Args:
        dataset: with `__len__`; of the library `datasets`, or any other.
        column: of a dataset of `datasets`; if there is none, the model's first input is measured.
        processing_class: names the model's first input; None: "input_ids".

    Raises:
        ValueError: the samples are no dictionaries with this input.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return list(dataset[column])
    name = None if processing_class is None else processing_class.model_input_names[0]
    sampler = LengthGroupedSampler(1, dataset=dataset, model_input_name=name)
    return list(sampler.lengths)


def grouped_by_length(lengths: Sequence[int], batch: int, generator: torch.Generator) -> list[int]:
    """`Trainer`'s order in which the samples of a global batch have similar lengths."""
    order: list[int] = get_length_grouped_indices(  # type: ignore[no-untyped-call]
        lengths, batch, generator=generator
    )
    return order

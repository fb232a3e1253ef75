"""`tokens`: the weight of a micro-batch for losses that are means over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

IGNORE_INDEX = -100
"""What PyTorch's cross-entropy and Hugging Face's models ignore."""


def tokens(
    ignore_index: int = IGNORE_INDEX, shift: bool = True, labels: str | int = "labels"
) -> Callable[[Any], Tensor]:
    """A weight for losses that are means over tokens: the number of tokens that count.

        optimizer.train_step(loss_fn, batch, weight=poplar.tokens())

    The losses of language models are such means, those of Hugging Face's models too. Weighted by
    samples, their gradient would depend on how the batch is split. Packed samples need nothing
    more: every label that the loss does not ignore counts.

    Args:
        ignore_index: the label of tokens that do not count.
        shift: True for causal models (Llama, GPT-2), which predict every token from those before
            it, so the first label of a sample does not count. False if a label belongs to the
            token in its place: masked models (BERT), and labels that are shifted already.
        labels: where the labels are in a batch: a key, the name of a field, or a position.

    Returns:
        A function for `weight=`. It returns one integer on the device of the labels, without
        waiting for the device.

    Raises:
        ValueError: (the function) the batch has no such labels, or not one row of them per sample.
        TypeError: (the function) the labels are no tensor of integers.
    """

    def weight(micro_batch: Any) -> Tensor:
        found = _labels_in(micro_batch, labels)
        if shift:
            if found.dim() != 2:
                raise ValueError(
                    f"labels {labels!r} have the shape {tuple(found.shape)}, but those of a causal "
                    "model are [samples, tokens]; use poplar.tokens(shift=False) if every label "
                    "counts where it is"
                )
            found = found[:, 1:]
        return (found != ignore_index).sum()

    return weight


def _labels_in(batch: Any, where: str | int) -> Tensor:
    if isinstance(batch, Tensor):
        raise ValueError(
            "the batch is one tensor, so its labels are not known; return a dict with labels from "
            "the dataset, or pass a function that returns the number of tokens as weight="
        )
    try:
        if isinstance(where, int) or isinstance(batch, Mapping):
            found = batch[where]
        else:
            found = getattr(batch, where)
    except (AttributeError, IndexError, KeyError, TypeError):
        raise ValueError(
            f"the batch ({type(batch).__name__}) has no labels {where!r}{_what_it_has(batch)}; "
            "pass poplar.tokens(labels=...), a key, the name of a field, or a position"
        ) from None
    if not isinstance(found, Tensor) or not is_integer(found):
        what = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"labels {where!r} must be a tensor of integers, got {what}; pass "
            "poplar.tokens(labels=...) to name the labels of tokens"
        )
    return found


def _what_it_has(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f", it has {', '.join(map(repr, batch))}"
    if isinstance(batch, Sequence):
        return f", it has positions 0 to {len(batch) - 1}"
    return ""


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor has an integer dtype; bool is none."""
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex) and str(dtype) != "torch.bool"

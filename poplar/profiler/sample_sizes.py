"""The sizes of the samples of an example batch, which its profile is of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from poplar.data import pytree
from poplar.data.lengths import at_length
from poplar.data.object_content import content_of
from poplar.system.storage import dense_parts

UNKNOWN_SIZE = "of unknown size"
"""In the text of objects that cannot be pickled."""


def one_micro_batch(example: Any) -> Any:
    """All samples of a batch as one micro-batch."""
    return pytree.split(example, [pytree.samples_in(example)])[0]


def samples_are_rows(example: Any) -> bool:
    """Whether each sample is a row of the tensors, as it always is unless a batch splits itself."""
    return pytree.rows_are_samples(one_micro_batch(example), pytree.samples_in(example))


def sizes_of_samples(example: Any, *, any_length: bool) -> str:
    """A text that is equal for examples whose samples have the same sizes.

    The number of samples does not matter: those that are not rows are described one by one.

    Args:
        any_length: the padded length of rows does not matter.
    """
    found = list[str]()
    by_sample = [example]
    if isinstance(example, pytree.SplitsItself):
        by_sample = [pytree.take(example, [at]) for at in range(len(example))]
    if is_rows := samples_are_rows(example):
        whole = one_micro_batch(example)
        whole = at_length(whole, 1) if any_length else whole
        found += [f"{list(t.shape[1:])}:{t.dtype}" for t in pytree.tensors(whole)]
    else:
        found += sorted({" ".join(_shapes(pytree.tensors(sample))) for sample in by_sample})
    # Arrays beside rows are rows, too.
    inside = (each for sample in by_sample for each in pytree.objects(sample))
    described = {_described(each) for each in inside if not (is_rows and pytree.is_array(each))}
    return " ".join([*found, *sorted(described)]).strip()


def _shapes(arrays: list[Any]) -> Iterator[str]:
    for array in arrays:
        for part in dense_parts(array) if isinstance(array, Tensor) else [array]:
            yield f"{list(part.shape)}:{part.dtype}"


def _described(value: Any) -> str:
    """An object or array; what is not a tensor or array inside of it counts by value."""
    name, content = type(value).__qualname__, content_of(value)
    if content is None:
        return f"{name} {UNKNOWN_SIZE}"
    text = " ".join([*_shapes(content.arrays), content.rest])
    return f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"

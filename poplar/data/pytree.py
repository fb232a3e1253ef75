"""Batches as trainers really have them: tensors nested in containers of many kinds.

Everything that holds samples is cut along dim 0, everything else is passed on as it is, and every
container comes back as the type it was: dicts, lists, tuples and their subclasses, `UserDict`s
(Hugging Face's `BatchEncoding`), named tuples, dataclasses (frozen and slotted ones too).
Containers are copied shallowly and never changed in place.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Nest = TypeVar("Nest")


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the size of dim 0, on which all its tensors must agree.

    Args:
        batch: any nest of tensors. Tensors without dimensions and everything that is no tensor are
            ignored.

    Raises:
        ValueError: tensors that disagree (the message names where they are), or no tensor with a
            dim 0.
    """
    first: tuple[str, int] | None = None
    for path, tensor in _tensors_with_paths(batch, "batch"):
        if tensor.dim() == 0:
            continue
        size = int(tensor.shape[0])
        if first is None:
            first = (path, size)
        elif size != first[1]:
            raise ValueError(
                f"{path} has {size} samples (shape {tuple(tensor.shape)}), but {first[0]} has "
                f"{first[1]}; dim 0 of every tensor in a batch must be the samples: move what all "
                "samples share into a 0-dim tensor or the model"
            )
    if first is None:
        raise ValueError(
            f"no tensor with a dim 0 in this batch ({type(batch).__name__}), so its samples cannot "
            "be counted; give a tensor, or a dict, list, tuple, dataclass or named tuple of tensors"
        )
    return first[1]


def cut(batch: Nest, sizes: Sequence[int]) -> list[Nest]:
    """Cut a batch into consecutive micro-batches.

    Args:
        batch: any nest of tensors.
        sizes: samples of each micro-batch, in order; 0 gives an empty one. They sum to
            `samples_in(batch)`.

    Returns:
        One nest per size, of the same types. Tensors are views of the batch. Lists and tuples
        without a tensor inside, and arrays, are cut too if they are as long as the batch (a list of
        strings); all else is the same object in all.

    Raises:
        ValueError: as `samples_in`, or sizes that are negative or do not sum to the batch.
    """
    samples = samples_in(batch)
    if any(size < 0 for size in sizes) or sum(sizes) != samples:
        raise ValueError(
            f"a batch of {samples} samples cannot be cut into {list(sizes)}, which is "
            f"{sum(sizes)}; sizes must be 0 or more and sum to the batch"
        )
    bounds = pairwise(accumulate(sizes, initial=0))
    return [_slice(batch, samples, start, stop) for start, stop in bounds]


def take(batch: Nest, indices: Sequence[int]) -> Nest:
    """These samples of a batch, in this order; an index may come several times.

    Args:
        batch: as for `cut`.
        indices: positions along dim 0; at least one.

    Raises:
        ValueError: as `samples_in`.
    """
    samples = samples_in(batch)
    return cast(Nest, _take(batch, samples, list(indices)))


def tensors(nest: Any) -> list[Tensor]:
    """Every tensor in a nest, in the order in which its containers hold them."""
    return [tensor for _, tensor in _tensors_with_paths(nest, "")]


def map_tensors(fn: Callable[[Tensor], Any], nest: Nest) -> Nest:
    """The same nest with `fn(tensor)` in the place of every tensor."""
    if isinstance(nest, Tensor):
        return cast(Nest, fn(nest))
    return cast(Nest, _rebuild(nest, lambda child: map_tensors(fn, child)))


def _slice(nest: Any, samples: int, start: int, stop: int) -> Any:
    if isinstance(nest, Tensor):
        return nest if nest.dim() == 0 else nest.narrow(0, start, stop - start)
    if _holds_a_value_per_sample(nest, samples):
        return nest[start:stop]
    return _rebuild(nest, lambda child: _slice(child, samples, start, stop))


def _take(nest: Any, samples: int, indices: list[int]) -> Any:
    if isinstance(nest, Tensor):
        return nest if nest.dim() == 0 else nest[torch.tensor(indices, device=nest.device)]
    if _holds_a_value_per_sample(nest, samples):
        if type(nest) in (list, tuple):
            return type(nest)(nest[index] for index in indices)
        return nest[indices]
    return _rebuild(nest, lambda child: _take(child, samples, indices))


def _holds_a_value_per_sample(nest: Any, samples: int) -> bool:
    """A list or tuple that is data rather than structure, or an array, as long as the batch."""
    if type(nest) in (list, tuple):
        return len(nest) == samples and not tensors(nest)
    shape = getattr(nest, "shape", None)
    return (
        isinstance(shape, tuple)
        and len(shape) > 0
        and shape[0] == samples
        and hasattr(nest, "__getitem__")
    )


def _children(nest: Any) -> Iterator[tuple[str, Any]]:
    """The members of a container, each with how a person would reach it; nothing for a leaf."""
    if isinstance(nest, Mapping):
        for key in nest:
            yield f"[{key!r}]", nest[key]
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for member in _set_fields(nest):
            yield f".{member}", getattr(nest, member)
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        for member, child in zip(nest._fields, nest, strict=True):
            yield f".{member}", child
    elif isinstance(nest, (list, tuple)) and not isinstance(nest, torch.Size):
        for position, child in enumerate(nest):
            yield f"[{position}]", child


def _rebuild(nest: Any, fn: Callable[[Any], Any]) -> Any:
    """A copy of a container with `fn(member)` for each member; a leaf is returned as it is."""
    if isinstance(nest, MutableMapping):
        # A shallow copy keeps what a subclass holds beside its items (default_factory,
        # BatchEncoding's encodings).
        copied = copy.copy(nest)
        for key in nest:
            copied[key] = fn(nest[key])
        return copied
    if isinstance(nest, Mapping):
        return type(nest)({key: fn(nest[key]) for key in nest})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        # Not dataclasses.replace: it refuses fields with init=False and runs __post_init__ again.
        duplicate = copy.copy(nest)
        for member in _set_fields(nest):
            object.__setattr__(duplicate, member, fn(getattr(nest, member)))
        return duplicate
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)._make(fn(child) for child in nest)  # type: ignore[attr-defined]
    if isinstance(nest, (list, tuple)) and not isinstance(nest, torch.Size):
        return type(nest)(fn(child) for child in nest)
    return nest


def _set_fields(nest: Any) -> list[str]:
    return [member.name for member in dataclasses.fields(nest) if hasattr(nest, member.name)]


def _tensors_with_paths(nest: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(nest, Tensor):
        yield path, nest
    else:
        for step, child in _children(nest):
            yield from _tensors_with_paths(child, path + step)

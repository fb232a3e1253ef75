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

PyTree = TypeVar("PyTree")


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


def cut(batch: PyTree, sizes: Sequence[int]) -> list[PyTree]:
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


def take(batch: PyTree, indices: Sequence[int]) -> PyTree:
    """These samples of a batch, in this order; an index may come several times.

    Args:
        batch: as for `cut`.
        indices: positions along dim 0; at least one.

    Raises:
        ValueError: as `samples_in`.
    """
    samples = samples_in(batch)
    return cast(PyTree, _take(batch, samples, list(indices)))


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor in a nest, in the order in which its containers hold them."""
    return [tensor for _, tensor in _tensors_with_paths(tree, "")]


def map_tensors(fn: Callable[[Tensor], Any], tree: PyTree) -> PyTree:
    """The same nest with `fn(tensor)` in the place of every tensor."""
    if isinstance(tree, Tensor):
        return cast(PyTree, fn(tree))
    return cast(PyTree, _rebuild(tree, lambda child: map_tensors(fn, child)))


def _slice(tree: Any, samples: int, start: int, stop: int) -> Any:
    if isinstance(tree, Tensor):
        return tree if tree.dim() == 0 else tree.narrow(0, start, stop - start)
    if _holds_a_value_per_sample(tree, samples):
        return tree[start:stop]
    return _rebuild(tree, lambda child: _slice(child, samples, start, stop))


def _take(tree: Any, samples: int, indices: list[int]) -> Any:
    if isinstance(tree, Tensor):
        return tree if tree.dim() == 0 else tree[torch.tensor(indices, device=tree.device)]
    if _holds_a_value_per_sample(tree, samples):
        if type(tree) in (list, tuple):
            return type(tree)(tree[index] for index in indices)
        return tree[indices]
    return _rebuild(tree, lambda child: _take(child, samples, indices))


def _holds_a_value_per_sample(tree: Any, samples: int) -> bool:
    """A list or tuple that is data rather than structure, or an array, as long as the batch."""
    if type(tree) in (list, tuple):
        return len(tree) == samples and not tensors(tree)
    shape = getattr(tree, "shape", None)
    return (
        isinstance(shape, tuple)
        and len(shape) > 0
        and shape[0] == samples
        and hasattr(tree, "__getitem__")
    )


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    """The members of a container, each with how a person would reach it; nothing for a leaf."""
    if isinstance(tree, Mapping):
        for key in tree:
            yield f"[{key!r}]", tree[key]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for member in _set_fields(tree):
            yield f".{member}", getattr(tree, member)
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for member, child in zip(tree._fields, tree, strict=True):
            yield f".{member}", child
    elif isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        for position, child in enumerate(tree):
            yield f"[{position}]", child


def _rebuild(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """A copy of a container with `fn(member)` for each member; a leaf is returned as it is."""
    if isinstance(tree, MutableMapping):
        # A shallow copy keeps what a subclass holds beside its items (default_factory,
        # BatchEncoding's encodings).
        copied = copy.copy(tree)
        for key in tree:
            copied[key] = fn(tree[key])
        return copied
    if isinstance(tree, Mapping):
        return type(tree)({key: fn(tree[key]) for key in tree})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        # Not dataclasses.replace: it refuses fields with init=False and runs __post_init__ again.
        duplicate = copy.copy(tree)
        for member in _set_fields(tree):
            object.__setattr__(duplicate, member, fn(getattr(tree, member)))
        return duplicate
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)._make(fn(child) for child in tree)  # type: ignore[attr-defined]
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(fn(child) for child in tree)
    return tree


def _set_fields(tree: Any) -> list[str]:
    return [member.name for member in dataclasses.fields(tree) if hasattr(tree, member.name)]


def _tensors_with_paths(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    else:
        for step, child in _children(tree):
            yield from _tensors_with_paths(child, path + step)

"""Batches as pytrees: counted, split along dim 0 and rebuilt with the same container types.

Tensors and lists with one value per sample are split; other values are passed on unchanged.
Supported containers: dicts, lists, tuples and their subclasses, `UserDict`s
(Hugging Face's `BatchEncoding`), named tuples, dataclasses (also frozen and slotted). Containers
are copied and never changed in place. A batch may also split itself, see `SplitsItself`.

Instances of other classes are objects, such as graphs of another library. Their tensors are not
seen, but objects can be copied, moved by their own methods, and pickled: see `object_content`.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

PyTree = TypeVar("PyTree")


class SplitsItself(ABC):
    """A batch that is not split along dim 0 of its tensors."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def split(self, sizes: Sequence[int]) -> list[Any]:
        """Consecutive micro-batches; sizes sum to the samples."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> SplitsItself:
        """The samples at these positions."""

    def take(self, indices: Sequence[int]) -> Any:
        """One micro-batch of the samples at these positions."""
        return self.select(indices).split([len(indices)])[0]

    @abstractmethod
    def parts(self) -> Sequence[Any]:
        """Pytrees with the tensors of this batch."""

    @abstractmethod
    def changed(self, change: Callable[[Any], Any]) -> SplitsItself:
        """The batch whose micro-batches are `change(micro_batch)`; `change` maps any pytree."""


_NO_OBJECTS = (Tensor, Mapping, list, tuple, SplitsItself, nn.Module, type, FunctionType)


def samples_in(batch: Any) -> int:
    """Number of samples in a batch: the size of dim 0 of its tensors.

    Args:
        batch: any pytree of tensors. 0-dim tensors and other values are ignored.

    Raises:
        ValueError: the tensors differ in dim 0 (the message names two), none has a dim 0, or one
            cannot be split along it.
    """
    if isinstance(batch, SplitsItself):
        return len(batch)
    unsplittable = next(_without_rows(batch, "batch"), None)
    if unsplittable is not None:
        raise ValueError(f"{unsplittable}, which is not split along dim 0. {_COLLATE}")
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
                f"{first[1]}; dim 0 of every tensor in a batch must be the samples: put values "
                f"that all samples share into a 0-dim tensor or the model. {_COLLATE}"
            )
    if first is None:
        raise ValueError(
            f"no tensor with a dim 0 in this batch ({type(batch).__name__}), so its samples cannot "
            "be counted; give a tensor, or a dict, list, tuple, dataclass or named tuple of "
            f"tensors. {_COLLATE}"
        )
    return first[1]


_COLLATE = (
    "If samples are not rows of tensors (images of other sizes, graphs, nested, sparse or packed "
    "tensors), let DataLoader(..., collate_fn=poplar.data.CollateMicroBatches(collate, plan)) make "
    "each micro-batch of its samples. An example batch, for which there is no plan yet, is "
    "CollateMicroBatches(collate)(samples)"
)


def rows_are_samples(batch: Any, samples: int | None = None) -> bool:
    """Whether the tensors of a batch, or of all its `parts`, have one row per sample.

    Args:
        samples: of which a collate function made the batch; None: as many as the batch has.
    """
    parts = batch.parts() if isinstance(batch, SplitsItself) else [batch]
    try:
        return sum(map(samples_in, parts)) == (samples_in(batch) if samples is None else samples)
    except ValueError:  # such as rows of patches, of several images a sample
        return False


def split(batch: PyTree, sizes: Sequence[int]) -> list[PyTree]:
    """Split a batch into consecutive micro-batches.

    Args:
        batch: any pytree of tensors.
        sizes: samples of each micro-batch, in order; 0 gives an empty one. They sum to
            `samples_in(batch)`.

    Returns:
        One pytree per size, with the same types. Tensors are views of the batch. Arrays, and lists
        and tuples without tensors (a list of strings), are split too if they are as long as the
        batch. Every other value is the same object in all micro-batches.

    Raises:
        ValueError: as for `samples_in`, or sizes that are negative or do not sum to the batch.
    """
    samples = samples_in(batch)
    if any(size < 0 for size in sizes) or sum(sizes) != samples:
        raise ValueError(
            f"a batch of {samples} samples cannot be split into {list(sizes)}, which is "
            f"{sum(sizes)}; sizes must be 0 or more and sum to the batch"
        )
    if isinstance(batch, SplitsItself):
        return batch.split(sizes)
    bounds = pairwise(accumulate(sizes, initial=0))
    return [_rows(batch, samples, slice(*bound)) for bound in bounds]


def take(batch: PyTree, indices: Sequence[int]) -> PyTree:
    """Select samples of a batch by index; an index may occur several times.

    Args:
        batch: as for `split`.
        indices: positions along dim 0; at least one.

    Raises:
        ValueError: as for `samples_in`.
    """
    if isinstance(batch, SplitsItself):
        return cast(PyTree, batch.take(indices))
    return cast(PyTree, _rows(batch, samples_in(batch), list(indices)))


def select(batch: PyTree, indices: Sequence[int]) -> PyTree:
    """As `take`, but a batch that splits itself stays one, which is split later."""
    if isinstance(batch, SplitsItself):
        return cast(PyTree, batch.select(indices))
    return take(batch, indices)


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a pytree, in the order of its containers."""
    return [tensor for _, tensor in _tensors_with_paths(tree, "")]


def map_tensors(fn: Callable[[Tensor], Any], tree: PyTree) -> PyTree:
    """The pytree with every tensor replaced by `fn(tensor)`."""
    if isinstance(tree, Tensor):
        return cast(PyTree, fn(tree))
    if isinstance(tree, SplitsItself):
        return cast(PyTree, tree.changed(partial(map_tensors, fn)))
    return cast(PyTree, _rebuild(tree, lambda child: map_tensors(fn, child)))


def copied(tree: PyTree) -> PyTree:
    """A copy in which containers and objects are new, and tensors are the same.

    A loss function may take something out of its batch, or set an attribute of an object in it. So
    whatever runs a loss function again gives it a copy. A batch that splits itself is not copied,
    because its micro-batches are copies.
    """
    return tree if isinstance(tree, SplitsItself) else _map_leaves(_copied_leaf, tree)


def to(tree: PyTree, device: torch.device | str, *, non_blocking: bool = False) -> PyTree:
    """The pytree on a device: its tensors, and copies of objects that have a method `to`."""

    def moved(leaf: Any) -> Any:
        if non_blocking:
            with suppress(TypeError):  # objects may have a `to` without this argument
                return _called(leaf, "to", device, non_blocking=True)
        return _called(leaf, "to", device)

    return _map_leaves(moved, tree)


def pinned(tree: PyTree) -> PyTree:
    """The pytree in pinned memory: its tensors, and copies of objects that have `pin_memory`."""
    return _map_leaves(lambda leaf: _called(leaf, "pin_memory"), tree)


def leaves(tree: Any) -> list[Any]:
    """All values of a pytree that have no members, in the order of its containers."""
    members = [child for _, child in _children(tree)]
    return [leaf for member in members for leaf in leaves(member)] if members else [tree]


def is_object(leaf: Any) -> bool:
    """Whether it is of a class that may hold tensors which are not seen."""
    if hasattr(type(leaf), "__array_interface__"):  # its copy has all elements, maybe of a file
        return False
    has_attributes = hasattr(leaf, "__dict__") or hasattr(type(leaf), "__slots__")
    return has_attributes and not (isinstance(leaf, _NO_OBJECTS) or dataclasses.is_dataclass(leaf))


def _map_leaves(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """The pytree with `fn` applied to its tensors and objects."""
    # Only its own methods know that the lengths in a packed sequence stay in host memory.
    if isinstance(tree, (Tensor, PackedSequence)) or is_object(tree):
        return cast(PyTree, fn(tree))
    if isinstance(tree, SplitsItself):
        return cast(PyTree, tree.changed(partial(_map_leaves, fn)))
    return cast(PyTree, _rebuild(tree, partial(_map_leaves, fn)))


def _copied_leaf(leaf: Any) -> Any:
    if not is_object(leaf):
        return leaf
    try:
        return copy.copy(leaf)
    except Exception:  # code of the object, which may raise anything if it has no copies
        return leaf


def _called(leaf: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """What a method of a tensor or object returns; itself if it has none."""
    if not callable(getattr(leaf, method, None)):
        return leaf
    own = _copied_leaf(leaf)  # the method may move the object itself, and return nothing
    moved = getattr(own, method)(*args, **kwargs)
    return own if moved is None else moved


def _rows(tree: Any, samples: int, rows: slice | list[int]) -> Any:
    """Rows of a pytree of so many samples."""
    if isinstance(tree, Tensor):
        if tree.dim() == 0:
            return tree
        return tree[rows if isinstance(rows, slice) else torch.tensor(rows, device=tree.device)]
    if _has_value_per_sample(tree, samples):
        if isinstance(rows, list) and type(tree) in (list, tuple):
            return type(tree)(tree[row] for row in rows)
        return tree[rows]
    return _rebuild(tree, lambda child: _rows(child, samples, rows))


def _has_value_per_sample(tree: Any, samples: int) -> bool:
    """Whether it is an array, or a list or tuple without tensors, that is as long as the batch."""
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
    """The members of a container with their access paths; empty for a leaf."""
    if isinstance(tree, SplitsItself):
        yield from ((f".parts()[{at}]", part) for at, part in enumerate(tree.parts()))
    elif isinstance(tree, Mapping):
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
    """A copy of a container with `fn(member)` for each member; a leaf is returned unchanged."""
    if type(tree) is dict:
        return {key: fn(value) for key, value in tree.items()}  # torch.compile can trace this
    if isinstance(tree, MutableMapping):
        # A shallow copy keeps the other attributes of a subclass (default_factory, the encodings
        # of a BatchEncoding).
        copied = copy.copy(tree)
        for key in tree:
            copied[key] = fn(tree[key])
        return copied
    if isinstance(tree, Mapping):
        return type(tree)({key: fn(tree[key]) for key in tree})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        # Not dataclasses.replace: it rejects fields with init=False and runs __post_init__ again.
        duplicate = copy.copy(tree)
        for member in _set_fields(tree):
            object.__setattr__(duplicate, member, fn(getattr(tree, member)))
        return duplicate
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)._make(fn(child) for child in tree)  # type: ignore[attr-defined]
    if isinstance(tree, list) and type(tree) is not list:
        members = copy.copy(tree)  # its constructor may take other arguments
        members[:] = map(fn, tree)
        return members
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(fn(child) for child in tree)
    return tree


def _without_rows(tree: Any, path: str) -> Iterator[str]:
    """Members of a pytree whose dim 0 is not the samples, or cannot be cut."""
    if isinstance(tree, PackedSequence):
        yield f"{path} is a PackedSequence"
    elif isinstance(tree, SplitsItself):
        yield f"{path} is a {type(tree).__name__} inside of another batch"
    elif not isinstance(tree, Tensor):
        for step, child in _children(tree):
            yield from _without_rows(child, path + step)
    elif tree.is_nested or tree.layout is not torch.strided:
        layout = "nested" if tree.is_nested else str(tree.layout).removeprefix("torch.")
        yield f"{path} is a {layout} tensor"


def _set_fields(tree: Any) -> list[str]:
    return [member.name for member in dataclasses.fields(tree) if hasattr(tree, member.name)]


def _tensors_with_paths(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    else:
        for step, child in _children(tree):
            yield from _tensors_with_paths(child, path + step)

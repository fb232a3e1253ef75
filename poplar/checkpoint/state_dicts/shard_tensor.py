"""`ShardTensor`: a flat range of a parameter, as `torch.distributed.checkpoint` saves and loads it.

Poplar cuts parameters anywhere, which `DTensor` cannot express. A checkpoint stores the range as
boxes, so any model reads it: with plain tensors, `DTensor` or other ranges. A box is a contiguous
part of the tensor in each dimension. The boxes here are also contiguous in memory, so each is a
plain slice of the flat range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from poplar.checkpoint.state_dicts.place import Owners
from poplar.checkpoint.state_dicts.whole_state import install

_aten = torch.ops.aten
_ELEMENTWISE = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.copy_.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.zero_.default,
    _aten.zeros_like.default,
    _aten._to_copy.default,
}
"""Operators that need nothing but the local elements."""
_MEMORY_ACCESS = {
    getattr(Tensor, name)
    for name in (
        "__array__",
        "__dlpack__",
        "__dlpack_device__",
        "_typed_storage",
        "apply_",
        "const_data_ptr",
        "is_pinned",
        "is_shared",
        "map2_",
        "map_",
        "numpy",
        "pin_memory",
        "share_memory_",
        "storage",
        "tolist",
        "untyped_storage",
    )
    if hasattr(Tensor, name)  # some are newer than others
}
"""Methods of `Tensor` that are no operators: they act on the memory of the whole tensor."""


_META = torch.device("meta")
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""What `__reduce_ex__` returns."""


class ShardTensor(Tensor):
    """Elements `[start, start + len(local))` of a tensor of a given shape, in row-major order.

    Its shape, dtype and device are those of the whole tensor; only `local` has memory, which
    loading writes in place. Few operators accept it: compute with `local`.

    Args:
        local: 1-D and contiguous; may be empty.
        shape: of the whole tensor.
        start: the first element of `local` in the whole tensor.
        owners: the ranks that have the other elements; None if they are unknown, as in a file.

    Raises:
        ValueError: `local` is not 1-D and contiguous, or not inside the tensor.
    """

    local: Tensor
    start: int
    boxes: list[Box]
    owners: Owners | None

    @staticmethod
    def __new__(
        cls, local: Tensor, shape: Sequence[int], start: int, owners: Owners | None = None
    ) -> ShardTensor:
        if local.dim() != 1 or not local.is_contiguous():
            raise ValueError(
                f"ShardTensor takes a 1-D contiguous tensor, got shape {tuple(local.shape)}"
            )
        local = local.detach()
        # On `meta`, as far as C++ looks at memory: nothing can read what does not exist.
        made: ShardTensor = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=_META, dispatch_device=True
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.boxes = boxes_of_range(shape, start, start + local.numel())
        made.local, made.start, made.owners = local, start, owners
        return made

    @property
    def stop(self) -> int:
        """The element after the last of `local`."""
        return self.start + self.local.numel()

    @property
    def is_unknown(self) -> bool:
        """Whether it stands for a value that the owners of a parameter share, such as its step."""
        return self.owners is None and bool(self.numel()) and not self.local.numel()

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the device of `local`. Collective; named as that of `DTensor`.

        Raises:
            RuntimeError: the other elements are on no rank that is known, or in the middle of a
                step.
        """
        if self.local.numel() == self.numel() and self.owners is None:
            return self.local.view(self.shape)
        if self.owners is None:
            raise RuntimeError(
                f"full_tensor(): elements [{self.start}, {self.stop}) of shape "
                f"{tuple(self.shape)} were loaded from a file or made by hand, so the ranks that "
                "have the others are unknown; call it on a tensor of a state_dict() of this run"
            )
        return self.owners.gather(self.local).view(self.shape)

    # The protocol of torch.distributed.checkpoint.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        """What this rank saves. Of a tensor without elements, every rank names the whole."""
        properties, size = _properties(self.dtype), _size(tuple(self.shape))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if math.prod(self.shape) == 0:
            return [ChunkStorageMetadata(torch.Size([0] * len(self.shape)), self.shape)]
        return [ChunkStorageMetadata(_size(box.offsets), _size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The elements of one box: a view of `local` in the shape of the box."""
        if math.prod(self.shape) == 0:
            return self.local.view(self.shape)
        for box in self.boxes:
            if index.offset is not None and tuple(index.offset) == box.offsets:
                first = box.start - self.start
                return self.local[first : first + box.numel].view(box.sizes)
        raise ValueError(
            f"{index.fqn}: no box at offset {index.offset} in elements [{self.start}, {self.stop}) "
            f"of shape {tuple(self.shape)}"
        )

    # What makes it a tensor.

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.data_ptr:
            return 0  # by which torch's stagers know tensors that consist of others
        if function in _MEMORY_ACCESS:
            cls._refuse(f"{function.__name__}()")
        call: Any = super().__torch_function__
        return call(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        own = args[0] if args else None
        if function is torch.ops.prim.device.default and isinstance(own, ShardTensor):
            return own.local.device
        if function not in _ELEMENTWISE or not isinstance(own, ShardTensor):
            cls._refuse(str(function))
        if function is _aten.new_empty.default:  # as asynchronous saving makes its copies
            if tuple(args[1]) != tuple(own.shape):
                raise TypeError("new_empty takes the shape of the ShardTensor itself")
            args = (own, own.local.shape)
        for other in args:
            if isinstance(other, Tensor) and not own._has_range_of(other):
                raise TypeError(f"{function} takes ShardTensors of the same range and shape")
        local = [arg.local if isinstance(arg, ShardTensor) else arg for arg in args]
        options = dict(kwargs or {})
        options.pop("memory_format", None)  # always contiguous
        result = function(*local, **options)
        if function in (_aten.copy_.default, _aten.zero_.default):
            return own
        return type(own)(result, own.shape, own.start, own.owners)

    @classmethod
    def _refuse(cls, what: str) -> NoReturn:
        raise TypeError(
            f"{what} does not work on a ShardTensor, which has only a part of its elements; use "
            "its `local`, or optimizer.full_parameters() for whole parameters"
        )

    def _has_range_of(self, other: Tensor) -> bool:
        own = (self.shape, self.start, self.stop)
        return isinstance(other, ShardTensor) and own == (other.shape, other.start, other.stop)

    def __reduce_ex__(self, _protocol: Any) -> Reduced:
        return self._reduce()

    def _reduce(self) -> Reduced:
        # A clone, because a pickled view would contain the whole flat parameter.
        return type(self), (self.local.clone(), tuple(self.shape), self.start)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        copied = type(self)(self.local.clone(), self.shape, self.start, self.owners)
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        elements = f"elements [{self.start}, {self.stop}) of shape {tuple(self.shape)}"
        return f"{type(self).__name__}({elements}, {self.dtype}, local={self.local})"


class ParameterShard(ShardTensor):
    """This rank's part of a parameter in `model.state_dict()`. It cannot be pickled.

    `torch.save(model.state_dict())` is meant to save whole parameters, often on one rank alone.
    (The processes of this rank may send it to each other, as asynchronous checkpoints do.)
    """

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self._refuse("pickle")

    @classmethod
    def _refuse(cls, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what}: the model's parameters are sharded (stage 3), so model.state_dict() has only "
            "this rank's part of them; save it with torch.distributed.checkpoint on all ranks, use "
            "optimizer.save_model(path), or `with optimizer.full_parameters(): model.state_dict()`"
        )


@cache
def _properties(dtype: torch.dtype) -> TensorProperties:
    """One object for all tensors, which is pickled once. Where they were in memory is left out."""
    return TensorProperties(dtype=dtype)


@lru_cache(4096)
def _size(lengths: tuple[int, ...]) -> torch.Size:
    """One object for all equal sizes."""
    return torch.Size(lengths)


class Box(NamedTuple):
    """A part of a tensor that is contiguous in each dimension and in row-major order."""

    offsets: tuple[int, ...]
    """By dimension, the first index."""
    sizes: tuple[int, ...]
    start: int
    """Its first element in row-major order."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements `[start, stop)`, in row-major order, of a tensor into boxes.

    Args:
        shape: of the whole tensor, with any number of dimensions; sizes may be 0 or 1.
        start: first element.
        stop: the element after the last.

    Returns:
        In row-major order, at most `2 * len(shape) - 1` boxes (1 for a scalar); none if the range
        is empty.

    Raises:
        ValueError: the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"[{start}, {stop}) is not a range of the {math.prod(shape)} elements of a tensor of "
            f"shape {tuple(shape)}"
        )
    return _cut(tuple(shape), start, stop, (), 0) if start < stop else []


def _cut(
    shape: tuple[int, ...], start: int, stop: int, index: tuple[int, ...], base: int
) -> list[Box]:
    """Boxes of a range inside the sub-tensor at `index`, whose first element is `base`."""
    ones = (1,) * len(index)
    if not shape:
        return [Box(index, ones, base)]
    inner = shape[1:]
    row = math.prod(inner)
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _cut(
            inner, start - first * row, stop - first * row, (*index, first), base + first * row
        )
    boxes = []
    if start % row:  # the end of the first row
        boxes += _cut(inner, start % row, row, (*index, first), base + first * row)
        first += 1
    whole = stop // row - first
    if whole:
        zeros = (0,) * len(inner)
        boxes.append(Box((*index, first, *zeros), (*ones, whole, *inner), base + first * row))
    if stop % row:  # the start of the last row
        last = stop // row
        boxes += _cut(inner, 0, stop % row, (*index, last), base + last * row)
    return boxes


torch.serialization.add_safe_globals([ShardTensor])
ForkingPickler.register(ParameterShard, ParameterShard._reduce)
install()

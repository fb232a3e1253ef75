"""The tensors inside of objects that are no containers, such as graphs of another library.

They are found by pickling the objects, as a worker of a `DataLoader` does.
"""

from __future__ import annotations

import pickle
from typing import Any

from torch import Tensor

from poplar.data import pytree
from poplar.system.storage import dense_parts


def arrays_in(tree: Any) -> tuple[list[Any], list[str]]:
    """All tensors and arrays of NumPy in a pytree, also inside of its objects.

    Of sparse and nested tensors, the `dense_parts`.

    Also returns the classes of the objects that cannot be pickled.
    """
    pickler, unpicklable = _Pickler(), set[str]()
    for leaf in pytree.leaves(tree):
        if isinstance(leaf, Tensor) or _is_array(leaf) or pytree.is_object(leaf):
            try:
                pickler.dump(leaf)
            except Exception:  # code of the object, which may raise anything if it has no pickles
                unpicklable.add(type(leaf).__qualname__)
    return pickler.arrays, sorted(unpicklable)


class _Sink:
    """A file that keeps nothing."""

    def write(self, data: Any) -> None:
        pass


class _Pickler(pickle.Pickler):
    """Takes out tensors and arrays."""

    def __init__(self) -> None:
        super().__init__(_Sink(), protocol=pickle.HIGHEST_PROTOCOL)
        self.arrays: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.arrays += dense_parts(value)
        elif _is_array(value) and not value.dtype.hasobject:
            self.arrays.append(value)
        else:
            return NotImplemented
        return int, ()


def _is_array(value: Any) -> bool:
    """Whether it is an array or a number of NumPy, which PyTorch does not require."""
    return hasattr(type(value), "__array_interface__") and hasattr(type(value), "dtype")

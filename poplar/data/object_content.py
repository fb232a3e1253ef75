"""What is inside of objects that are no containers, such as graphs of another library.

It is found by pickling them, as a worker of a `DataLoader` does.
"""

from __future__ import annotations

import hashlib
import pickle
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from poplar.data.pytree import is_array

_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, RuntimeError)
"""What `pickle` raises for objects that have no pickles, and classes of torch (RuntimeError)."""


class Content(NamedTuple):
    """What an object is pickled as."""

    arrays: list[Any]
    """Its tensors, and its arrays of NumPy, in the order in which they are pickled."""
    rest: str
    """A hash of everything else."""


def content_of(value: Any) -> Content | None:
    """What an object, or an array, contains; None if it cannot be pickled."""
    arrays, digest = list[Any](), hashlib.sha256()
    try:
        _Pickler(SimpleNamespace(write=digest.update), arrays).dump(value)
    except _UNPICKLABLE:
        return None
    return Content(arrays, digest.hexdigest())


class _Pickler(pickle.Pickler):
    """Takes out tensors and arrays, so that neither their values nor their device matter."""

    def __init__(self, file: Any, arrays: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._arrays = arrays

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) or (is_array(value) and not value.dtype.hasobject):
            self._arrays.append(value)
            return int, (len(self._arrays),)
        return NotImplemented

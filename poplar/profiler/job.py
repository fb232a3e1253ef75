"""One job on one rank: its arguments, their checks, and the identity of its profile."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import poplar
from poplar.data import pytree
from poplar.data.lengths import SampleLengths, at_length, check_quantile, padded_length
from poplar.data.object_content import arrays_in
from poplar.profiler import memory_limit
from poplar.profiler.memory_limit import MemoryLimit
from poplar.profiler.model_code import code_of
from poplar.profiler.model_settings import settings_by_module
from poplar.system import devices, host_limits, kernel_settings
from poplar.values.errors import check_class
from poplar.values.plan import ALL_STAGES, FIRST_STAGE_SHARDING_PARAMETERS, checked_stages
from poplar.values.schema import positive_count
from poplar.zero import setup
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.optimizers.granularity import (
    Granularity,
    OptimizerFactory,
    known_granularity,
)
from poplar.zero.optimizers.optimizer_class import check_option_names
from poplar.zero.preserved_state import random_state_preserved
from poplar.zero.weights.initial_values import Weights

if TYPE_CHECKING:
    from typing_extensions import Self

UNKNOWN_SIZE = "of unknown size"
"""In the identity if samples have no tensors, or objects that cannot be pickled."""
_ONLY_VALUES = frozenset({"lr", "betas", "eps"})
"""Optimizer options that do not change times or memory."""
_ENGINE_OPTIONS = (
    "process_group",
    "units",
    "compute_dtype",
    "reduce_dtype",
    "timeout",
    "allow_forward_state",
    "weights",
    "device",
    "granularity",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is measured on this rank: the arguments of `profile_cluster`, which documents them."""

    model: nn.Module
    loss_fn: LossFunction
    example: Any
    optimizer_class: OptimizerFactory = torch.optim.AdamW
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    max_batch: int | None = None
    memory_limit: MemoryLimit = None
    stages: Sequence[int] = ALL_STAGES
    seconds: float = 60.0
    max_norm: float | None = 1.0
    process_group: dist.ProcessGroup | None = None
    units: Sequence[str | nn.Module | type[nn.Module]] | None = None
    compute_dtype: torch.dtype | str = "auto"
    reduce_dtype: torch.dtype = torch.float32
    timeout: timedelta | None = None
    allow_forward_state: bool = False
    weights: Weights = None
    device: torch.device | str | None = None
    granularity: Granularity | None = None
    lengths: Iterable[float] | Tensor | None = None
    """Lengths of the dataset's samples; None: all are as long as the example."""
    length_quantile: float = 0.99
    cache: bool | str | Path = True
    progress: bool = True

    @classmethod
    def of(cls, model: nn.Module, loss_fn: LossFunction, example: Any, **options: Any) -> Self:
        """The job of a user's arguments: options without a field here are the optimizer's.

        The default stages are those at which the optimizer can train.
        """
        known = {each.name for each in fields(cls)}
        own = {name: value for name, value in options.items() if name in known}
        others = {name: value for name, value in options.items() if name not in known}
        counts = {name: positive_count(own.get(name)) for name in ("max_batch", "global_batch")}
        own |= {name: count for name, count in counts.items() if count is not None}
        needs = own.get("granularity") or known_granularity(
            own.get("optimizer_class", torch.optim.AdamW), others
        )
        if needs == "parameter" and "stages" not in own:
            own["stages"] = range(FIRST_STAGE_SHARDING_PARAMETERS)
        return cls(model=model, loss_fn=loss_fn, example=example, optimizer_options=others, **own)

    @property
    def profile_seconds(self) -> float:
        """The part of `seconds` that the profile may take."""
        return self.seconds

    @property
    def engine_options(self) -> dict[str, Any]:
        """The options that are those of `HeteroZeroOptimizer`, without the optimizer's own."""
        return {name: getattr(self, name) for name in _ENGINE_OPTIONS}

    @functools.cached_property
    def sample_lengths(self) -> SampleLengths | None:
        """The distribution of `lengths`.

        Raises:
            ValueError: `lengths` or `length_quantile` are wrong.
        """
        if self.lengths is None:
            return None
        return SampleLengths(self.lengths, self.length_quantile)

    @functools.cached_property
    def rows(self) -> Any:
        """The example as one micro-batch if its samples are rows of tensors; else None."""
        samples = pytree.samples_in(self.example)
        with random_state_preserved(torch.device("cpu")):  # collate functions may be random
            (whole,) = pytree.split(self.example, [samples])
        return whole if pytree.rows_are_samples(whole, samples) else None

    @functools.cached_property
    def measured_lengths(self) -> SampleLengths | None:
        """`sample_lengths`, if the example can be cut or repeated to them."""
        given = self.sample_lengths  # raises for wrong lengths, also for those that are not used
        return None if self.rows is None else given

    def check(self) -> None:
        """Check what needs no communication, except for what the engine checks.

        Raises:
            ValueError: an argument is wrong; says how to fix it.
            TypeError: neither this call nor the optimizer has an argument.
        """
        check_class("model", self.model, nn.Module)
        if self.max_batch is not None and positive_count(self.max_batch) is None:
            raise ValueError(
                f"max_batch must be an integer above 0, got {self.max_batch!r}; it is the largest "
                "micro-batch to try on this rank"
            )
        memory_limit.check(self.memory_limit)
        if "params" in self.optimizer_options:
            raise TypeError(
                "params= is for the optimizer alone: all parameters that require a gradient are "
                "measured, in one group. Leave it out here"
            )
        own = [each.name for each in fields(self)]
        check_option_names(self.optimizer_class, self.optimizer_options, own)
        checked_stages(self.stages)
        if not (isinstance(self.seconds, Real) and 0 < self.seconds < math.inf):
            raise ValueError(f"seconds must be a finite number above 0, got {self.seconds!r}")
        if self.max_norm is not None and not (
            isinstance(self.max_norm, Real) and self.max_norm > 0
        ):
            raise ValueError(
                f"max_norm must be a number above 0, or None for no clipping, got {self.max_norm!r}"
            )
        if not isinstance(self.cache, (bool, str, Path)):
            raise ValueError(f"cache must be True, False or a folder, got {self.cache!r}")
        check_quantile(self.length_quantile)
        if pytree.samples_in(self.example) < 1:
            raise ValueError("example_batch has no samples; give at least one")
        if self.measured_lengths is not None:
            present = padded_length(self.rows)
            if not present:
                raise ValueError(
                    "lengths= needs an example_batch with tensors of the shape [samples, length, "
                    "...], which are cut or repeated along dim 1"
                )
            self.measured_lengths.check_padded(present)

    def must_be_equal(self) -> dict[str, Any]:
        """What must be equal on all ranks, because they would otherwise wait for each other."""
        function = self.loss_fn
        if isinstance(function, functools.partial):
            function = function.func
        # "2.13.0+cu126" and "2.13.0+cu130" are two builds of one version.
        releases = [each.partition("+")[0] for each in (poplar.__version__, torch.__version__)]
        return {
            "stages": list(self.stages),
            "seconds": self.seconds,
            "max_norm": self.max_norm,
            "loss_fn": getattr(function, "__qualname__", type(function).__qualname__),
            "versions": "poplar {}, torch {}".format(*releases),
            "lengths": None if self.lengths is None else str(self.sample_lengths),
        }

    def may_differ(self, device: torch.device) -> dict[str, Any]:
        """Entries of the identity that may differ between ranks, as plain values."""
        info, on_cpu = devices.describe(device), device.type == "cpu"
        with random_state_preserved(device):  # collate functions may be random
            sizes = self._sizes()
        return {
            "device": f"{info.name} {info.uuid}".strip(),
            "host": info.host,
            "builds": f"poplar {poplar.__version__}, torch {torch.__version__}",
            "driver": info.driver,
            "cores": info.cores,
            "quota": host_limits.processor_quota() if on_cpu else None,
            "threads": torch.get_num_threads() if on_cpu else 0,
            "precisions": kernel_settings.precisions(),
            "switches": kernel_settings.switches(),
            "max_batch": self.max_batch,
            "memory_limit": self.memory_limit,
            "example": sizes,
            "structure": digest([str(self.model), settings_by_module(self.model)]),
            "code": digest(code_of(self.model, self.loss_fn)),
        }

    def _sizes(self) -> str:
        """A text that is equal for examples whose samples have the same sizes.

        Samples that are not rows of tensors are described one by one. Repeated sizes count once.
        """
        found, samples = list[str](), list[Any]()
        if self.rows is None or any(arrays_in(_others(self.rows))):
            each = range(pytree.samples_in(self.example))
            samples = [pytree.take(self.example, [at]) for at in each]
        if self.rows is not None:
            # Measured lengths do not depend on how far the example happens to be padded.
            whole = self.rows if self.measured_lengths is None else at_length(self.rows, 1)
            found = [f"{list(t.shape[1:])}:{t.dtype}" for t in pytree.tensors(whole)]
            samples = list(map(_others, samples))
        if sizes := sorted(set(map(_shapes, samples)) - {""}):
            found.append(f"{len(sizes)} sizes of samples ({digest(sizes)})")
        if not found or any(UNKNOWN_SIZE in size for size in sizes):
            found.append(UNKNOWN_SIZE)
        return " ".join(found)

    def identity(
        self,
        checked: setup.Request,
        dtype: torch.dtype | None,
        by_rank: Sequence[Mapping[str, Any]],
        backend: str | None,
    ) -> dict[str, str]:
        """What a profile is valid for, beside its time budget. Values of an update do not matter.

        Args:
            checked: what the engine's check returned.
            dtype: the compute dtype; None: that of the model.
            by_rank: what `may_differ` returned.
            backend: for tensors of the device; the default transport follows from it.
        """
        shared, equal = checked.identity(), self.must_be_equal()
        timed_options = [
            {key: value for key, value in options.items() if key not in _ONLY_VALUES}
            for options in shared["optimizer options"]
        ]
        tensors = [shared[name] for name in ("model", "buffers", setup.OPAQUE)]
        identity = {
            "model": f"{type(self.model).__name__} {digest(tensors)}",
            "units": digest(shared["units"]),
            "optimizer": f"{shared['optimizer']} {timed_options} {shared['granularity']}",
            "compute_dtype": str(dtype if dtype is not None else "as the model is"),
            "reduce_dtype": str(checked.reduce_dtype),
            "world_size": str(len(by_rank)),
            "backend": str(backend),
        }
        identity |= {key: str(equal[key]) for key in ("stages", "max_norm", "loss_fn", "versions")}
        if self.lengths is not None:
            identity["length_distribution"] = str(self.sample_lengths)
        for key in by_rank[0]:
            values = [own[key] for own in by_rank]
            identity[key] = str(values[0] if len(set(values)) == 1 else values)
        return identity


def _others(batch: Any) -> list[Any]:
    """The leaves of a pytree that are not tensors."""
    return [leaf for leaf in pytree.leaves(batch) if not isinstance(leaf, Tensor)]


def _shapes(sample: Any) -> str:
    """Of all tensors and arrays in a sample, except for strings, whose dtype is their length."""
    arrays, unpicklable = arrays_in(sample)
    numbers = [array for array in arrays if getattr(array.dtype, "kind", None) not in ("U", "S")]
    shapes = [f"{list(array.shape)}:{array.dtype}" for array in numbers]
    return " ".join([*shapes, UNKNOWN_SIZE] if unpicklable else shapes)


def digest(content: Any) -> str:
    """16 hexadecimal digits that identify JSON content."""
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]

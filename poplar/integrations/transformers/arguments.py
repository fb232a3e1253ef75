"""`PoplarArguments`: the options of Poplar, beside `TrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from poplar.comm.deadline import deadline_within
from poplar.integrations.own_dtype import own_dtype
from poplar.planner.search import CHOICES
from poplar.profiler.memory_limit import check as check_memory_limit
from poplar.values.plan import STRATEGIES, Plan
from poplar.values.profile import ClusterProfile

_FOR_PLANNING = ("memory_limit", "max_batch", "seconds", "cache", "verify", "communication")
"""Options that do nothing if the plan is given."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _option(default: Any, text: str) -> Any:
    """A field with a default and its help text, which `HfArgumentParser` prints."""
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class PoplarArguments:
    """How training is spread over the ranks; `HfArgumentParser` can parse it.

    Raises:
        ValueError: a value is not one of those that the help text names.
    """

    stage: str = _option("auto", "ZeRO stage 0, 1, 2 or 3, or 'auto' for the fastest that fits.")
    plan: str | None = _option(
        None,
        "Train with this plan instead of measuring: a `poplar.Plan`, the path of its JSON file, or "
        "samples of each rank per pass as '2,2,15' (with stage=).",
    )
    profile: str | None = _option(
        None, "Plan on this `ClusterProfile`, or its JSON file, instead of measuring."
    )
    memory_limit: str | None = _option(None, "Memory of each rank that plans may use, as '10GiB'.")
    max_batch: int | None = _option(None, "Largest micro-batch that is measured and planned.")
    seconds: float = _option(60.0, "Time budget for measuring and for trial runs of plans.")
    cache: bool = _option(True, "Reuse the profile of an earlier run of the same job.")
    verify: bool = _option(True, "Time the best plans before the choice.")
    balance_lengths: bool = _option(
        False,
        "Divide each global batch by the lengths of its samples (the column length_column_name of "
        "TrainingArguments, or measured), and plan for these lengths. The gradient stays the same. "
        "train_sampling_strategy='group_by_length' does so, too.",
    )
    compute_dtype: str = _option(
        "model",
        "'model': that of the parameters (bf16=True and fp16=True of TrainingArguments are "
        "autocast, as usual); 'bf16' or 'fp16': compute in it, with fp32 masters.",
    )
    reduce_dtype: str = _option("fp32", "In which gradients are sent: 'fp32', 'bf16' or 'fp16'.")
    communication: str = _option(
        "exact",
        "Without plan=: the precision in which ranks send, 'exact', 'int8' or 'int4'; less than "
        "exact adds noise to the gradient. 'auto': where that makes the step clearly faster.",
    )
    communicator: str = _option("auto", "The transport, as for `HeteroZeroOptimizer`.")
    on_out_of_memory: str = _option("retry", "'retry' in smaller micro-batches, or 'raise'.")
    on_nonfinite: str = _option(
        "raise", "If a loss or the gradient norm is not finite: 'raise', or 'skip' the step."
    )
    replan: str = _option(
        "off",
        "Follow the ranks' speeds, as `follow_drift` does: 'advise' logs a faster plan, 'auto' "
        "trains by it. It needs a profile: measured, or profile=.",
    )
    run_record: bool = _option(
        True,
        "Write the measured steps to poplar_run.json in output_dir, for `poplar report`, if the "
        "plan was made from a profile.",
    )
    timeout: float | None = _option(
        None,
        "Seconds that a rank waits for others. Default: ddp_timeout of TrainingArguments if it is "
        "above its own default, else 300.",
    )

    def __post_init__(self) -> None:
        self.stage = str(self.stage)
        for name, known in (
            ("stage", ("auto", *map(str, range(len(STRATEGIES))))),
            ("compute_dtype", ("model", "bf16", "fp16")),
            ("reduce_dtype", tuple(_DTYPES)),
            ("replan", ("off", "advise", "auto")),
            ("communication", CHOICES["communication"]),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"PoplarArguments.{name} must be one of {', '.join(known)}, got {value!r}"
                )
        check_memory_limit(self.memory_limit)

    def given(
        self, global_batch: int, world_size: int
    ) -> tuple[Plan | None, ClusterProfile | None]:
        """The plan and the profile that these arguments name; None for what has to be made.

        Raises:
            ValueError: they are of other ranks, the plan has another global batch or stage, or the
                text is not one.
            OSError: a file cannot be read.
        """
        plan: Any = self.plan
        profile: Any = self.profile
        if isinstance(plan, str):
            plan = self._read_plan(plan, global_batch)
        if isinstance(profile, str):
            profile = ClusterProfile.from_json(profile)
        for name, value in (("plan", plan), ("profile", profile)):
            if value is not None and value.world_size != world_size:
                raise ValueError(
                    f"the {name} of PoplarArguments is for {value.world_size} ranks, but there "
                    f"are {world_size}; start as many, or make another {name}"
                )
        if plan is not None and plan.global_batch != global_batch:
            raise ValueError(
                f"the plan has a global batch of {plan.global_batch}, but TrainingArguments ask "
                f"for {global_batch} (per_device_train_batch_size x gradient_accumulation_steps x "
                "ranks); change one of them"
            )
        if plan is not None and profile is None and self.replan != "off":
            raise ValueError(
                f"PoplarArguments.replan={self.replan!r} compares steps with a profile, but only "
                "plan= was given; pass profile=, too, or leave out plan="
            )
        unset = {each.name: each.default for each in fields(self)}
        for name in _FOR_PLANNING:
            if plan is not None and (value := getattr(self, name)) != unset[name]:
                raise ValueError(
                    f"PoplarArguments.{name}={value!r} is for planning, but plan= was given; leave "
                    "out one of them"
                )
        if plan is not None and self.stage not in ("auto", str(plan.stage)):
            raise ValueError(
                f"PoplarArguments has stage={self.stage!r}, but the plan is one of stage "
                f"{plan.stage}; leave out stage="
            )
        return plan, profile

    def tuning_options(self) -> dict[str, Any]:
        """Arguments for `poplar.tune` that only these arguments determine, without the profile."""
        return {
            "stage": self.stage if self.stage == "auto" else int(self.stage),
            "verify": self.verify,
            "max_batch": self.max_batch,
            "memory_limit": self.memory_limit,
            "seconds": self.seconds,
            "cache": self.cache,
            "communication": self.communication,
            "leave_out": "never",  # the loop of the Trainer needs samples on every rank
        }

    def engine_options(self, model: nn.Module) -> dict[str, Any]:
        """Arguments for `poplar.tune` and `HeteroZeroOptimizer` alike."""
        return {
            "compute_dtype": _DTYPES.get(self.compute_dtype, own_dtype(model)),
            "reduce_dtype": _DTYPES[self.reduce_dtype],
            "timeout": self.wait_limit(),
        }

    def wait_limit(self) -> timedelta | None:
        """How long a rank waits for others; None: the default."""
        return None if self.timeout is None else timedelta(seconds=self.timeout)

    def with_ddp_timeout(self, args: Any) -> PoplarArguments:
        """With the timeout of `TrainingArguments`, if it was raised and there is no other.

        It is that of the process group, so waits end a little earlier where torch ends the process.
        """
        if self.timeout is not None or args.ddp_timeout <= TrainingArguments.ddp_timeout:
            return self
        world = dist.group.WORLD
        assert world is not None, "check_trainer has refused a script without process group"
        timeout = deadline_within(world, timedelta(seconds=args.ddp_timeout))
        return replace(self, timeout=timeout.total_seconds())

    def _read_plan(self, text: str, global_batch: int) -> Plan:
        """The plan in a JSON file, or of as many passes as the global batch needs."""
        if text.endswith(".json"):
            return Plan.from_json(text)
        if self.stage == "auto":
            raise ValueError(f"PoplarArguments.plan={text!r} names no stage; pass stage= too")
        one_pass = Plan.manual(text, stage=int(self.stage))
        passes, rest = divmod(global_batch, one_pass.global_batch)
        if rest or not passes:
            raise ValueError(
                f"a pass of the plan {text!r} has {one_pass.global_batch} samples, of which the "
                f"global batch of {global_batch} is not a multiple"
            )
        return Plan.manual(text, stage=int(self.stage), passes=passes)

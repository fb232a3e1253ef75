"""`poplar.verify`: compares one step under a plan with one process on the same batch.

Both start from the same values and get the same samples. Parameters, gradients, buffers and random
state of the model are restored afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poplar.comm import Control, Group, connect_control
from poplar.comm.copies import to_bytes
from poplar.data import pytree
from poplar.data.object_content import arrays_in
from poplar.optimizer import HeteroZeroOptimizer
from poplar.tuning.verification.one_process import (
    Gradient,
    OneProcess,
    Part,
    find_batch_dependence,
)
from poplar.tuning.verification.outcome import Tolerance, Verification, compare, noise
from poplar.values.communication import EXACT, Communication
from poplar.values.errors import (
    CollectiveTimeout,
    RankFailed,
    agreed,
    check_class,
    equal_on_all_ranks,
    is_agreed,
)
from poplar.values.plan import Plan
from poplar.zero.agreement import exchange_results, raise_on_all_ranks, raise_on_any_error
from poplar.zero.collective_calls import new_group
from poplar.zero.input_cast import inputs_cast
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.micro_batches import Loss, Weight
from poplar.zero.preserved_state import host_copies, model_preserved, parameters_preserved
from poplar.zero.unit import resolve_units

_DOING = "poplar.verify()"
_FP16_SCALE = 2.0**10
"""Avoids underflow of fp16 gradients. A power of two, so scaling does not round."""


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    plan: Plan,
    *,
    weight: Weight | None = None,
    loss: Loss = "mean",
    process_group: dist.ProcessGroup | None = None,
    units: Sequence[str | nn.Module | type[nn.Module]] | None = None,
    compute_dtype: torch.dtype | Literal["auto"] = "auto",
    reduce_dtype: torch.dtype = torch.float32,
    rtol: float | None = None,
    max_micro_batch: int | None = None,
    timeout: timedelta | None = None,
) -> Verification:
    """Check that a plan gives the same gradient as one process. Collective.

    All ranks run the passes of one step under the plan. Then the rank with the most samples runs
    the global batch alone, with autograd and in the same dtype. No optimizer steps. Every rank
    needs memory for the full model and its gradients.

    The passes send everything exactly. If the plan compresses what it sends, they run once more as
    it does, without warm-up, and the result has the error of that gradient against the exact one.

    Args:
        model: on this rank's device, in training or evaluation mode as it is trained. Its state is
            restored afterwards. The first rank's values are used.
        loss_fn, weight, loss: as for `train_step`.
        batch: the full global batch, the same on every rank.
        plan: the plan to check.
        process_group, units, compute_dtype, reduce_dtype: as for the optimizer.
        rtol: largest relative error of a parameter's gradient; None: by the dtypes (2e-5 in fp32).
        max_micro_batch: maximum samples per pass of the one process. None: the global batch, halved
            until it fits into the memory of a CUDA device; on a CPU pass a number that fits.
        timeout: how long a rank waits for other ranks; default: 5 minutes.

    Returns:
        An error per parameter, and notes if the loss itself depends on how a batch is split; equal
        on every rank. Print it, or test `.ok`.

    Raises:
        ValueError, TypeError, RuntimeError: arguments of this rank are wrong, or ranks differ.
        RankFailed: another rank failed.
    """
    with new_group(process_group, timeout, _DOING) as group:
        control = connect_control(group)

        def checked() -> tuple[str, list[str], torch.device]:
            check_class("model", model, nn.Module)
            _check_arguments(batch, plan, group, rtol, max_micro_batch)
            first = next(model.parameters(), torch.empty(0, device="cpu"))
            return *_digest(batch), first.device

        by_rank = exchange_results(control, checked, what=_DOING)
        with equal_on_all_ranks():
            _check_same_batch([digest for digest, _, _ in by_rank], plan)
        _, unseen, device = by_rank[group.rank]
        copies = host_copies(model) if device.type == "cuda" else None
        with model_preserved(model, device), parameters_preserved(model, copies):
            before = {parameter.dtype for parameter in model.parameters()}

            def optimizer_of(communication: Communication) -> HeteroZeroOptimizer:
                optimizer = HeteroZeroOptimizer(
                    model,
                    torch.optim.SGD,
                    plan=replace(plan, communication=communication),
                    process_group=process_group,
                    units=units,
                    compute_dtype=compute_dtype,
                    reduce_dtype=reduce_dtype,
                    timeout=timeout,
                    allow_forward_state=True,
                    lr=0.0,
                )
                if optimizer.is_active:
                    optimizer._training.checks.batches.skip()  # samples may be repeated
                return optimizer

            optimizer = optimizer_of(EXACT)
            computing = {parameter: parameter.dtype for parameter in model.parameters()}
            dtypes = set(computing.values())
            leader = max(range(group.size), key=plan.samples)
            comparison = _Comparison(
                control=control,
                leader=leader,
                plan=plan,
                process=OneProcess(
                    model=model,
                    loss_fn=loss_fn,
                    weight=weight,
                    loss=loss,
                    scale=_FP16_SCALE if torch.float16 in dtypes else 1.0,
                    heartbeat=lambda: _heartbeat(control, over=False),
                ),
                tolerance=Tolerance.of(*dtypes, reduce_dtype, relative=rtol),
                unseen=unseen,
            )
            with model_preserved(model, device):
                planned = comparison.run_plan(optimizer, batch)
            sent = None
            if (compressed := plan.communication.before_updates(plan.stage)).compresses:
                optimizer = optimizer_of(compressed)
                with model_preserved(model, device):
                    sent = comparison.run_plan(optimizer, batch)
            for parameter, computed in computing.items():
                if parameter.dtype != computed:
                    parameter.data = parameter.data.to(computed)
            casts = compute_dtype != "auto" or dtypes != before
            dtype = next(iter(dtypes & {torch.bfloat16, torch.float16}), None) if casts else None
            with inputs_cast(model, dtype, resolve_units(model, units)):
                return comparison.compare_with_one_process(
                    planned, batch, max_micro_batch or plan.global_batch, sent
                )


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """One step of a model: on all ranks under the plan, and on one rank alone."""

    control: Control
    leader: int
    """The rank that runs the one process."""
    plan: Plan
    process: OneProcess
    tolerance: Tolerance
    unseen: Sequence[str]
    """Classes of objects in the batch that cannot be pickled."""

    def run_plan(self, optimizer: HeteroZeroOptimizer, batch: Any) -> Gradient:
        """Loss and gradient under the plan; releases the optimizer. Collective.

        Only the leader gets the gradients.
        """
        try:
            planned = self._passes(optimizer, batch)
        except Exception as error:
            if not is_agreed(error):
                raise  # release() would wait for ranks that are elsewhere
            optimizer.zero_grad()
            optimizer.release()
            own = None if isinstance(error, RankFailed) else error
            raise_on_all_ranks(self.control, own, doing=_DOING)
        optimizer.zero_grad()
        optimizer.release()
        return planned

    def _passes(self, optimizer: HeteroZeroOptimizer, batch: Any) -> Gradient:
        rank, process = self.control.group.rank, self.process
        first, sizes = self.plan.offset(rank), list(filter(None, self.plan.micro_batches[rank]))
        part = pytree.select(batch, range(first, first + sum(sizes))) if sizes else None
        loss, count = 0.0, 0.0
        with optimizer.micro_batches(part, process.weight, process.loss) as micro_batches:
            for micro_batch in map(Part, micro_batches, sizes):
                try:
                    counted = process.count(micro_batch)  # the loss may empty the batch
                    value = process.run(micro_batch.batch)
                    (value * process.scale).backward()
                except CollectiveTimeout:
                    raise
                except Exception as error:  # the step fails on all ranks
                    raise agreed(error)  # noqa: B904 (it is the same error)
                count += counted
                loss += process.part_of_sum(value, counted)
        optimizer.clip_grad_norm_(float("inf"))  # clips nothing; raises if a rank has failed
        whole = optimizer.full_gradients()
        gradients = {}
        if rank == self.leader:
            gradients = {name: value.cpu() / process.scale for name, value in whole.items()}
        ours = torch.tensor([loss, count], dtype=torch.float64, device="cpu")
        total = torch.stack(self.control.exchange(ours, what=_DOING)()).sum(0)
        divisor = 1.0 if process.loss == "global_mean" else float(total[1])
        return Gradient(float(total[0]) / divisor, gradients, 0)

    def compare_with_one_process(
        self, planned: Gradient, batch: Any, micro_batch: int, sent: Gradient | None
    ) -> Verification:
        """Compare on the leader and send the result to all ranks. Collective.

        Args:
            planned: under the plan, sent exactly.
            micro_batch: most samples that the one process runs at once.
            sent: as the plan sends it, if that is not exact.
        """
        error: Exception | None = None
        outcome: Verification | None = None
        if self.control.group.rank == self.leader:
            try:
                outcome = self._compare(planned, batch, micro_batch, sent)
            except CollectiveTimeout:
                raise
            except Exception as caught:
                error = caught
            _heartbeat(self.control, over=True)
        else:
            while not _heartbeat(self.control, over=False)[self.leader]:
                pass
        raise_on_any_error(self.control, error, doing=_DOING)
        found = self.control.exchange_objects(outcome, what=_DOING)[self.leader]
        assert found is not None
        return found

    def _compare(
        self, planned: Gradient, batch: Any, micro_batch: int, sent: Gradient | None
    ) -> Verification:
        process, model = self.process, self.process.model
        device = next(model.parameters()).device
        with model_preserved(model, device):
            alone = process.gradient(batch, micro_batch)
        few = min(alone.micro_batch, pytree.samples_in(batch))
        sample = pytree.select(batch, range(few))
        with model_preserved(model, device):
            notes = find_batch_dependence(process, sample, self.tolerance)
        if self.unseen:
            notes.append(
                f"the batch contains {', '.join(self.unseen)}, which cannot be pickled, so it was "
                "not checked whether all ranks have the same batch"
            )
        expected = {name: value.cpu() for name, value in alone.gradients.items()}
        return Verification(
            stage=self.plan.stage,
            ranks=self.plan.world_size,
            global_batch=self.plan.global_batch,
            tolerance=self.tolerance.relative,
            loss=planned.loss,
            reference_loss=alone.loss,
            parameters=compare(planned.gradients, expected, self.tolerance),
            notes=tuple(notes),
            reference_rank=self.leader,
            reference_micro_batch=alone.micro_batch,
            communication=self.plan.communication,
            gradient_noise=None if sent is None else noise(sent.gradients, planned.gradients),
        )


def _heartbeat(control: Control, *, over: bool) -> list[bool]:
    """Exchange whether this rank's work is done, so that no rank times out. Collective.

    The one process may need more time for the global batch than the timeout.
    """
    received = control.exchange(torch.tensor([over], device="cpu"), what=_DOING)()
    return [bool(value) for value in received]


def _check_arguments(
    batch: Any, plan: Plan, group: Group, rtol: float | None, max_micro_batch: int | None
) -> None:
    check_class("plan", plan, Plan)
    plan.check_all_active("the verification")
    if plan.world_size != group.size:
        raise ValueError(
            f"rank {group.name}: the plan is for {plan.world_size} ranks, but this process group "
            f"has {group.size}; start {plan.world_size} ranks, or make a plan for {group.size}"
        )
    samples = pytree.samples_in(batch)
    if samples != plan.global_batch:
        raise ValueError(
            f"rank {group.name}: got a batch of {samples} samples, but the plan's global batch is "
            f"{plan.global_batch}; pass the whole global batch to poplar.verify() on every rank, "
            "not the rank's part"
        )
    if rtol is not None and not rtol > 0:
        raise ValueError(f"rank {group.name}: rtol must be above 0, got {rtol}")
    if max_micro_batch is not None and max_micro_batch < 1:
        raise ValueError(
            f"rank {group.name}: max_micro_batch must be at least 1, got {max_micro_batch}"
        )


def _digest(batch: Any) -> tuple[str, list[str]]:
    """A hash of all tensors and arrays in a batch, as one micro-batch.

    Also the classes of objects that cannot be pickled, so that their tensors are not in the hash.
    """
    digest = hashlib.sha256()
    arrays, unseen = arrays_in(pytree.split(batch, [pytree.samples_in(batch)]))
    for array in arrays:
        digest.update(f"{array.dtype} {tuple(array.shape)}".encode())
        if isinstance(array, Tensor):
            digest.update(to_bytes(array.detach().cpu().contiguous().reshape(-1)))
        else:
            digest.update(array.tobytes())
    return digest.hexdigest(), unseen


def _check_same_batch(digests: Sequence[str], plan: Plan) -> None:
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise ValueError(
            f"rank(s) {differing} passed another batch than rank 0 to poplar.verify(); pass the "
            f"same global batch of {plan.global_batch} samples on every rank (one seed, no "
            "sampler that splits it)"
        )

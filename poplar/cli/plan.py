"""`poplar plan`: the fastest plan for a profile, compared and explained on request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poplar.cli.options import (
    AsJson,
    Debug,
    Factors,
    GlobalBatch,
    HostStates,
    LeavingOut,
    MaxMicroBatch,
    Policy,
    Precisions,
    ProfileFile,
    Recomputation,
    Stages,
    output_file,
    parse_stages,
)
from poplar.cli.output import Output, command_output
from poplar.planner.explain import Explanation, explain
from poplar.planner.prediction import predicted_seconds
from poplar.planner.search import POLICIES, WITHIN, alternatives, plan_or_error
from poplar.programmes.search.decision import ProgrammeDecision, plan_programme
from poplar.programmes.search.explanation import explain_programme
from poplar.values.errors import NotExportable
from poplar.values.formatting import (
    format_bytes,
    format_ranks,
    format_rate,
    format_seconds,
    format_signed_percent,
)
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

if TYPE_CHECKING:
    from torch import nn

PADDED_ELEMENTS = 64
"""By which a flat parameter may be larger than its tensors, at most."""


def plan(
    cluster: ProfileFile,
    global_batch: GlobalBatch,
    stage: Stages = "auto",
    policy: Policy = "exact",
    max_micro_batch: MaxMicroBatch = None,
    recompute: Recomputation = "auto",
    factored: Factors = "auto",
    host_state: HostStates = "auto",
    leave_out: LeavingOut = "auto",
    communication: Precisions = "exact",
    output: Annotated[Path | None, output_file("The file to write the plan to.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also show the best plan of each stage and policy.")
    ] = False,
    explained: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show what bounds the plan, what would help, what each device adds."
        ),
    ] = False,
    workload: Annotated[
        str | None,
        typer.Option(
            "--programme",
            metavar="WORKLOAD",
            help="Also search how the ranks can divide the tensors of this model and loss: "
            "train.py:workload, as `poplar profile` takes it.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find the fastest plan for a measured cluster."""
    request: dict[str, Any] = {
        "stages": parse_stages(stage),
        "max_micro_batch": max_micro_batch,
        "recompute": recompute,
        "factored": factored,
        "host_state": host_state,
        "leave_out": leave_out,
        "communication": communication,
    }
    with command_output(as_json=as_json, debug=debug) as result:
        profile = ClusterProfile.from_json(cluster)
        within = math.inf if compare else WITHIN
        by_stage = alternatives(
            profile, global_batch=global_batch, policy=policy, **request, within=within
        )
        chosen = by_stage[0]
        document: dict[str, Any] = {"plan": chosen.to_dict()}
        result.show(str(chosen), *(f"note: {note}" for note in profile.notes))
        if compare:
            by_policy = {
                name: plan_or_error(profile, global_batch=global_batch, policy=name, **request)
                for name in POLICIES
            }
            document["stages"] = [best.to_dict() for best in by_stage]
            document["policies"] = {
                name: found.to_dict() if isinstance(found, Plan) else str(found)
                for name, found in by_policy.items()
            }
            _compare(result, {f"stage {best.stage}": best for best in by_stage}, "best of")
            _compare(result, by_policy, "policy")
        if explained:
            explanation = explain(profile, chosen, **request)
            document["explanation"] = explanation.to_dict()
            _explain(result, explanation)
        if workload is not None:
            decision, reason = _programme(workload, profile, chosen)
            no_programme = {"programme": None, "reason": reason}
            document["programme"] = no_programme if decision is None else decision.to_dict()
            result.show(reason)
        result.document = document if len(document) > 1 else chosen.to_dict()
        if output is not None:
            chosen.to_json(output)
            result.show(f"written to {output}")


def _programme(
    workload: str, profile: ClusterProfile, chosen: Plan
) -> tuple[ProgrammeDecision | None, str]:
    """The programme of a workload's loss, compared with a plan; and the decision in words.

    None: the workload cannot have a programme.

    Raises:
        ValueError: the profile is of another model.
    """
    import torch

    from poplar.cli.workload import load
    from poplar.programmes.run.checked_export import CheckedExport, check_computation
    from poplar.zero.optimizers.granularity import known_granularity

    loaded = load(workload)
    _check_is_profiled(loaded.model, profile, workload)
    profiled = profile.identity.get("compute_dtype", "").removeprefix("torch.")
    dtype = getattr(torch, profiled, None)  # None: "as the model is", or not in the profile
    options = loaded.optimizer_arguments
    needs = options.get("granularity") or known_granularity(loaded.optimizer_class, options)
    try:
        check_computation(loaded.model, loaded.loss, dtype, needs)
        checked = CheckedExport(
            loaded.model, loaded.loss_fn, loaded.example_batch, chosen.global_batch
        )
    except NotExportable as error:
        return None, f"No programme: {error}."
    graph = checked.exported.graph
    decision = plan_programme(graph, profile, chosen)
    return decision, explain_programme(decision, graph)


def _check_is_profiled(model: nn.Module, profile: ClusterProfile, workload: str) -> None:
    """Raise unless a model has the profile's trained elements, but for what pads each tensor."""
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    padded = sum(trained) + PADDED_ELEMENTS * len(trained)
    if not sum(trained) <= profile.model.numel <= padded:
        raise ValueError(
            f"the profile is of a model with {profile.model.numel} trained elements, but that of "
            f"{workload} has {sum(trained)}; give the workload that was profiled, or profile it"
        )


def _compare(output: Output, found: Mapping[str, Plan | ValueError], title: str) -> None:
    """Show a table of plans by name, then why the other names have no plan.

    Args:
        output: where to show it.
        found: a plan or a reason by name.
        title: what the names are.
    """
    plans = {name: plan for name, plan in found.items() if isinstance(plan, Plan)}
    best = min(map(predicted_seconds, plans.values()), default=0.0)
    rows = []
    for name, plan in plans.items():
        prediction, seconds = plan.prediction or {}, predicted_seconds(plan)
        rows.append(
            (
                name,
                str(plan.stage),
                format_seconds(seconds),
                format_rate(prediction["samples_per_second"]),
                f"{best / seconds:.2f}x",
                format_bytes(max(prediction["memory_bytes"])),
                prediction["bound"],
            )
        )
    columns = ("stage", "step", "speed", "of the best", "most memory", "bound by")
    output.show_table((title, *columns), *rows)
    for name, reason in found.items():
        if isinstance(reason, ValueError):
            output.show(f"{title} {name}: {reason}")


def _explain(output: Output, explanation: Explanation) -> None:
    """Show what bounds the plan, what would help, and what each group of devices adds."""
    output.show(*explanation.sentences())
    changes = [
        (
            f"{change.subject} ({change.device})" if change.device else change.subject,
            change.amount,
            format_signed_percent(change.gain),
            str(change.stage),
        )
        for change in explanation.changes
    ] or [("nothing that was tried", "", "", "")]
    output.show_table(("what would help", "how much", "gain", "then stage"), *changes)
    if explanation.contributions:
        output.show_table(
            ("without", "device", "samples/s", "verdict"),
            *(
                (
                    format_ranks(one.ranks),
                    one.device,
                    "" if one.without is None else format_signed_percent(one.without),
                    one.advice or one.verdict,
                )
                for one in explanation.contributions
            ),
        )

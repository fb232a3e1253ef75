"""What trainers expect of `state_dict`, `load_state_dict` and `consolidate_state_dict`.

Accelerate loads `state_dict()` right after construction, Lightning saves what
`consolidate_state_dict` collects, and a plain optimizer and Poplar load each other's state.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import reference
import torch
import training
from models import ModelSpec
from ranks import Failure, Pool
from reference import Recipe
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from training import STAGES, Run, assert_close, assert_raised, assert_same, uneven

from poplar import HeteroZeroOptimizer, Plan
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.zero.update import ShardedUpdate

RECIPE = Recipe(batches=(12,) * 4, spec=ModelSpec(two_groups=True, tied=True, frozen=True))
BF16 = replace(RECIPE, spec=ModelSpec(dtype=torch.bfloat16))


def moved(state: Any) -> Any:
    """As Accelerate moves a state dict to the device of the parameters."""
    if isinstance(state, (list, tuple)):
        return type(state)(map(moved, state))
    if isinstance(state, dict):
        return type(state)({key: moved(value) for key, value in state.items()})
    return state.to(harness.device()) if isinstance(state, Tensor) else state


def everything(model: nn.Module, optimizer: HeteroZeroOptimizer) -> dict[str, Tensor]:
    """All parameters and state by name, on every rank."""
    state = [optimizer.full_state_dict(rank) for rank in range(harness.size())][harness.rank()]
    assert state is not None
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    held = {
        f"{names[index]}.{key}": value
        for index, values in state["state"].items()
        for key, value in values.items()
    }
    return {**training.whole_parameters(model, optimizer), **held}


# Trainers


def train_as_trainers_do(run: Run) -> dict[str, Tensor]:
    """The state is moved and loaded after construction and between steps."""
    model, optimizer = training.prepare(run)
    optimizer.load_state_dict(moved(optimizer.state_dict()))
    for step in range(len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
        before = everything(model, optimizer)
        places = state_places(optimizer)
        optimizer.load_state_dict(moved(optimizer.state_dict()))
        for parameter, values in optimizer.state.items():  # as Lightning does after loading
            optimizer.state[parameter] = moved(values)
        assert state_places(optimizer) == places, "loading needs no second copy of the state"
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_same(everything(model, optimizer), before)
    return training.whole_parameters(model, optimizer)


def state_places(optimizer: HeteroZeroOptimizer) -> list[int]:
    tensors = [v for values in optimizer.state.values() for v in values.values()]
    return [t.local.data_ptr() for t in tensors if isinstance(t, ShardTensor)]


@pytest.mark.parametrize("stage", STAGES)
def test_loading_its_own_state_changes_nothing(ranks: Pool, stage: int) -> None:
    for parameters in ranks.run(train_as_trainers_do, Run(RECIPE, uneven(stage))):
        assert_close(parameters, reference.train(RECIPE).parameters)


def set_in_state(stage: int) -> dict[str, Any]:
    """What setting values in the state of a parameter does, as wrappers of an optimizer do."""
    run = Run(RECIPE, uneven(stage))
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    parameter = model.blocks[0].up.weight
    state = optimizer.state[parameter]
    slow = state["exp_avg"].clone()
    messages = []
    for add in (
        lambda: state.__setitem__("slow", slow),
        lambda: state.setdefault("slow", slow),
        lambda: state.update(slow=slow),
        lambda: state.__ior__({"slow": slow}),
    ):
        with harness.catching() as caught:
            add()
        messages.append(caught[0].message if caught else "")
    training.take_step(run, model, optimizer, 1)  # `state` has the step from before
    state["exp_avg"] = state["exp_avg"].clone().zero_()
    state |= {"exp_avg_sq": state["exp_avg_sq"].clone().zero_()}
    whole = everything(model, optimizer)
    saved = optimizer.state_dict()["state"]
    copied = copy.deepcopy(state)
    copied["slow"] = slow
    return {
        "messages": messages,
        "keys": optimizer.state[parameter].keys() ^ state.keys(),
        "exp_avg": whole["blocks.0.up.weight.exp_avg"].unique().tolist(),
        "exp_avg_sq": whole["blocks.0.up.weight.exp_avg_sq"].unique().tolist(),
        "classes": {type(values) for values in (*saved.values(), copied, state | {})},
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_key_that_the_class_does_not_have_cannot_be_set(ranks: Pool, stage: int) -> None:
    """A value of another key is in effect. A rank owns nothing."""
    for found in ranks.run(set_in_state, stage):
        assert all("in a dict of your own, by parameter" in text for text in found["messages"])
        assert len(found["messages"]) == 4
        assert not found["keys"]
        assert found["exp_avg"] == [0.0]
        assert found["exp_avg_sq"] == [0.0]
        assert found["classes"] == {dict}


def write_in_hooks(stage: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A state dict that a hook has changed, the state then, and from before."""
    run = Run(RECIPE, uneven(stage))
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    parameter = model.blocks[0].up.weight
    before = copy.deepcopy(optimizer.state[parameter])

    def change(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for values in state["state"].values():
            values["exp_avg"] = torch.zeros_like(values["exp_avg"])
            values["extra"] = 1

    optimizer.register_state_dict_post_hook(change)
    saved = optimizer.state_dict()["state"][optimizer_index(optimizer, parameter)]
    return own_parts(saved), own_parts(optimizer.state[parameter]), own_parts(before)


def own_parts(values: dict[str, Any]) -> dict[str, Any]:
    return {key: v.local if isinstance(v, ShardTensor) else v for key, v in values.items()}


def optimizer_index(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """The number of a parameter in the state dict."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return next(index for index, each in enumerate(held) if each is parameter)


@pytest.mark.parametrize("stage", [0, 2])
def test_hooks_of_a_state_dict_change_the_state_dict_alone(ranks: Pool, stage: int) -> None:
    for saved, now, before in ranks.run(write_in_hooks, stage):
        assert saved["extra"] == 1
        assert "extra" not in now
        assert_same(now, before)
        assert not saved["exp_avg"].any()


def read_state_before_the_first_step(run: Run) -> dict[str, Tensor]:
    """torch's helpers and trainers create the state before there was an update."""
    model, optimizer = training.prepare(run)
    get_optimizer_state_dict(model, optimizer)
    training.take_step(run, model, optimizer, 0)
    get_optimizer_state_dict(model, optimizer)
    for step in range(1, len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", {"eps": 1e-5}),
        ("NAdam", {"eps": 1e-5}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
        ("SGD", {}),
        ("Adagrad", {"eps": 1e-5, "initial_accumulator_value": 0.5}),
    ],
)
def test_state_that_is_created_to_be_read_is_not_used(
    ranks: Pool, optimizer: str, options: dict[str, Any]
) -> None:
    recipe = Recipe(optimizer=optimizer, options=(("lr", 1e-3), *options.items()))
    for parameters in ranks.run(read_state_before_the_first_step, Run(recipe, uneven(2))):
        assert_close(parameters, reference.train(recipe).parameters)


def consolidate_as_lightning_does(run: Run, to: int) -> dict[str, Any]:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    assert optimizer.consolidate_state_dict(to=to) is None
    whole = optimizer.full_state_dict(to)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "hooked": True})
    state = optimizer.state_dict() if harness.rank() == to else {}
    assert optimizer.state_dict()["hooked"]
    if whole is not None:
        assert_same(_flat(state), _flat(whole))
        state["state"].popitem()  # a caller may change it
        assert len(optimizer.state_dict()["state"]) == len(whole["state"])
    with pytest.raises(ValueError, match="to=4 must be one of the 4 ranks"):
        optimizer.full_state_dict(4)
    training.take_step(run, model, optimizer, 1)
    now = optimizer.state_dict()["state"][0]["exp_avg"]
    is_part = isinstance(now, ShardTensor) or whole is None
    assert is_part or not torch.equal(now, whole["state"][0]["exp_avg"]), "until the next step"
    return {} if whole is None else whole


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{i}.{key}": v for i, held in state["state"].items() for key, v in held.items()}


@pytest.mark.parametrize("stage", [0, 3])
def test_consolidated_state_is_the_state_dict_until_the_next_step(ranks: Pool, stage: int) -> None:
    states = ranks.run(consolidate_as_lightning_does, Run(RECIPE, uneven(stage)), 1)
    assert [bool(state) for state in states] == [False, True, False, False]
    assert all(value.device.type == "cpu" for value in _flat(states[1]).values())


class WarmedUpSGD(torch.optim.SGD):
    """Its first step adds a setting to the param groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("base_lr", group["lr"])
        return super().step(closure)


def add_a_setting(run: Run) -> None:
    model = models.build(run.recipe.spec).to(harness.device())
    groups, group = models.parameter_groups(run.recipe.spec, model), harness.group()
    optimizer = HeteroZeroOptimizer(
        model, WarmedUpSGD, plan=run.plan, params=groups, process_group=group, lr=0.01
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    training.take_step(run, model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.5
    training.take_step(run, model, optimizer, 1)
    assert [group["base_lr"] for group in optimizer.state_dict()["param_groups"]] == rates


def test_settings_that_the_class_adds_are_in_the_param_groups(ranks: Pool) -> None:
    ranks.run(add_a_setting, Run(RECIPE, uneven(1)))


# Plain optimizers


def continue_from(
    run: Run, parameters: dict[str, Tensor], state: dict[str, Any], steps: range
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = training.prepare(run)
    with optimizer.full_parameters(writeback=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    optimizer.load_state_dict(state)
    loaded = everything(model, optimizer)
    for step in steps:
        training.take_step(run, model, optimizer, step)
    return loaded, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_poplar_continues_from_a_plain_optimizer(ranks: Pool, stage: int, named: bool) -> None:
    model = models.build(RECIPE.spec)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = models.parameter_groups(RECIPE.spec, model) or []
    if named:  # by name, the order is of no importance
        for group in groups:
            group["params"] = [(names[id(p)], p) for p in reversed(group["params"])]
    optimizer = RECIPE.optimizer_class(groups, **dict(RECIPE.options))
    for step in range(2):
        models.mean_over_samples(model, RECIPE.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = optimizer.state_dict()
    results = ranks.run(continue_from, Run(RECIPE, uneven(stage)), parameters, state, range(2, 4))
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    held = {f"{order[i]}.{k}": v for i, values in state["state"].items() for k, v in values.items()}
    for loaded, left in results:
        assert_same(loaded, {**parameters, **held})
        assert_close(left, reference.train(RECIPE).parameters)


# The model's state


def load_model(run: Run) -> tuple[dict[str, int], bool]:
    """How often each flat parameter's elements were compared; what a forward then computes."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    other = models.build(run.recipe.spec, seed=5).to(harness.device())
    compared: dict[str, int] = {}
    refresh = ShardedUpdate.refresh

    def counting(self: Any, flat: Any, start: int = 0, stop: int | None = None) -> None:
        key = f"{id(flat)} {flat.numel}"
        compared[key] = compared.get(key, 0) + (flat.numel if stop is None else stop) - start
        refresh(self, flat, start, stop)

    with mock.patch.object(ShardedUpdate, "refresh", counting):
        model.load_state_dict(other.state_dict())
    assert compared
    assert all(int(key.split()[1]) == count for key, count in compared.items())
    batch = training.on_device(run.recipe.part(1, 0, 2))
    with torch.no_grad():
        expected = models.mean_over_samples(other, batch)
        same = torch.equal(models.mean_over_samples(model, batch), expected)
    for flat in optimizer._training.engine.trained:
        assert torch.equal(flat.master.to(flat.dtype), flat.shard)
    training.take_step(run, model, optimizer, 1)
    return compared, same


@pytest.mark.parametrize("stage", STAGES)
def test_loading_a_model_reaches_the_values_that_it_computes_with(ranks: Pool, stage: int) -> None:
    """And every element of the masters is compared with the loaded values once."""
    for _, same in ranks.run(load_model, Run(BF16, uneven(stage))):
        assert same


def load_wide_values(run: Run) -> None:
    model, optimizer = training.prepare(run)
    exact = models.build(replace(run.recipe.spec, dtype=torch.float32), seed=5).state_dict()
    model.load_state_dict(exact)
    loaded = everything(model, optimizer)
    for name, value in exact.items():
        assert torch.equal(loaded[f"{name}.master"], value)
        assert torch.equal(loaded[name], value.bfloat16())
    model.load_state_dict(model.state_dict())
    assert_same(everything(model, optimizer), loaded)  # the masters keep their precision


@pytest.mark.parametrize("stage", STAGES)
def test_fp32_values_are_loaded_exactly_into_masters(ranks: Pool, stage: int) -> None:
    ranks.run(load_wide_values, Run(BF16, uneven(stage)))


def use_sharded_model_state(run: Run, folder: str) -> None:
    model, optimizer = training.prepare(run)
    before = everything(model, optimizer)
    state = copy.deepcopy(model.state_dict())
    training.take_step(run, model, optimizer, 0)
    assert not torch.equal(everything(model, optimizer)["head.weight"], before["head.weight"])
    model.load_state_dict(state)
    assert_same(training.whole_parameters(model, optimizer), _parameters_in(before, model))
    path = Path(folder) / f"{harness.rank()}"
    savers = (lambda s: torch.save(s, path), lambda s: save_file(s, path), pickle.dumps)
    for save in savers:
        with pytest.raises(RuntimeError, match="only this rank's part"):
            save(model.state_dict())
    plain = models.build(run.recipe.spec)
    with pytest.raises(RuntimeError, match="only this rank's part"):
        plain.load_state_dict(model.state_dict())
    wrong = {**state, "head.weight": torch.zeros(3, 3)}
    wrong["norm.bias"] = ShardTensor(torch.zeros(1), model.norm.bias.shape, 0)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight") as failure:
        model.load_state_dict(wrong)
    owns_some = state["norm.bias"].local.numel() > 0
    assert ("norm.bias holds elements [0, 1)" in str(failure.value)) == owns_some
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in state.items() if k != "norm.bias"})
    with (
        pytest.raises(RuntimeError, match=r"full_parameters\(writeback=True\)"),
        optimizer.full_parameters(),
    ):
        model.load_state_dict(before, strict=False)


def _parameters_in(values: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {name: values[name] for name, _ in model.named_parameters()}


def test_sharded_model_state_is_loaded_and_refused_elsewhere(ranks: Pool, tmp_path: Path) -> None:
    recipe = replace(RECIPE, spec=ModelSpec())
    ranks.run(use_sharded_model_state, Run(recipe, uneven(3)), str(tmp_path))


# Bad input

Mistake = Callable[[dict[str, Any]], dict[str, Any]]


def other_class(state: dict[str, Any]) -> dict[str, Any]:
    model = models.build(RECIPE.spec)
    optimizer = torch.optim.SGD(models.parameter_groups(RECIPE.spec, model), lr=0.1, momentum=0.9)
    models.mean_over_samples(model, RECIPE.batch(0)).backward()
    optimizer.step()
    return optimizer.state_dict()


def state_of_other_class(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": other_class(state)["state"]}


def adam(state: dict[str, Any]) -> dict[str, Any]:
    groups = [{**group, "decoupled_weight_decay": False} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def wrong_shape(state: dict[str, Any]) -> dict[str, Any]:
    key = next(iter(state["state"]))
    values = {**state["state"][key], "exp_avg": torch.zeros(3, 5)}
    return {**state, "state": {**state["state"], key: values}}


def missing_value(state: dict[str, Any]) -> dict[str, Any]:
    key = next(iter(state["state"]))
    values = {k: v for k, v in state["state"][key].items() if k != "exp_avg_sq"}
    return {**state, "state": {**state["state"], key: values}}


def fewer_groups(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "param_groups": state["param_groups"][:1]}


def smaller_group(state: dict[str, Any]) -> dict[str, Any]:
    first, second = state["param_groups"]
    fewer = {key: value[:-1] for key, value in second.items() if key in ("params", "param_names")}
    return {**state, "param_groups": [first, {**second, **fewer}]}


def other_names(state: dict[str, Any]) -> dict[str, Any]:
    first, second = state["param_groups"]
    names = ["module." + name for name in second["param_names"]]
    return {**state, "param_groups": [first, {**second, "param_names": names}]}


def no_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    return state["state"]


def other_step(state: dict[str, Any]) -> dict[str, Any]:
    held = {k: {**v, "step": torch.tensor(9.0)} for k, v in state["state"].items()}
    return {**state, "state": held}


MISTAKES = {
    other_class: "has no 'amsgrad', 'betas', 'eps'; it was saved by another optimizer class",
    state_of_other_class: "saved by another optimizer class",
    adam: "Adam and AdamW differ",
    wrong_shape: "has shape (3, 5), but here it has shape",
    missing_value: "saved by another optimizer class or with other options",
    fewer_groups: "has 1 param groups, but this optimizer has 2",
    smaller_group: "param group 1 of the state dict has",
    other_names: "param group 1 of the state dict is of other parameters",
    no_optimizer: "has 'state' and 'param_groups'",
}


def load_bad_state(run: Run, mistakes: list[Mistake], local: bool) -> list[list[Failure]]:
    """Load wrong states on one rank, and the right one on the others."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    before, found = everything(model, optimizer), []
    states = [optimizer.full_state_dict(rank) for rank in range(harness.size())]
    for mistake in mistakes:
        state: Any = optimizer.state_dict() if local else states[harness.rank()]
        if harness.rank() == 3:
            state = mistake(state)
        with harness.catching() as caught:
            optimizer.load_state_dict(state)
        found.append(caught)
        assert_same(everything(model, optimizer), before)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    training.take_step(run, model, optimizer, 1)
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_wrong_state_on_one_rank_raises_on_all_and_changes_nothing(ranks: Pool, stage: int) -> None:
    by_rank = ranks.run(load_bad_state, Run(RECIPE, uneven(stage)), list(MISTAKES), False)
    for index, pattern in enumerate(MISTAKES.values()):
        failures = [found[index][0] if found[index] else None for found in by_rank]
        assert_raised(failures, pattern)
        assert [failure.type for failure in failures[:3]] == ["RankFailed"] * 3
        assert failures[3].type == "ValueError"


@pytest.mark.parametrize("local", [False, True])
def test_states_of_different_steps_raise(ranks: Pool, local: bool) -> None:
    by_rank = ranks.run(load_bad_state, Run(RECIPE, uneven(1)), [other_step], local)
    assert_raised([found[0][0] for found in by_rank], "different states of", kind=ValueError)


def move_wrapped_model(stage: int) -> None:
    """Wrappers change the names in the model; torch's helpers and Poplar leave them out."""

    def build() -> tuple[nn.Module, HeteroZeroOptimizer]:
        layers = [checkpoint_wrapper(nn.Linear(9, 13)), nn.Linear(13, 5), nn.Linear(5, 3)]
        model = nn.Sequential(*layers).to(harness.device())
        model[1] = torch.compile(model[1], backend="eager")
        params = list(model.named_parameters())
        plan = Plan(stage=stage, global_batch=2, micro_batches=((1,), (1,)), shares=(0.6, 0.4))
        group = harness.group()
        return model, HeteroZeroOptimizer(
            model, torch.optim.AdamW, plan=plan, params=params, process_group=group, lr=1e-2
        )

    model, optimizer = build()
    optimizer.train_step(lambda m, b: m(b).sum(), torch.randn(1, 9, device=harness.device()))
    states = get_state_dict(model, optimizer)
    assert states[0].keys() == {f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")}
    other, loaded = build()
    set_state_dict(other, loaded, model_state_dict=states[0], optim_state_dict=states[1])
    assert_same(everything(other, loaded), everything(model, optimizer))


@pytest.mark.parametrize("stage", [1, 3])
def test_wrapped_modules_keep_their_names(ranks: Pool, stage: int) -> None:
    ranks.run(move_wrapped_model, stage, ranks=2)

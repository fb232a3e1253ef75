"""Models on `meta` are built from their initializers or from files; no rank holds the model."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
import torch.distributed as dist
from models import LENGTH, VOCABULARY, Block, ModelSpec
from ranks import Pool
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import STAGES

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.checkpoint import saved_model
from poplar.comm import Group
from poplar.comm.process_group import ProcessGroupCommunicator

SHARES = (0.6, 0.4, 0.0)
RANKS = len(SHARES)


class LanguageModel(nn.Module):
    """Drawn in registration order; with buffers, a tied head and frozen parameters."""

    def __init__(self, *, blocks: int = 2, tied: bool = True, hidden: int = 61) -> None:
        super().__init__()
        spec = ModelSpec(hidden=hidden)
        self.embedding = nn.Embedding(VOCABULARY, spec.width)
        self.register_buffer("positions", torch.linspace(-1, 1, LENGTH), persistent=False)
        self.register_buffer("steps", torch.arange(3))
        self.blocks = nn.ModuleList(Block(spec) for _ in range(blocks))
        self.blocks[0].norm1.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.positions[: tokens.shape[1], None].to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def small_normal(module: nn.Module) -> None:
    """Changes what the constructors have set, and leaves some of it."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.LayerNorm):
        module.weight.mul_(1.5)


def plan_at(stage: int) -> Plan:
    batches = ((2, 1), (1, 2), (0, 1))
    return Plan(stage=stage, global_batch=7, micro_batches=batches, shares=SHARES)


def optimizer_of(model: nn.Module, stage: int, **options: Any) -> HeteroZeroOptimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    return HeteroZeroOptimizer(
        model,
        torch.optim.AdamW,
        params=[{"params": matrices, "weight_decay": 0.1}, {"params": vectors}],
        process_group=harness.group(),
        lr=1e-2,
        device=harness.device() if next(model.parameters()).is_meta else None,
        **{"plan": plan_at(stage), "compute_dtype": torch.float32, **options},
    )


def values_of(model: nn.Module, optimizer: HeteroZeroOptimizer) -> dict[str, Tensor]:
    with optimizer.full_parameters():
        state = model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}


def values_and_training(
    model: nn.Module, optimizer: HeteroZeroOptimizer
) -> list[dict[str, Tensor]]:
    """The values before training and after two steps, and the masters of this rank."""
    before = values_of(model, optimizer)
    masters = {
        str(i): flat.master.clone() for i, flat in enumerate(optimizer._training.engine.flats)
    }
    counts = optimizer.plan.cut(7)
    start = sum(counts[: harness.rank()])
    for step in range(2):
        batch = models.part(models.data(7, seed=step), start, start + counts[harness.rank()])
        batch = {key: value.to(harness.device()) for key, value in batch.items()}
        optimizer.train_step(models.mean_over_samples, batch)
    return [before, masters, values_of(model, optimizer)]


def assert_same(seen: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for mine, plain in zip(seen, expected, strict=True):
        assert mine.keys() == plain.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, plain[name], rtol=0, atol=0)


def build_both(stage: int, options: dict[str, Any], function: Callable | None) -> None:
    torch.manual_seed(7)
    plain = LanguageModel()
    if function is not None:
        with torch.no_grad():
            plain.apply(function)
    state_after = torch.get_rng_state()
    expected = values_and_training(
        plain.to(harness.device()), optimizer_of(plain, stage, **options)
    )
    torch.manual_seed(7 if harness.rank() != 1 else 8)
    state_before = torch.get_rng_state()
    with poplar.parameters_on_meta():
        model = LanguageModel()
    assert torch.equal(torch.get_rng_state(), state_before), "nothing is drawn on meta"
    parameters = list(model.parameters())
    optimizer = optimizer_of(model, stage, weights=function, **options)
    same = torch.equal(torch.get_rng_state(), state_before if harness.rank() == 1 else state_after)
    assert same, "a rank in the first rank's state draws as a plain build; others keep theirs"
    assert_same(values_and_training(model, optimizer), expected)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.head.weight is model.embedding.weight
    optimizer.release(values=False)
    assert all(p.is_meta and p.grad is None for p in parameters)
    assert model.head.weight is model.embedding.weight is parameters[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("options", "function"), [({}, None), ({"compute_dtype": torch.bfloat16}, small_normal)]
)
def test_build_from_meta_has_the_bits_of_a_plain_build(
    ranks: Pool, stage: int, options: dict[str, Any], function: Callable | None
) -> None:
    ranks.run(build_both, stage, options, function, ranks=RANKS)


def larger_on_later_ranks(module: nn.Module) -> None:
    """An initializer that reads state of its process."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02 * (1 + harness.rank()))


def build_from_unequal_values(
    plan: Plan, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values that an initializer draws on this rank, and those after two steps."""
    torch.manual_seed(7)
    drawn = LanguageModel().apply(larger_on_later_ranks).to(dtype).state_dict()
    first = [drawn]
    dist.broadcast_object_list(first, group=harness.group(), group_src=0)
    torch.manual_seed(7)
    with poplar.parameters_on_meta():
        model = LanguageModel()
    options = {"plan": plan, "compute_dtype": dtype, "weights": larger_on_later_ranks}
    optimizer = optimizer_of(model, plan.stage, **options)
    for flat in optimizer._training.engine.flats:
        own = flat.master.to(flat.dtype)
        torch.testing.assert_close(own, flat.shard.to(own.device), rtol=0, atol=0)
    before, _, after = values_and_training(model, optimizer)
    assert_same([before], first)
    optimizer.verify_replicas()
    return drawn, after


@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("host_state", [(), (0.5, 1.0, 0.0)])
def test_all_ranks_get_the_first_ranks_values(
    ranks: Pool, stage: int, dtype: torch.dtype, host_state: tuple[float, ...]
) -> None:
    plan = replace(plan_at(stage), host_state=host_state)
    (drawn, trained), *others = ranks.run(build_from_unequal_values, plan, dtype, ranks=RANKS)
    for own, values in others:
        assert not torch.equal(own["head.weight"], drawn["head.weight"])
        assert_same([values], [trained])


def save_sharded(state: dict[str, Tensor], folder: Path) -> None:
    """Two files and an index, as Hugging Face writes them."""
    names = sorted(state)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, inside in parts.items():
        save_file({name: state[name] for name in inside}, folder / file)
    weight_map = {name: file for file, inside in parts.items() for name in inside}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_both(stage: int, options: dict[str, Any], path: str, stored: dict[str, Tensor]) -> None:
    plain = LanguageModel()
    plain.load_state_dict({**stored, "head.weight": stored["embedding.weight"]})
    expected = values_and_training(
        plain.to(harness.device()), optimizer_of(plain, stage, **options)
    )
    for on_meta in (True, False):
        model = LanguageModel().to(harness.device())
        if on_meta:
            with poplar.parameters_on_meta():
                model = LanguageModel()
        before = torch.get_rng_state()
        comm = ProcessGroupCommunicator(Group.of(harness.group(), None))
        own = {**options, "communicator": comm, "weights": path}
        # All ranks have read the same files.
        with mock.patch.object(comm, "broadcast", side_effect=AssertionError("nothing differs")):
            optimizer = optimizer_of(model, stage, **own)
        assert torch.equal(torch.get_rng_state(), before)
        assert_same(values_and_training(model, optimizer), expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_weights_are_read_from_files(
    ranks: Pool, stage: int, compute_dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    stored = LanguageModel().state_dict()
    stored.pop("head.weight")  # tied
    stored["steps"] = torch.arange(3) + 10
    if compute_dtype is torch.float32:
        save_file(stored, tmp_path / "model.safetensors")
    else:
        save_sharded(stored, tmp_path)
    options = {"compute_dtype": compute_dtype}
    ranks.run(load_both, stage, options, str(tmp_path), stored, ranks=RANKS)


class WithoutInitializer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


class WritesToChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.normal_(self.inner.bias)


class LeavesHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale[:2])


def buffers_on_meta() -> nn.Module:
    with torch.device("meta"):
        return LanguageModel()


def fails_on_rank_1(module: nn.Module) -> None:
    if harness.rank() == 1:
        raise ValueError("the second rank fails")
    small_normal(module)


def build_fails(make: Callable[[], nn.Module], weights: Any, own_paths: bool) -> tuple[str, str]:
    if own_paths:
        weights = weights[harness.rank()]
    with poplar.parameters_on_meta():
        model = make()
    buffers = [b.is_meta for b in model.buffers()]
    state = torch.get_rng_state()
    with harness.catching() as caught:
        HeteroZeroOptimizer(
            model,
            torch.optim.SGD,
            stage=3,
            process_group=harness.group(),
            weights=weights,
            device=harness.device(),
            lr=0.1,
        )
    assert all(p.is_meta for p in model.parameters()), "nothing has changed"
    assert [b.is_meta for b in model.buffers()] == buffers
    assert torch.equal(torch.get_rng_state(), state)
    return caught[0].type, caught[0].message


@pytest.mark.parametrize(
    ("make", "weights", "message"),
    [
        (WithoutInitializer, None, "module '' .*'scale' on meta and no reset_parameters"),
        (WritesToChild, None, "module '' failed.* Initialize only a module's own parameters"),
        (LeavesHalf, None, "parameter 'scale' was not initialized completely"),
        (buffers_on_meta, None, "module '' .*'positions' on meta.*parameters_on_meta"),
        (buffers_on_meta, small_normal, "buffer 'positions' is on meta.*parameters_on_meta"),
        (LanguageModel, fails_on_rank_1, "the second rank fails"),
        (LanguageModel, 3, "weights must be a path of safetensors, or a function.*got int"),
    ],
)
def test_incomplete_initialization_raises_on_all_ranks_and_changes_nothing(
    ranks: Pool, make: Callable[[], nn.Module], weights: Any, message: str
) -> None:
    for _, seen in ranks.run(build_fails, make, weights, False, ranks=2):
        assert re.search(message, seen), seen


def broken_files(folder: Path) -> dict[str, tuple[Any, str]]:
    """Paths (one for each rank, if a tuple) and the messages that they cause."""
    state = LanguageModel().state_dict()
    state.pop("head.weight")

    def save(name: str, changed: dict[str, Tensor]) -> Path:
        save_file(changed, folder / name)
        return folder / name

    whole = save("whole", state)
    (folder / "truncated").write_bytes(whole.read_bytes()[:-8])
    (folder / "foreign").write_bytes(b"PK\3\4" + bytes(100))
    without = {name: value for name, value in state.items() if name != "norm.bias"}
    (folder / "index.json").write_text(json.dumps({"weight_map": {"norm.bias": "whole2"}}))
    other = {**state, "norm.bias": torch.ones_like(state["norm.bias"])}
    return {
        "truncated": (folder / "truncated", "truncated"),
        "foreign": (folder / "foreign", "of another format"),
        "absent": (folder / "absent", "missing"),
        "index": (folder / "index.json", "whole2"),
        "missing": (save("a", without), r"missing 'norm.bias', unexpected none"),
        "unexpected": (save("b", {**state, "x": torch.ones(1)}), "unexpected 'x'"),
        "shape": (
            save("c", {**state, "norm.bias": torch.ones(3)}),
            r"'norm.bias' is F32 \(3,\) in c and torch.float32 \(26,\) in the model",
        ),
        "kind": (save("d", {**state, "norm.bias": torch.ones(26).long()}), "'norm.bias' is I64"),
        "one rank": ((whole, folder / "absent"), "cannot read"),
        "different": ((whole, save("e", other)), "the ranks disagree on the values of the model"),
    }


def test_wrong_files_raise_on_all_ranks_and_change_nothing(ranks: Pool, tmp_path: Path) -> None:
    for case, (path, message) in broken_files(tmp_path).items():
        weights = tuple(map(str, path)) if isinstance(path, tuple) else str(path)
        seen = ranks.run(build_fails, LanguageModel, weights, isinstance(path, tuple), ranks=2)
        for _, text in seen:
            assert re.search(message, text), (case, text)
    seen = ranks.run(build_fails, buffers_on_meta, str(tmp_path / "whole"), False, ranks=2)
    for _, text in seen:
        assert re.search("buffer 'positions' is on meta.*parameters_on_meta", text), text


# Memory


class LiveBytes(TorchDispatchMode):
    """The current size of all storages that operators have returned, and its maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        alive = (reference() for reference in self.storages.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


def build_and_save(folder: str, source: str) -> dict[str, int]:
    hidden = 3000
    with poplar.parameters_on_meta():
        model = LanguageModel(blocks=6, tied=False, hidden=hidden)
    with mock.patch.object(saved_model, "_CHUNK", 1 << 10):
        with LiveBytes() as building:
            optimizer = optimizer_of(
                model,
                3,
                units=[Block],
                weights=source or None,
                communicator="process_group",
            )
        with LiveBytes() as saving:
            optimizer.save_model(f"{folder}/one.safetensors")
        with LiveBytes() as saving_sharded:
            optimizer.save_model(f"{folder}/sharded", sharded=True)
    flats = optimizer._training.engine.flats
    return {
        "share": sum(flat.shard.nbytes for flat in flats),
        "unit": max(unit.unsharded_bytes for unit in optimizer._training.engine.units),
        "model": sum(flat.numel * 4 for flat in flats),
        "building": building.most,
        "saving": saving.most,
        "saving sharded": saving_sharded.most,
    }


def test_no_rank_holds_more_than_its_share_and_one_unit(ranks: Pool, tmp_path: Path) -> None:
    for source in ("", str(tmp_path / "one.safetensors")):
        for held in ranks.run(build_and_save, str(tmp_path), source, ranks=RANKS):
            slack = held["unit"] // 20  # buffers, samples of the files and placeholders
            assert held["model"] > 5 * held["unit"]
            assert held["building"] <= held["share"] + held["unit"] + slack, held
            assert held["saving"] <= held["share"] + held["unit"] + slack, held
            assert held["saving sharded"] <= held["share"] + held["unit"] + slack, held

"""Frozen tensors that only their module understands train as in one process, and stage 3 cuts them.

The layers here stand for those of quantisation libraries: a parameter class with scales as its
attribute, a wrapper subclass, integers, and integer buffers.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from poplar import HeteroZeroOptimizer, Plan
from poplar.zero.opaque_parameter import component_tensors

WIDTH = 128
SHARES = (0.6, 0.3, 0.1)


class Quantised(nn.Parameter):
    """Integers with one scale per row, as bitsandbytes has it."""

    scale: Tensor

    def __new__(cls, data: Tensor) -> Quantised:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scale = torch.rand(len(data), 16) + 0.5
        return made


class Wrapped(Tensor):
    """Integers inside a tensor that looks like fp32, as torchao has it."""

    codes: Tensor

    def __new__(cls, codes: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _context: Any, _size: Any, _stride: Any) -> Wrapped:
        return Wrapped(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(
                func, args, kwargs or {}, cls(args[0].codes.detach())
            )
        plain = [a.codes.float() if isinstance(a, Wrapped) else a for a in args]
        return func(*plain, **(kwargs or {}))


def codes(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (WIDTH, WIDTH), generator=generator, dtype=torch.int8)


class Layer(nn.Module):
    """A frozen product and a trained one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seen = 0
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def frozen(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.frozen().to(x.dtype).T / WIDTH + self.up(self.down(x)))


class WithAttributes(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = Quantised(codes(seed))

    def frozen(self) -> Tensor:
        return self.weight.float() * self.weight.scale[:, :1]


class WithWrapper(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = nn.Parameter(Wrapped(codes(seed)), requires_grad=False)

    def frozen(self) -> Tensor:
        return self.weight * 1.0


class WithIntegers(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = nn.Parameter(codes(seed), requires_grad=False)

    def frozen(self) -> Tensor:
        return self.weight.float()


class WithBuffer(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("qweight", codes(seed).int())

    def frozen(self) -> Tensor:
        return self.qweight.float()


LAYERS = (WithAttributes, WithWrapper, WithIntegers, WithBuffer)


def build(layer: Callable[[int], nn.Module], seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer(seed + number) for number in range(3)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plan_of(stage: int, shares: tuple[float, ...] = SHARES) -> Plan:
    return Plan(stage=stage, global_batch=5, micro_batches=((2, 1), (0, 2), (0, 0)), shares=shares)


def own_part(plan: Plan) -> Tensor:
    torch.manual_seed(9)
    whole = torch.randn(plan.global_batch, WIDTH)
    first = sum(plan.samples(rank) for rank in range(harness.rank()))
    return whole[first : first + max(1, plan.samples(harness.rank()))]


def optimizer_of(model: nn.Module, plan: Plan, **options: Any) -> HeteroZeroOptimizer:
    group = harness.group()
    return HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, process_group=group, lr=1e-2, **options
    )


def frozen_values(model: nn.Module) -> list[Tensor]:
    return [layer.frozen().clone() for layer in model]


def reference(layer: Callable[[int], nn.Module], steps: int) -> list[float]:
    model = build(layer)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(9)
    x, losses = torch.randn(5, WIDTH), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(stage: int, kind: int, shares: tuple[float, ...]) -> tuple[list[float], list[bool]]:
    """Losses, and whether frozen values have their first bits afterwards, in a plain model too."""
    layer, plan = LAYERS[kind], plan_of(stage, shares)
    model = build(layer, seed=0)
    before = frozen_values(model)
    if harness.rank() == 2:  # takes over what the first rank has
        with torch.no_grad():
            for other in build(layer, seed=5).buffers():
                next(model.buffers()).copy_(other)
                break
    optimizer = optimizer_of(model, plan)
    losses = [optimizer.train_step(loss_of, own_part(plan)).loss for _ in range(4)]
    with optimizer.full_parameters():
        inside = frozen_values(model)
    optimizer.release()
    after = frozen_values(model)
    return losses, [torch.equal(a, b) for a, b in zip(before * 2, inside + after, strict=True)]


@pytest.mark.every_combination
@pytest.mark.parametrize("kind", range(len(LAYERS)))
@pytest.mark.parametrize("stage", [0, 3])
def test_losses_equal_one_process_and_frozen_tensors_keep_their_bits(
    ranks: Pool, stage: int, kind: int
) -> None:
    expected = reference(LAYERS[kind], steps=4)
    by_shares = []
    for shares in (SHARES, (0.0, 0.2, 0.8)):
        for losses, unchanged in ranks.run(train, stage, kind, shares, ranks=3):
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)
            assert all(unchanged)
        by_shares.append(losses)
    assert by_shares[0] == by_shares[1]


def share_of_memory(kind: int) -> tuple[int, int, int]:
    """Bytes of parameters on this rank, of all frozen codes, and on this rank after a new plan."""
    model, plan = build(LAYERS[kind]), plan_of(3)
    tensors = (*model.parameters(), *model.buffers())
    whole = sum(part.nbytes for tensor in tensors for part in component_tensors(tensor))
    optimizer = optimizer_of(model, plan)
    optimizer.train_step(loss_of, own_part(plan))
    first = optimizer.memory()["parameters"]
    optimizer.apply_plan(plan_of(3, (0.1, 0.1, 0.8)))
    moved = frozen_shards(optimizer)
    optimizer.apply_plan(plan_of(3, (0.1, 0.1, 0.8)))
    assert all(map(operator.is_, frozen_shards(optimizer), moved)), "equal shares move nothing"
    optimizer.train_step(loss_of, own_part(plan))
    return first, whole, optimizer.memory()["parameters"]


def frozen_shards(optimizer: HeteroZeroOptimizer) -> list[Tensor]:
    return [each.shard for unit in optimizer._training.engine.units for each in unit.opaque]


@pytest.mark.parametrize("kind", [0, 2, 3])
def test_stage_3_stores_the_planned_share_of_frozen_tensors(ranks: Pool, kind: int) -> None:
    results = ranks.run(share_of_memory, kind, ranks=3)
    for rank, (first, whole, second) in enumerate(results):
        assert first == pytest.approx(SHARES[rank] * whole, rel=0.05, abs=2000)
        assert second == pytest.approx((0.1, 0.1, 0.8)[rank] * whole, rel=0.05, abs=2000)


def change_stages(kind: int) -> tuple[list[float], list[bool]]:
    """Losses of a step at each stage, and whether the frozen tensors have kept their bits."""
    model, plan = build(LAYERS[kind]), plan_of(2)
    before = frozen_values(model)
    optimizer, losses = optimizer_of(model, plan), []
    for stage in (3, 1, 3, 0):
        losses.append(float(optimizer.train_step(loss_of, own_part(plan)).loss))
        optimizer.apply_plan(plan_of(stage))
    return losses, list(map(torch.equal, before, frozen_values(model)))


@pytest.mark.parametrize("kind", [0, 3])
def test_frozen_tensors_keep_their_bits_through_stages(ranks: Pool, kind: int) -> None:
    expected = reference(LAYERS[kind], steps=4)
    for losses, unchanged in ranks.run(change_stages, kind, ranks=3):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)
        assert all(unchanged)


def frozen_parts(model: nn.Module) -> list[Tensor]:
    """Copies of what the frozen tensors consist of."""
    frozen = [t for t in (*model.parameters(), *model.buffers()) if not t.requires_grad]
    return [part.clone() for tensor in frozen for part in component_tensors(tensor)]


def leave_out_and_take_back(kind: int) -> list[bool]:
    """Whether frozen tensors are unchanged while rank 1 is left out, and after it is back."""
    model = build(LAYERS[kind])
    before, plan = frozen_parts(model), plan_of(1).beside((1,))
    optimizer = optimizer_of(model, plan, compute_dtype=torch.bfloat16)
    unchanged = []
    for left_out in (1, 2):
        plan = plan_of(1).beside((left_out,))
        optimizer.apply_plan(plan)
        optimizer.train_step(loss_of, own_part(plan))
        with optimizer.full_parameters():
            parts = zip(before, frozen_parts(model), strict=True)
            unchanged += [a.dtype is b.dtype and torch.equal(a, b) for a, b in parts]
    return unchanged


@pytest.mark.parametrize("kind", range(len(LAYERS)))
def test_a_rank_that_is_left_out_does_not_cast_frozen_tensors(ranks: Pool, kind: int) -> None:
    for unchanged in ranks.run(leave_out_and_take_back, kind):
        assert all(unchanged)


def use_while_sharded(kind: int) -> list[str]:
    model, plan = build(LAYERS[kind]), plan_of(3)
    optimizer = optimizer_of(model, plan)
    optimizer.train_step(loss_of, own_part(plan))
    errors = []
    uses: list[Callable[[], Any]] = [model[1].frozen, lambda: copy.deepcopy(model)]
    if kind == 0:
        uses.append(lambda: model[1].weight.scale + 1)
    for use in uses:
        try:
            use()
            errors.append("none")
        except RuntimeError as error:
            errors.append(str(error))
    state = model.state_dict()
    names = {name.rpartition(".")[2] for name in state if "down" not in name and "up" not in name}
    with optimizer.full_parameters():
        whole = {name.rpartition(".")[2] for name in model.state_dict()}
    return [*errors, f"{sorted(names)}", f"{sorted(whole)}"]


@pytest.mark.parametrize("kind", range(len(LAYERS)))
def test_reading_a_sharded_frozen_tensor_names_full_parameters(ranks: Pool, kind: int) -> None:
    for *errors, sharded, whole in ranks.run(use_while_sharded, kind, ranks=3):
        assert all("full_parameters" in error for error in errors), errors
        assert sharded == "[]"
        assert "weight" in whole


class Writing(WithIntegers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight += 1
        return super().forward(x)


def write_in_forward() -> None:
    plan = plan_of(3)
    optimizer_of(build(Writing), plan).train_step(loss_of, own_part(plan))


def test_a_forward_that_writes_to_a_sharded_frozen_tensor_stops_all_ranks() -> None:
    for failure in harness.one_off(3, write_in_forward):
        assert "wrote to a frozen tensor" in str(failure)


class Replacing(WithIntegers):
    """As 4-bit layers of bitsandbytes in evaluation mode on some CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.weight.data = self.weight.data + 1
        return super().forward(x)


def train_after_a_forward_that_replaced_weights() -> None:
    plan = plan_of(3)
    optimizer = optimizer_of(model := build(Replacing).eval(), plan)
    with harness.catching() as caught, torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert "wrote to a frozen tensor" in caught[0].message
    optimizer.train_step(loss_of, own_part(plan))


def test_no_training_goes_on_after_a_forward_has_replaced_a_sharded_frozen_tensor() -> None:
    for failure in harness.one_off(3, train_after_a_forward_that_replaced_weights):
        assert "build the model and the optimizer again" in str(failure)


def refuse(kind: str) -> str:
    model = build(WithWrapper)
    if kind == "trained":
        model[0].weight.requires_grad_(True)
    optimizer = None
    try:
        optimizer = optimizer_of(model, plan_of(3))
        optimizer.release(values=False)
    except Exception as error:
        return str(error)
    return "none"


def test_a_trained_quantised_parameter_is_refused(ranks: Pool) -> None:
    for message in ranks.run(refuse, "trained", ranks=3):
        assert "train adapters such as LoRA" in message


def test_release_without_values_is_refused(ranks: Pool) -> None:
    for message in ranks.run(refuse, "values", ranks=3):
        assert "would lose quantised parameters" in message

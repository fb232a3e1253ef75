"""Inputs are cast once, where the model or a module of it is called from outside the model."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from poplar.data import pytree
from poplar.zero.input_cast import cast_inputs, inputs_cast

BF16, FP32 = torch.bfloat16, torch.float32
UNITS = ("encoder.blocks.0", "encoder.blocks.1")


class Block(nn.Module):
    """Records the dtypes of its arguments; the table must stay fp32 inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append((x.dtype, table.dtype))
        return x + self.inner(x) * table.to(x.dtype)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("table", torch.ones(4))
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, self.table, use_reentrant=False)
            else:
                x = block(x, self.table)
        return x


class Model(nn.Module):
    """A stem, an encoder whose blocks are units, and a loss without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.encoder = Encoder()
        self.loss = nn.MSELoss()
        self.got: object = None

    def forward(self, x: Tensor, *rest: object, **options: object) -> Tensor:
        self.got = (x, *rest, options)
        return self.encoder(self.stem(x))


@pytest.fixture
def model() -> Model:
    """Parameters are bf16, buffers are fp32, inputs are cast."""
    model = Model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)
    cast_inputs(model, BF16, UNITS)
    return model


def dtypes_in_blocks(model: Model) -> list[tuple[torch.dtype, torch.dtype]]:
    """The dtypes of the blocks' arguments, in the order of calls."""
    return [seen for block in model.encoder.blocks for seen in block.seen]


@dataclass
class Sample:
    image: Tensor
    label: int


def test_floating_point_tensors_in_any_argument_are_cast(model):
    pair = (torch.ones(3), torch.arange(3))
    sample = Sample(torch.ones(2, dtype=torch.float64), 5)
    model(torch.ones(2, 4), pair, 7, sample=sample, flag=torch.tensor(True), name="a")
    x, (first, second), number, options = model.got
    assert x.dtype is BF16
    assert first.dtype is BF16
    assert second.dtype is torch.int64
    assert number == 7
    assert options["sample"].image.dtype is BF16
    assert options["sample"].label == 5
    assert options["flag"].dtype is torch.bool
    assert options["name"] == "a"
    assert sample.image.dtype is torch.float64


def test_arguments_that_need_no_cast_are_the_same_objects(model):
    x, collected, cache = torch.ones(2, 4, dtype=BF16), [], OrderedDict(mask=torch.ones(2).bool())
    model(x, collected, cache=cache)
    assert model.got[0] is x
    assert model.got[1] is collected  # the model may append to it
    assert model.got[2]["cache"] is cache


def test_modules_inside_the_model_get_what_the_model_passes(model):
    model(torch.ones(2, 4))
    assert dtypes_in_blocks(model) == [(BF16, FP32), (BF16, FP32)]


def test_gradient_reaches_an_input_in_its_own_dtype(model):
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FP32


@pytest.mark.parametrize("name", ["stem", "encoder"])
def test_module_called_directly_is_cast(model, name):
    assert getattr(model, name)(torch.ones(2, 4)).dtype is BF16
    assert {table for _, table in dtypes_in_blocks(model)} <= {FP32}


def test_unit_called_directly_is_cast(model):
    assert model.encoder.blocks[1](torch.ones(2, 4), torch.ones(4)).dtype is BF16
    assert dtypes_in_blocks(model) == [(BF16, BF16)]


def test_loss_without_parameters_keeps_its_dtypes(model):
    assert model.loss(torch.ones(2, 4), torch.ones(2, 4)).dtype is FP32


def test_modules_inside_a_unit_have_no_hooks(model):
    for block in model.encoder.blocks:
        assert not block.inner._forward_pre_hooks


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_exception_in_the_model_does_not_change_later_casts(model, error):
    def fail(*_: object) -> None:
        raise error("a")

    failing = model.encoder.blocks[1].inner.register_forward_hook(fail)
    with pytest.raises(error):
        model(torch.ones(2, 4))
    failing.remove()
    assert model.encoder(torch.ones(2, 4)).dtype is BF16
    assert dtypes_in_blocks(model)[-1] == (BF16, FP32)


class TestActivationCheckpointing:
    """The backward calls modules again, from outside the model."""

    def test_block_is_recomputed_with_the_same_dtypes(self, model):
        model.encoder.checkpointing = True
        model(torch.ones(2, 4)).sum().backward()
        assert dtypes_in_blocks(model) == [(BF16, FP32)] * 4

    def test_whole_model_is_recomputed_with_the_same_dtypes(self, model):
        x = torch.ones(2, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
        assert dtypes_in_blocks(model) == [(BF16, FP32)] * 4

    def test_module_that_was_called_directly_is_cast_again(self, model):
        x = torch.ones(2, 4, requires_grad=True)
        checkpoint(model.encoder, x, use_reentrant=False).sum().backward()
        assert dtypes_in_blocks(model) == [(BF16, FP32)] * 4

    def test_earlier_direct_call_does_not_cast_a_recomputation(self, model):
        model.encoder.blocks[0](torch.ones(2, 4), torch.ones(4))
        model.encoder.checkpointing = True
        model(torch.ones(2, 4)).sum().backward()
        assert dtypes_in_blocks(model) == [(BF16, BF16), *[(BF16, FP32)] * 4]


class TestCompile:
    """The hooks break no graph of `torch.compile`."""

    @staticmethod
    def graphs(model: nn.Module, compiled: list[nn.Module], *, dtype: torch.dtype) -> int:
        counter = CompileCounter()
        torch._dynamo.reset()
        for module in compiled:
            module.compile(backend=counter, fullgraph=True)
        for _ in range(3):
            model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        return counter.frame_count

    @pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks"])
    @pytest.mark.parametrize("checkpointing", [True, False])
    def test_no_graph_breaks(self, model, whole, checkpointing):
        plain = Model().to(BF16)
        for each in (model, plain):
            each.encoder.checkpointing = checkpointing
            each.forward = lambda x, each=each: each.encoder(each.stem(x))
        graphs = [
            self.graphs(each, [each] if whole else list(each.encoder.blocks), dtype=dtype)
            for each, dtype in ((plain, BF16), (model, FP32))
        ]
        cast_is_a_graph = whole  # `compile` runs the model's hooks outside its graph
        assert graphs[1] == graphs[0] + cast_is_a_graph

    @pytest.mark.parametrize(
        "argument",
        [
            None,
            (torch.ones(2), 1),
            [torch.ones(2)],
            {"a": torch.ones(2)},
            OrderedDict(a=torch.ones(2)),
            Sample(torch.ones(2), 1),
        ],
        ids=lambda argument: type(argument).__name__,
    )
    def test_arguments_are_cast_inside_a_graph(self, model, argument):
        torch._dynamo.reset()
        model.forward = lambda x, given: (x, given)
        compiled = torch.compile(lambda x: model(x, argument), backend="eager", fullgraph=True)
        x, given = compiled(torch.ones(2, 4))
        assert x.dtype is BF16
        assert type(given) is type(argument)
        assert {tensor.dtype for tensor in pytree.tensors(given)} <= {BF16}

    def test_optimized_module(self):
        wrapped = torch.compile(Encoder(), backend="eager", fullgraph=True)
        for parameter in wrapped.parameters():
            parameter.data = parameter.data.to(BF16)
        cast_inputs(wrapped, BF16, ["_orig_mod.blocks.0", "_orig_mod.blocks.1"])
        for _ in range(2):
            assert wrapped(torch.ones(2, 4)).dtype is BF16


def test_copy_of_the_model_is_not_cast(model):
    """An average of the weights may be held in fp32."""
    average = copy.deepcopy(model).float()
    assert average(torch.ones(2, 4)).dtype is FP32
    assert model(torch.ones(2, 4)).dtype is BF16


def test_model_can_be_saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False).float()
    assert loaded(torch.ones(2, 4)).dtype is FP32


@pytest.mark.parametrize("dtype", [None, FP32])
def test_fp32_models_get_no_hooks(dtype):
    assert cast_inputs(Model(), dtype, UNITS) == []


def test_context_removes_its_hooks():
    model = Model()
    with inputs_cast(model, BF16, UNITS):
        assert model._forward_pre_hooks
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_module_that_calls_itself_is_cast_once(model):
    forward, tables = model.encoder.forward, []

    def twice(x: Tensor, nested: bool = False) -> Tensor:
        x = forward(x if nested else model.encoder(x, nested=True))
        tables.append(model.encoder.blocks[0].seen[-1][1])
        return x

    model.encoder.forward = twice
    model.encoder(torch.ones(2, 4))
    assert tables == [FP32, FP32]

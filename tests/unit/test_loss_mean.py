"""A loss that is no mean over samples is noticed; one that is never warns.

Of every loss 50 models and batches: `autotune` and `verify` run the model themselves, `train_step`
looks at a pass that runs anyway, and must find the same.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import unequal_passes as training
from subset import choose
from torch import Tensor, nn
from torch.nn import functional as F

from poplar.tuning import autotune
from poplar.zero import engine_hooks, preserved_state
from poplar.zero.checks import loss_mean
from poplar.zero.checks.loss_mean import FirstLossCheck, wrong_weight

SEEDS = range(choose(quick=4, full=10))


def ragged(seed: int, samples: int = 6) -> dict[str, Tensor]:
    """Token sequences whose labels have different lengths."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, training.VOCABULARY, (samples, training.LENGTH), generator=generator)
    counts = torch.randint(1, training.LENGTH, (samples, 1), generator=generator)
    counts[0], counts[1] = 2, training.LENGTH
    labels = inputs.masked_fill(torch.arange(training.LENGTH) >= counts, training.IGNORED)
    return {"input_ids": inputs, "labels": labels}


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("llama", "weight=poplar.tokens() here"),
        ("gpt2", "weight=poplar.tokens() here"),
        ("bert", "weight=poplar.tokens(shift=False) here"),
        ("tagger", "weight=poplar.tokens(shift=False) here"),
    ],
)
def test_language_models_get_the_line_to_add(name, expression):
    model = training.build(name)
    found = wrong_weight(training.loss_fn, model, ragged(seed=1))
    assert found is not None
    assert found.startswith("the loss is a mean over tokens")
    assert expression in found


def test_labels_with_another_name_are_named():
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return training.loss_fn(model, {"input_ids": batch[0], "labels": batch[1]})

    found = wrong_weight(loss_fn, training.build("tagger"), tuple(ragged(seed=1).values()))
    assert "weight=poplar.tokens(shift=False, labels=1) here" in found


def images(seed: int, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(samples, 3, 8, 8, generator=generator)
    return {"pixels": pixels, "labels": torch.randint(0, 5, (samples,), generator=generator)}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(144, 5),
    )


def cross_entropy(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(model(batch["pixels"]), batch["labels"], reduction=reduction)


@pytest.mark.parametrize("samples", [1, 3, 32])
def test_classifiers_with_dropout_never_warn(samples):
    for seed in SEEDS:
        assert wrong_weight(cross_entropy, classifier(), images(seed, samples)) is None


def test_a_given_weight_is_compared_with_the_loss():
    def counted(batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"].sum() + 1

    def total(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model, batch, "sum")

    def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch["pixels"]), batch["labels"], reduction="none")
        return (losses * batch["labels"]).sum() / batch["labels"].sum()

    batch, model = images(0, 6), classifier()
    by_samples = wrong_weight(cross_entropy, model, batch, weight=counted, where="here")
    assert by_samples.endswith("not over what weight= returns: pass no weight= here")
    assert "pass loss='sum'" in wrong_weight(total, model, batch, weight=counted)
    assert wrong_weight(weighted, model, batch, weight=lambda part: part["labels"].sum()) is None
    assert wrong_weight(weighted, model, batch, weight=counted) is not None


def test_a_loss_without_a_gradient_fits_any_weight():
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch["pixels"]), batch["labels"], reduction="none")
        return (losses * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)

    batch = images(0, 6) | {"mask": torch.zeros(6)}
    found = wrong_weight(loss_fn, classifier(), batch, weight=lambda part: part["mask"].sum())
    assert found is None


def test_a_masked_mean_is_no_sum_if_one_sample_counts():
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch["pixels"]), batch["labels"], reduction="none")
        return (losses * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)

    batch = images(0, 6)
    batch["mask"] = torch.zeros(6).index_fill(0, torch.tensor([5]), 1.0)
    found = wrong_weight(loss_fn, classifier(), batch)
    assert "weight=lambda batch: batch['mask'].sum()" in found


def test_a_module_that_couples_samples_is_told():
    class Centred(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values - values.mean(0)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["pixels"]).square().mean()

    found = wrong_weight(loss_fn, nn.Sequential(*classifier(), Centred()), images(0, 6))
    assert "not the mean of its samples' losses" in found


CLASS_WEIGHTS = torch.tensor([1.0, 1.0, 5.0, 20.0])


class Head(nn.Module):
    """Scores of four classes, of vectors and of each step of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.dropout, self.scores = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.scores(self.dropout(torch.tanh(self.hidden(values))))


Batch = dict[str, Tensor]


def batch_of(seed: int, samples: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    labels[seed % samples] = 3  # at least one of the class that some losses leave out
    steps = torch.randint(4, (samples, 6), generator=generator)
    ignored = torch.rand(samples, 6, generator=generator) < torch.linspace(0, 0.9, samples)[:, None]
    return {
        "x": torch.randn(samples, 8, generator=generator),
        "sequence": torch.randn(samples, 6, 8, generator=generator),
        "labels": labels,
        "steps": steps.masked_fill(ignored, 255),
        "mask": torch.rand(samples, 1, generator=generator),
        "is_valid": torch.rand(samples, generator=generator) < 0.5,
    }


def one_hot(batch: Batch) -> Tensor:
    return F.one_hot(batch["labels"], 4).float()


def dice(model: nn.Module, batch: Batch, over: int) -> Tensor:
    p, y = model(batch["x"]).softmax(1), one_hot(batch)
    return 1 - (2 * (p * y).sum(over) / (p.sum(over) + y.sum(over) + 1e-6)).mean()


def masked(model: nn.Module, batch: Batch, name: str) -> Tensor:
    mask = batch[name].view(-1, 1)
    return (((model(batch["x"]) - 1) ** 2) * mask).sum() / mask.sum().clamp(min=1e-3)


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    z = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def variance(model: nn.Module, batch: Batch) -> Tensor:
    z = model(batch["x"])
    return F.relu(1 - z.std(0)).mean() + z.square().mean()


def simclr(model: nn.Module, batch: Batch, parts: tuple[str, ...] = ()) -> Tensor:
    """NT-Xent of two views in one forward; of the model, or of its parts one after the other."""
    views = torch.cat([batch["x"], batch["x"].roll(1, 1)])
    for part in parts:
        views = getattr(model, part)(views).relu()
    z = F.normalize(views if parts else model(views), dim=1)
    similarities = (z @ z.T / 0.5).fill_diagonal_(-1e9)
    return F.cross_entropy(similarities, torch.arange(len(z)).roll(len(z) // 2))


def preference(model: nn.Module, batch: Batch, stack: Any = torch.cat) -> Tensor:
    """As of DPO: two answers of each sample in one forward."""
    answers = batch["sequence"][:, 0], batch["sequence"][:, 1]
    if stack is torch.cat:
        chosen, rejected = model(torch.cat(answers)).logsumexp(1).chunk(2)
    else:
        scores = model(torch.stack(answers, 1).flatten(0, 1)).logsumexp(1)
        chosen, rejected = scores.unflatten(0, (-1, 2)).unbind(1)
    return -F.logsigmoid(chosen - rejected).mean()


def focal(model: nn.Module, batch: Batch) -> Tensor:
    positive = batch["labels"] != 3
    losses = F.binary_cross_entropy_with_logits(model(batch["x"]), one_hot(batch), reduction="none")
    return (losses * positive[:, None]).sum() / positive.sum().clamp(min=1)


class WithOwnLoss(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, values: Tensor, targets: Tensor) -> dict[str, Tensor]:
        scores = self.head(values)
        return {
            "loss": F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=255),
            "logits": scores,
        }


def no_means() -> dict[str, tuple[Any, str]]:
    """Losses that are no means over samples, and what the warning says."""

    def entropy(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"], **options)

    def steps(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["sequence"]).transpose(1, 2)
        return F.cross_entropy(scores, batch["steps"], ignore_index=255)

    def hardest(model: nn.Module, batch: Batch) -> Tensor:
        losses = entropy(model, batch, reduction="none")
        return losses.topk(max(1, len(losses) // 4)).values.mean()

    return {
        "class weights": (lambda m, b: entropy(m, b, weight=CLASS_WEIGHTS), "count differently"),
        "an ignored class": (
            lambda m, b: entropy(m, b, ignore_index=3),
            "poplar.tokens(ignore_index=3, shift=False)",
        ),
        "ignored steps": (steps, "poplar.tokens(ignore_index=255, shift=False, labels='steps')"),
        "a mask of weights": (
            lambda m, b: masked(m, b, "mask"),
            "weight=lambda batch: batch['mask'].sum()",
        ),
        "a mask of bools": (
            lambda m, b: masked(m, b, "is_valid"),
            "weight=lambda batch: batch['is_valid'].sum()",
        ),
        "over positives": (focal, "poplar.tokens(ignore_index=3, shift=False)"),
        "sum": (lambda m, b: entropy(m, b, reduction="sum"), "pass loss='sum'"),
        "sum over a constant": (lambda m, b: entropy(m, b, reduction="sum") / 64, "'global_mean'"),
        "dice of the batch": (lambda m, b: dice(m, b, 0), "couples samples"),
        "variance": (variance, "couples samples"),
        "contrastive": (contrastive, "couples samples"),
        "contrastive, views in one forward": (simclr, "couples samples"),
        "contrastive, views through two modules": (
            lambda m, b: simclr(m, b, ("hidden", "scores")),
            "couples samples",
        ),
        "sum over pairs": (lambda m, b: preference(m, b) * len(b["x"]), "pass loss='sum'"),
        "root": (lambda m, b: (m(b["x"]) - 1).square().mean().sqrt(), "weight="),
        "the hardest samples": (hardest, "weight="),
    }


def means() -> dict[str, Any]:
    """Losses that are means over samples."""

    def entropy(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"], **options)

    def distillation(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            teacher = model(batch["x"]).softmax(1)
        return F.kl_div(model(batch["x"]).log_softmax(1), teacher, reduction="batchmean")

    def in_place(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).div_(0.5).clamp_(-1, 1), batch["labels"])

    def autocast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return entropy(model, batch)

    def with_penalty(model: nn.Module, batch: Batch) -> Tensor:
        return entropy(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())

    def per_sample_mean(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["sequence"]).transpose(1, 2)
        losses = F.cross_entropy(scores, batch["steps"], ignore_index=255, reduction="none")
        counts = (batch["steps"] != 255).sum(1).clamp(min=1)
        return (losses.sum(1) / counts).mean()

    def ctc(model: nn.Module, batch: Batch) -> Tensor:
        steps, samples = 6, len(batch["labels"])
        lengths = torch.full((samples,), steps), torch.ones(samples, dtype=torch.long)
        scores = model(batch["sequence"]).log_softmax(2).transpose(0, 1)
        return F.ctc_loss(scores, 1 + batch["labels"][:, None] % 3, *lengths)

    def submodules(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model.scores(model.hidden(batch["x"]).relu()), one_hot(batch))

    def prompts(model: nn.Module, batch: Batch) -> Tensor:
        """Rows of one call, a multiple of the samples, are the classes."""
        classes = model(torch.linspace(-1, 1, 192).view(24, 8).to(batch["x"].dtype))
        return F.cross_entropy(model(batch["x"]) @ classes.T, batch["labels"])

    def queries_and_documents(model: nn.Module, batch: Batch) -> Tensor:
        documents = batch["sequence"][:, :2].flatten(0, 1)
        rows = model(torch.cat([batch["x"], documents]))
        queries, found = rows.split([len(batch["x"]), len(documents)])
        scores = torch.einsum("bc,bdc->bd", queries, found.unflatten(0, (-1, 2)))
        return F.cross_entropy(scores, batch["labels"] % 2)

    def steps_first(model: nn.Module, batch: Batch) -> Tensor:
        """24 steps of 12 samples; each step depends on all others of its sample."""
        steps = batch["sequence"].repeat(1, 4, 1).transpose(0, 1)
        return F.mse_loss(model(steps).softmax(0).square().sum(0), one_hot(batch))

    return {
        "cross entropy": entropy,
        "pairs in one forward": preference,
        "pairs in one forward, interleaved": lambda m, b: preference(m, b, torch.stack),
        "equal pairs": lambda m, b: preference(
            m, {"sequence": b["sequence"][:, :1].expand(-1, 2, 8)}
        ),
        "equal samples": lambda m, b: preference(
            m, {"sequence": torch.ones_like(b["sequence"])}, torch.stack
        ),
        "class prompts": prompts,
        "queries and documents in one forward": queries_and_documents,
        "steps first": steps_first,
        "label smoothing": lambda m, b: entropy(m, b, label_smoothing=0.1),
        "weights of positives": lambda m, b: F.binary_cross_entropy_with_logits(
            m(b["x"]), one_hot(b), pos_weight=CLASS_WEIGHTS
        ),
        "dice of samples": lambda m, b: dice(m, b, 1),
        "squares": lambda m, b: F.mse_loss(m(b["x"]), one_hot(b)),
        "huber": lambda m, b: F.smooth_l1_loss(m(b["x"]), one_hot(b)),
        "one element": lambda m, b: entropy(m, b).reshape(1),
        "small": lambda m, b: entropy(m, b) * 1e-12,
        "of any sign": lambda m, b: m(b["x"]).mean(),
        "without an output": lambda m, b: m.scores.weight.square().mean(),
        "dropout in the loss": lambda m, b: F.dropout(m(b["x"]), 0.3).square().mean(),
        "noise": lambda m, b: F.mse_loss(m(b["x"]), torch.randn(len(b["x"]), 4)),
        "distillation": distillation,
        "in place": in_place,
        "autocast": autocast,
        "penalty": with_penalty,
        "mean of means": per_sample_mean,
        "CTC": ctc,
        "submodules": submodules,
    }


def warning_of_a_pass(loss_fn: Any, model: nn.Module, batches: list[Batch]) -> str | None:
    """What a `train_step` on this rank warns of; its backwards run."""
    check = FirstLossCheck(looks=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            loss = check.watched(loss_fn)(model, batch)
            loss.backward()
    assert len(caught) <= 1
    return str(caught[0].message) if caught else None


def warnings_of(loss_fn: Any, seed: int, dtype: torch.dtype) -> list[str | None]:
    """What the model that runs for the check shows, and what a pass of the training shows."""
    torch.manual_seed(seed)
    model, batch = Head().to(dtype), batch_of(seed)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return [wrong_weight(loss_fn, model, batch), warning_of_a_pass(loss_fn, model, [batch])]


MODELS = choose(quick=4, full=50)


@pytest.mark.every_combination
@pytest.mark.parametrize("name", no_means())
def test_losses_that_are_no_means_warn(name):
    loss_fn, told = no_means()[name]
    found = [text for seed in range(MODELS) for text in warnings_of(loss_fn, seed, torch.float32)]
    assert sum(text is not None for text in found) >= 0.95 * len(found)
    assert sum(told in (text or "") for text in found) >= 0.5 * len(found)


@pytest.mark.every_combination
@pytest.mark.parametrize("name", means())
def test_losses_that_are_means_never_warn(name):
    for seed in range(MODELS):
        assert warnings_of(means()[name], seed, torch.float32) == [None, None]
    for dtype in (torch.bfloat16, torch.float16):
        if name != "CTC":  # torch has none of 16 bits
            for seed in range(2):
                assert warnings_of(means()[name], seed, dtype) == [None, None]


class WithTargets(Head):
    """Returns the targets and a temperature, too, which a loss may write to."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        scores = super().forward(batch["sequence"])
        return scores, batch["steps"].clone(), torch.ones(3, 4)


def shifts_targets(model: nn.Module, batch: Batch) -> Tensor:
    scores, targets, scale = model(batch)
    targets[targets == 255] = 0
    scale += 1.0
    loss = (scores * scale.mean(0)).transpose(1, 2)
    return F.cross_entropy(loss, targets)


@pytest.mark.parametrize("samples", [12, 40])
def test_a_loss_may_write_to_what_the_model_returns(samples):
    batches, model = [batch_of(0, samples)], WithTargets()
    alone = torch.autograd.grad(shifts_targets(model.eval(), batches[0]), model.parameters())
    assert warning_of_a_pass(shifts_targets, model, batches) is None
    for parameter, gradient in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Critic(nn.Module):
    """Another model in a loss, whose forwards write statistics, vectors and new buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.BatchNorm1d(4).eval()  # its backward needs the statistics
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", None)

    def forward(self, scores: Tensor) -> Tensor:
        self.mean, self.last = self.mean.lerp(scores.detach().mean(0), 0.1), scores.detach()[0]
        return F.softplus(self.frozen(self.norm(self.second(self.first(scores)))))


class WithOwnCenter(Head):
    """A model that computes its own loss, and writes a moving average for it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, values: Tensor) -> Tensor:
        scores = super().forward(values)
        self.center.lerp_(scores.detach().mean(0), 0.1)
        return (scores - self.center).square().mean()


class WithOwnTeacher(Head):
    """A model that computes its own loss, and whose frozen teacher follows it."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.teacher, self.in_place = Head().requires_grad_(False), in_place

    def forward(self, values: Tensor) -> Tensor:
        for old, new in zip(self.teacher.parameters(), self.student(), strict=True):
            mean = old.data * 0.9 + new.detach() * 0.1
            if self.in_place:
                old.data.copy_(mean)
            else:
                old.data = mean
        return (super().forward(values) - self.teacher(values)).square().mean()

    def student(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_writes_to_frozen_parameters_once(in_place):
    model = WithOwnTeacher(in_place)
    expected = [
        0.9 * old.data + 0.1 * new.detach()
        for old, new in zip(model.teacher.parameters(), model.student(), strict=True)
    ]
    warning_of_a_pass(lambda model, batch: model(batch["x"]), model, [batch_of(0)])
    for old, value in zip(model.teacher.parameters(), expected, strict=True):
        torch.testing.assert_close(old.data, value)


def buffers_of(*models: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers."""
    named = nn.ModuleList(models).named_buffers()
    return {name: buffer.clone() for name, buffer in named}


@pytest.mark.parametrize("own_loss", [False, True])
def test_a_step_writes_to_buffers_once(own_loss):
    torch.manual_seed(0)
    model, critic = WithOwnCenter() if own_loss else Head(), Critic()
    others = copy.deepcopy((model, critic))

    def loss_fn(critic: nn.Module, model: nn.Module, batch: Batch) -> Tensor:
        output = model(batch["x"])
        return output if own_loss else critic(output).sum()

    torch.manual_seed(1)
    loss_fn(others[1], others[0], batch_of(0)).backward()
    torch.manual_seed(1)
    found = warning_of_a_pass(partial(loss_fn, critic), model, [batch_of(0)])
    assert own_loss or found is not None  # so the critic was called again
    written, expected = buffers_of(model, critic), buffers_of(*others)
    assert written.keys() == expected.keys()
    for name, buffer in written.items():
        assert torch.equal(buffer, expected[name]), name
    for one, other in zip(model.parameters(), others[0].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("compiled", choose(quick=[False], full=[False, True]))
def test_other_models_in_a_loss_stay_as_they_are(compiled):
    critic = Critic()
    called = torch.compile(critic, backend="eager") if compiled else critic
    before = buffers_of(critic)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = wrong_weight(lambda m, batch: called(m(batch["x"])).sum(), Head(), batch_of(0))
    assert found is not None
    after = buffers_of(critic)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_micro_batches_of_one_sample_are_compared_together():
    batch = batch_of(3)
    single = [{key: value[i : i + 1] for key, value in batch.items()} for i in (0, 11)]
    loss_fn, told = no_means()["ignored steps"]
    assert told in warning_of_a_pass(loss_fn, Head(), single)
    assert warning_of_a_pass(preference, Head(), single) is None  # rows of two views are not joined


def test_a_loss_may_take_the_labels_out_of_its_batch():
    def takes_labels(model: nn.Module, batch: Batch) -> Tensor:
        labels = batch.pop("steps")
        scores = model(batch["sequence"])
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=255)

    told = "tokens(ignore_index=255, shift=False, labels='steps')"
    assert told in wrong_weight(takes_labels, Head(), batch_of(3))
    assert told in warning_of_a_pass(takes_labels, Head(), [batch_of(3)])
    single = [{key: value[i : i + 1] for key, value in batch_of(3).items()} for i in (0, 11)]
    assert told in warning_of_a_pass(takes_labels, Head(), single)


class TakesTargets(WithOwnLoss):
    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().forward(targets=inputs.pop("targets"), **inputs)


def test_a_model_with_its_own_loss_may_take_the_labels_out_of_its_inputs():
    check = FirstLossCheck(looks=True)
    model, batch = TakesTargets(Head()), batch_of(3)
    check.watch_loop(model, None)
    with pytest.warns(UserWarning, match="samples count differently"):
        model({"values": batch["sequence"], "targets": batch["steps"]})["loss"].backward()


def test_a_loop_over_a_model_with_its_own_loss_warns():
    model, batch = WithOwnLoss(Head()), batch_of(3)
    for inputs in ((batch["sequence"], batch["steps"]), ()):
        check = FirstLossCheck(looks=True)
        check.watch_loop(model, None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            named = {} if inputs else {"values": batch["sequence"], "targets": batch["steps"]}
            for _ in range(2):
                model(*inputs, **named)["loss"].backward()
        (message,) = [str(warning.message) for warning in caught]
        labels = 1 if inputs else "'targets'"
        assert f"tokens(ignore_index=255, shift=False, labels={labels}) to the loop" in message
        assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


class OfImages(nn.Module):
    """Returns its own loss, of images of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.layer(image).square().mean() for image in images]).mean()


@pytest.mark.parametrize(
    ("batch", "most_bytes", "calls"),
    [([torch.ones(2, 3), torch.ones(5, 3)], 1 << 20, 1), (torch.ones(1, 3), 8, 2)],
    ids=["samples that cannot be counted", "one sample with large outputs"],
)
def test_the_look_ends_where_nothing_can_be_compared(monkeypatch, batch, most_bytes, calls):
    monkeypatch.setattr(loss_mean, "_MOST_BYTES", most_bytes)
    model, check = OfImages(), FirstLossCheck(looks=True)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch)

    for _ in range(calls):
        check.watched(loss_fn)(model, batch)
    assert check.watched(loss_fn) is loss_fn
    FirstLossCheck(looks=True).watch_loop(model, batch)
    model(batch)
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_micro_batches_after_a_small_one_with_large_outputs_are_compared(monkeypatch):
    monkeypatch.setattr(loss_mean, "_MOST_BYTES", 8)
    batch = batch_of(3)
    single = {key: value[:1] for key, value in batch.items()}
    loss_fn, told = no_means()["ignored steps"]
    assert told in warning_of_a_pass(loss_fn, Head(), [single, batch])


@pytest.mark.parametrize(
    "needs_others",
    [lambda: dist.all_reduce(torch.ones(1)), engine_hooks.raise_if_refused],
    ids=["a collective", "a model with sharded parameters"],
)
def test_nothing_runs_on_one_rank_that_others_must_take_part_in(tmp_path, needs_others):
    calls = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        output = model(batch["x"])
        needs_others()
        calls.append(len(output))
        return output.sum()

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert warning_of_a_pass(loss_fn, Head(), [batch_of(0)]) is None
        assert calls == [12], "only the pass itself"
        assert wrong_weight(loss_fn, Head(), batch_of(0)) is None
    finally:
        dist.destroy_process_group()
    assert calls == [12]


class Branches(Head):
    """Its forward has two branches, of which one may write a frozen parameter."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        scores = super().forward(values)
        return torch.cond(scores.sum() > 1e9, torch.zeros_like, self.scaled, (scores,))

    def scaled(self, scores: Tensor) -> Tensor:
        if self.writes:
            self.frozen.add_(1)
        return scores * self.frozen


def test_branches_of_a_forward_run_without_writes_to_frozen_parameters():
    loss_fn, told = no_means()["ignored steps"]
    assert told in wrong_weight(loss_fn, Branches(writes=False), batch_of(3))
    model = Branches(writes=True)
    assert wrong_weight(loss_fn, model, batch_of(3)) is None
    assert model.frozen.item() == 1


def test_random_losses_and_losses_that_raise_tell_nothing():
    def random(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model, batch) * torch.rand(())

    def only_in_training(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert model.training
        return cross_entropy(model, batch, "sum")

    for loss_fn in (random, only_in_training):
        assert wrong_weight(loss_fn, classifier(), images(0, 6)) is None


def test_nothing_changes_in_model_and_random_state():
    model, state = classifier(), torch.get_rng_state()
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong_weight(cross_entropy, model, images(0, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model] == [True, True, True, False, True, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert not model._forward_pre_hooks


class Counting(Head):
    """Counts its calls in a buffer that shares memory with a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(2)
        self.frozen = nn.Parameter(memory[:1], requires_grad=False)
        self.register_buffer("shared", memory[1:])
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(values) + self.frozen + self.shared


def test_buffers_get_their_values_back_if_one_shares_memory_with_a_frozen_parameter(monkeypatch):
    monkeypatch.setattr(preserved_state, "_is_unchanged", lambda *_: False)  # as on a device
    model = Counting()
    loss_fn, told = no_means()["ignored steps"]
    assert told in wrong_weight(loss_fn, model, batch_of(3))
    assert model.calls.item() == 0


def test_autotune_warns_on_the_first_rank_of_models_on_their_device():
    model, batch = training.build("tagger"), ragged(seed=1)
    job = SimpleNamespace(loss_fn=training.loss_fn, model=model, example=batch)

    def warnings_of(rank: int, is_here: bool) -> list[str]:
        group = SimpleNamespace(rank=rank)
        session = SimpleNamespace(job=job, group=group, model_is_on_device=is_here)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            autotune._warn_of_wrong_weight(session, None)
        return [str(warning.message) for warning in caught]

    assert "weight=poplar.tokens(shift=False)" in warnings_of(0, True)[0]
    assert warnings_of(1, True) == warnings_of(0, False) == []


def test_a_model_whose_buffer_cannot_be_written_in_place_is_looked_at_and_keeps_its_mode():
    model = training.build("tagger")
    model.register_buffer("grid", torch.arange(3.0).expand(2, 3))
    found = wrong_weight(training.loss_fn, model, ragged(seed=1))
    assert "weight=poplar.tokens(shift=False)" in found
    assert model.training

"""Loops written for Hugging Face's `Accelerator`, on unequal devices.

    model, optimizer, loader, scheduler = prepare(
        accelerator, model, torch.optim.AdamW, loader, loss_fn=loss_fn, lr=3e-4
    )

Attributes of `Accelerator` that this module replaces on the given object: `backward`,
`clip_grad_norm_`, `clip_grad_value_`, `accumulate`, `skip_first_batches`, `get_state_dict`, `save`,
`save_model`. Tested with accelerate 1.15.
"""

# ruff: noqa: E402 (what is missing is said before it is imported)

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

from poplar.integrations.versions import check_version

check_version("accelerate")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, send_to_device
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, RandomSampler

from poplar.checkpoint.files.transfers import transfer_on_all_ranks
from poplar.checkpoint.load import load_checkpoint
from poplar.checkpoint.save import save_now
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.comm import Control
from poplar.data import pytree
from poplar.data.sampler import HeteroBatchSampler
from poplar.integrations.exact_values import exact_values
from poplar.integrations.own_dtype import own_dtype
from poplar.integrations.user_loader import kept_options, unknown_order
from poplar.optimizer import HeteroZeroOptimizer
from poplar.tuning.autotune import OPTIONS, tune
from poplar.values.plan import Plan
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.optimizers.granularity import OptimizerFactory

FOLDER = "poplar"
"""In a folder of `save_state`: the state of training, as `poplar.save_checkpoint` writes it."""


class Prepared(NamedTuple):
    """What `prepare` returns, in its order."""

    model: nn.Module
    """The same object, with autocast as the accelerator asks for."""
    optimizer: HeteroZeroOptimizer
    loader: DataLoader[Any]
    """Yields this rank's part of each global batch, on its device. Each loop over it is another
    epoch, also if the loop before was left early; `loader.set_epoch` chooses one."""
    scheduler: Any
    """What `scheduler` made; it counts optimizer steps, on any number of ranks. None without."""


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer_class: OptimizerFactory,
    loader: DataLoader[Any],
    *,
    loss_fn: LossFunction | None = None,
    plan: Plan | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    params: Any = None,
    tuning: Mapping[str, Any] | None = None,
    replan: Literal["auto", "advise", "off"] = "off",
    **options: Any,
) -> Prepared:
    """Plan, and build what the loop needs; in place of `accelerator.prepare`. Collective.

        for batch in loader:                              # this rank's part of a global batch
            for micro_batch in optimizer.micro_batches(batch):
                accelerator.backward(loss_fn(model, micro_batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    `optimizer.train_step(loss_fn, batch, max_norm=1.0)` is the whole step in one call. Ranks run
    different numbers of micro-batches, so gather values once per batch, not in the inner loop.

    The global batch is `loader.batch_size x gradient_accumulation_steps x ranks`, without the ranks
    if the accelerator has `split_batches=True`. The accelerator then has
    `gradient_accumulation_steps` 1, because the plan's passes replace these steps.
    `save_state` and `load_state` save and load model, optimizer, scheduler and the position in the
    data. Prepare loaders for evaluation with `accelerator.prepare`, as usual.

    Args:
        accelerator: without DeepSpeed, FSDP, fp16 autocast and torch.compile; one for each model,
            made after `prepare` of the one before.
        model: as for `HeteroZeroOptimizer`, not prepared.
        optimizer_class: as for `HeteroZeroOptimizer`.
        loader: of a map-style dataset, shuffled or not, not prepared. Its dataset, batch size,
            seed, `collate_fn` and options of workers are used.
        loss_fn: `loss_fn(model, micro_batch)` -> mean loss; needed to make a plan, and to check in
            the first step that samples are its weight.
        plan: train with it instead of measuring.
        scheduler: makes a scheduler from the optimizer. It counts steps of the optimizer, not
            `num_processes` for each, as after `accelerator.prepare`: leave this factor out of the
            schedule's length.
        params: parameters or param groups; default: all of the model.
        tuning: arguments of `poplar.autotune`, such as `stage` or `memory_limit`.
        replan: as for `HeteroZeroOptimizer.follow_drift`; not with `plan=`. The loader follows.
        **options: for `optimizer_class` and `HeteroZeroOptimizer`.

    Raises:
        ValueError: an argument asks for what Poplar does not support, or the plan has another
            global batch.
        TypeError: `scheduler` is made already, for another optimizer.
    """
    _check(accelerator, model, loader)
    if scheduler is not None and not callable(scheduler):
        raise TypeError(
            f"prepare() makes the optimizer, but scheduler= is a {type(scheduler).__name__} of "
            "another one; pass a function that makes it, such as "
            "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
        )
    if plan is not None and tuning:
        raise ValueError(
            f"prepare(tuning={dict(tuning)}) is for planning, but plan= was given; leave out one "
            "of them"
        )
    if plan is not None and replan != "off":
        raise ValueError(
            f"prepare(replan={replan!r}) compares steps with a profile, which plan= does not have; "
            "leave out plan=, or call optimizer.follow_drift(profile)"
        )
    profile = None
    model = accelerator.prepare_model(model, evaluation_mode=True)  # autocast, but no DDP
    accumulated = accelerator.gradient_accumulation_steps
    # With split_batches, a batch of the loader is for all ranks together.
    multiple = 1 if accelerator.split_batches else accelerator.num_processes
    batches: Any = loader.batch_sampler  # has the batch size even if it was passed to the loader
    global_batch = batches.batch_size * accumulated * multiple
    options.setdefault("compute_dtype", own_dtype(model))  # autocast, if the accelerator asks
    if plan is None:
        if loss_fn is None:
            raise ValueError("prepare() needs loss_fn= to make a plan, or plan=")
        tuned_options = {k: v for k, v in options.items() if k not in _OF_THE_ENGINE_ONLY}
        example = send_to_device(next(iter(loader)), accelerator.device)
        tuned = tune(
            model,
            loss_fn,
            example,
            global_batch=global_batch,
            optimizer_class=optimizer_class,
            # The loops of Accelerate need samples on every rank.
            **({"leave_out": "never"} | tuned_options | dict(tuning or {})),
        )
        plan, profile = tuned.plan, tuned.profile
    plan.check_all_active("poplar.integrations.accelerate")
    if plan.global_batch != global_batch:
        ranks = f" x {multiple} ranks" if multiple > 1 else ""
        raise ValueError(
            f"the plan has a global batch of {plan.global_batch}, but the loader and the "
            f"accelerator ask for {global_batch} (batch_size {batches.batch_size} x "
            f"{accumulated} accumulation steps{ranks}); change one of them"
        )
    optimizer = HeteroZeroOptimizer(model, optimizer_class, plan=plan, params=params, **options)
    if profile is not None and replan != "off":
        optimizer.follow_drift(profile, replan=replan, leave_out="never")
    if loss_fn is not None:
        optimizer._training.checks.loss.expect(loss_fn, "to micro_batches")
    accelerator.gradient_accumulation_steps = 1
    planned = _PlannedLoader(loader, plan, accelerator, optimizer.control)
    made = None if scheduler is None else scheduler(optimizer)
    # So that preparing them again does not wrap them in what assumes equal ranks.
    for each in (optimizer, planned, made):
        if each is not None:
            each._is_accelerate_prepared = True  # type: ignore[union-attr]
    optimizer.step_was_skipped = False  # type: ignore[attr-defined]
    _adapt(accelerator, optimizer, planned)
    _adapt_saving(accelerator, model, optimizer)
    state = {"loader": planned, **({} if made is None else {"scheduler": made})}
    _register_state(accelerator, model, optimizer, state)
    return Prepared(model, optimizer, planned, made)


_OF_THE_ENGINE_ONLY = inspect.signature(HeteroZeroOptimizer).parameters.keys() - OPTIONS
"""Options of `HeteroZeroOptimizer` that change no plan; `autotune` would give them to the class."""


class _PlannedLoader(DataLoader[Any]):
    """Yields this rank's part of each global batch on its device.

    Its state is the place in the epoch.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: Plan, accelerator: Accelerator, control: Control
    ) -> None:
        batches: Any = loader.batch_sampler
        given = accelerator.dataloader_config.data_seed
        own = _seed_of(batches.sampler) if given is None else given
        sampler = HeteroBatchSampler(
            len(loader.dataset),  # type: ignore[arg-type]
            plan,
            seed=control.exchange_objects(own, what="the seed of the data")[0],
            shuffle=isinstance(batches.sampler, RandomSampler),
            drop_last=batches.drop_last,
        )
        super().__init__(loader.dataset, batch_sampler=sampler, **kept_options(loader))
        self.device, self._seed_is_given = accelerator.device, given is not None
        self.steps_done = 0
        """Batches of this epoch that the loop has taken."""
        self._first = 0
        """The first step of an iteration of this epoch; not 0 after `load_state_dict`."""
        self._was_read = False
        """The loop has taken batches since the epoch was set."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler: Any = self.batch_sampler
        # As loaders of Accelerate, also if the loop was left early. What the loop has taken is
        # equal on all ranks; the sampler knows only what was drawn, by workers ahead of the loop.
        if self._was_read:
            self.set_epoch(sampler.epoch + 1)
        self.steps_done = self._first
        for batch in super().__iter__():
            self.steps_done += 1
            self._was_read = True
            yield send_to_device(batch, self.device)
        self._first = 0

    def set_epoch(self, epoch: int) -> None:
        """As of samplers."""
        sampler: Any = self.batch_sampler
        if epoch != sampler.epoch:
            self._first = 0
        self._was_read = False
        sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """For `load_state_dict` with any plan of the same global batch."""
        sampler: Any = self.batch_sampler
        # The loop's count may still be of the epoch before.
        state: dict[str, Any] = sampler.state_dict(min(self.steps_done, sampler.drawn))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step before the save, in its order unless `data_seed` is set."""
        sampler: Any = self.batch_sampler
        if not self._seed_is_given:
            sampler._seed = state["seed"]
        sampler.load_state_dict(state)
        self.steps_done = self._first = state["step"]
        self._was_read = False


def _seed_of(sampler: Any) -> int:
    """The seed by which the user chose the order: of the loader's generator, else of torch."""
    generator = getattr(sampler, "generator", None)
    return int(torch.initial_seed() if generator is None else generator.initial_seed())


def _check(accelerator: Accelerator, model: nn.Module, loader: DataLoader[Any]) -> None:
    """Check the arguments of `prepare` that need no plan.

    Raises:
        ValueError: names what to change.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("there is no process group; launch the script with torchrun")
    if "backward" in vars(accelerator):
        raise ValueError(
            "prepare() was called with this Accelerator before, and its backward() and save_state "
            "are for that model; make another Accelerator for each further model, after this call "
            "(Accelerate shares gradient_accumulation_steps among all that there are)"
        )
    if accelerator.num_processes != dist.get_world_size():
        raise ValueError(
            f"the Accelerator counts {accelerator.num_processes} process, but there are "
            f"{dist.get_world_size()} ranks; on ranks without GPU use Accelerator(cpu=True)"
        )
    plugins = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
    if any(getattr(accelerator.state, name, None) is not None for name in plugins):
        raise ValueError(
            "the Accelerator has DeepSpeed, FSDP or Megatron; build it without, the plan's stage "
            "is ZeRO"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}) is not supported; use "
            "'no' with prepare(..., compute_dtype=torch.float16), for which backward() scales the "
            "loss, or 'bf16'"
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(
            "the Accelerator compiles the whole model; compile its blocks instead: "
            "`for block in model.layers: block.compile()`"
        )
    if getattr(model, "_is_accelerate_prepared", False):
        raise ValueError("the model is prepared already; leave out accelerator.prepare for it")
    if getattr(loader, "_is_accelerate_prepared", False):
        raise ValueError("the loader is prepared already; pass a plain torch DataLoader")
    if (problem := unknown_order(loader)) is not None:
        raise ValueError(
            f"prepare() makes the loader's samples by the plan, but {problem}; use batch_size= "
            "with shuffle=True or False, or for a stream poplar.split_stream and "
            "poplar.HeteroZeroOptimizer"
        )


def _adapt(
    accelerator: Accelerator, optimizer: HeteroZeroOptimizer, loader: _PlannedLoader
) -> None:
    """Let the accelerator's methods for loops act on this optimizer and loader."""
    training, skip_any = optimizer._training, accelerator.skip_first_batches
    training.scale_loops()

    def backward(loss: Tensor, **options: Any) -> None:
        training.scaled_loss(loss).backward(**options)
        training.engine.step.add_loss(loss)

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if _trained(given) != _trained(own):
            raise ValueError(
                "accelerator.clip_grad_norm_ clips the gradient of all parameters of the "
                "optimizer together; pass model.parameters()"
            )
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "accelerator.clip_grad_value_ is not supported: each rank stores only a part of the "
            "gradient; use accelerator.clip_grad_norm_"
        )

    def accumulate(*_: Any, **__: Any) -> AbstractContextManager[None]:
        raise RuntimeError(
            "accelerator.accumulate is not supported: the plan gives each rank its number of "
            "passes; use `for micro_batch in optimizer.micro_batches(batch):` around forward and "
            "backward, and step() after it"
        )

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if dataloader is loader:
            raise RuntimeError(
                "accelerator.skip_first_batches is not supported for the loader of prepare(): "
                "load_state continues at the saved position; iterate the loader itself"
            )
        return skip_any(dataloader, num_batches)

    accelerator.backward = backward
    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.clip_grad_value_ = clip_grad_value_
    accelerator.accumulate = accumulate
    accelerator.skip_first_batches = skip_first_batches


def _trained(parameters: Iterable[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters if parameter.requires_grad}


def _has_parts(obj: Any) -> bool:
    return any(isinstance(tensor, ShardTensor) for tensor in pytree.tensors(obj))


def _adapt_saving(
    accelerator: Accelerator, model: nn.Module, optimizer: HeteroZeroOptimizer
) -> None:
    """Let the accelerator's methods that save see whole and exact tensors, or raise."""
    get_any, save_any = accelerator.get_state_dict, accelerator.save
    save_any_model = accelerator.save_model

    def is_own(module: nn.Module) -> bool:
        return any(module is own for own in model.modules())

    def get_state_dict(module: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """As with FSDP: if the parameters are sharded, the main process gets whole ones.

        With `unwrap=False` they stay sharded: `save_state` asks so, and its hook drops them.
        """
        with exact_values(optimizer) if unwrap and is_own(module) else nullcontext():
            values: dict[str, Any] = get_any(module, unwrap)
        if not unwrap or not _has_parts(values):
            return values
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(accelerator.unwrap_model(module), options=options)

    def save(obj: Any, *arguments: Any, **options: Any) -> None:
        if _has_parts(obj):
            raise RuntimeError(
                f"rank {accelerator.process_index}: accelerator.save was given parts of tensors, "
                "and the main process would save its own alone; use accelerator.save_model(model, "
                "folder) or accelerator.get_state_dict(model) for the model, and "
                "accelerator.save_state(folder) or optimizer.full_state_dict() for the optimizer"
            )
        save_any(obj, *arguments, **options)

    def save_model(module: nn.Module, *arguments: Any, **options: Any) -> None:
        """The other ranks wait as long as the main process writes."""
        if not is_own(module):
            save_any_model(module, *arguments, **options)
            return
        values = get_state_dict(module)  # collective, so not in the thread that writes

        def write() -> None:
            accelerator.get_state_dict = lambda _: values
            try:
                save_any_model(module, *arguments, **options)
            finally:
                accelerator.get_state_dict = get_state_dict

        doing = "accelerator.save_model()"
        transfer_on_all_ranks(optimizer.control, accelerator.device, write, doing=doing)

    accelerator.get_state_dict = get_state_dict
    accelerator.save = save
    accelerator.save_model = save_model


def _register_state(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: HeteroZeroOptimizer,
    state: Mapping[str, Any],
) -> None:
    """Save and load with `save_state` and `load_state`. Every rank writes its own part.

    The accelerator saves and loads its other models itself, numbered by their order.
    """

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        # There are fewer weights than models if a hook of the script has popped some of them.
        weights[:] = [w for m, w in zip(models, weights, strict=False) if m is not model]
        save_now(Path(folder) / FOLDER, optimizer, state=state, replaces=True)

    def load(models: list[Any], folder: str) -> None:
        models[:] = [other for other in models if other is not model]
        load_checkpoint(Path(folder) / FOLDER, optimizer, state=state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)

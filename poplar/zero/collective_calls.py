"""Calls of methods that all ranks call: what one rank raises in one reaches all ranks.

A rank that leaves such a call alone leaves the others waiting, or lets them update their part of
the parameters without it. So an error either is raised on all ranks (`agreed`, see
`values.errors`), and training may continue, or it stops all ranks. There is nothing in between,
whatever raised it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm import Group
from poplar.comm.announcements import Announcements
from poplar.values.errors import CollectiveTimeout, RankFailed, agreed, is_agreed, take_agreed
from poplar.zero.model_hook import do_nothing
from poplar.zero.steps.step_result import StepResult

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

AGAIN = "make the call again on all ranks"
"""What to do after a call that leaves nothing behind has failed."""


@dataclass(frozen=True)
class ForAllRanks:
    """A result that ranks that are left out get, too, whatever it is."""

    value: Any


_JOIN = ForAllRanks("run the rest of the call, too")
"""What ranks that are left out get before a part of a call that they run like the others."""


class _Nesting(threading.local):
    """The collective calls of this library that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0
        self.groups: list[weakref.ref[Group]] = []
        """Made in these calls. Other ranks may wait in any of them."""

    def enter(self) -> None:
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.groups.clear()


_NESTING = _Nesting()


@contextmanager
def _raising(stop: Callable[[BaseException], object]) -> Iterator[None]:
    """A context for one call, which may be part of another one.

    `stop` stops all ranks, because this one leaves the call alone with this error.
    """
    _NESTING.enter()
    try:
        yield
    except BaseException as error:
        # The outermost call drops the note, as the program may raise the error again.
        is_last = _NESTING.depth == 1
        if not (take_agreed(error) if is_last else is_agreed(error)):
            stop(error)
        raise
    finally:
        _NESTING.leave()


class CollectiveCalls:
    """The collective calls of one optimizer, of which this rank runs one at a time."""

    def __init__(
        self,
        group: Group,
        stop: Callable[[str, BaseException], object],
        announcements: Announcements | None = None,
    ) -> None:
        """
        Args:
            group: the ranks.
            stop: stops all ranks, because of the call with this name and of its error.
            announcements: where this rank announces its calls to ranks that are left out.
        """
        self._group, self._stop, self._announcements = group, stop, announcements
        self._begin: Callable[[str], object] = do_nothing
        self._lock = threading.RLock()
        self._depth = 0
        self._in_loss_fn = False
        """The user's function is running in a call."""
        self._half_loaded = ""
        """The load that has failed on a rank after it had changed values."""
        self._last_part: tuple[Any, Callable[[], object]] | None = None
        self._all_run = False
        """Ranks that are left out run the rest of the call that is running, too."""

    def serve(
        self, begin: Callable[[str], object], stop: Callable[[str, BaseException], None]
    ) -> None:
        """Run `begin` before each call, with its name, and stop all ranks by `stop` from now on."""
        self._begin, self._stop = begin, stop

    def follow(self, group: Group, announcements: Announcements | None) -> None:
        """The calls are those of other ranks from now on. Arguments as for the constructor."""
        self._group, self._announcements = group, announcements

    def let_all_run(self, name: str = "") -> None:
        """From here on, ranks that are left out run the call that is running, too.

        So its result and its failure are not announced, and all ranks must be stopped. `name` is
        that of the call, if they wait in it for an announcement.
        """
        if name and not self._all_run:
            self.announce(name, _JOIN)
        self._all_run = True

    def call(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function as a call with this name, and announce its result."""
        with self.running(name):
            result = function(*args, **kwargs)
            if self._depth == 1 and not self._all_run:
                (order, run), self._last_part = self._last_part or (None, do_nothing), None
                self.announce(name, result, order=order)
                if order is not None:
                    self._all_run = True
                    run()
        return result

    def end_by(self, order: Any, run: Callable[[], object]) -> None:
        """Let all ranks run a last part of the call that is running, after its result is known.

        This rank runs `run`, and those that are left out what the `order` says; it is not None.
        """
        self._last_part = order, run

    def announce(self, name: str, result: Any = None, failure: str = "", order: Any = None) -> None:
        """Tell ranks that are left out, if there are any, of a call that is over."""
        if self._announcements is not None:
            value = _announced(result)
            self._announcements.send(lambda: (name, failure, value(), order))

    def of_user(self, loss_fn: Callable[P, R]) -> Callable[P, R]:
        """The user's `loss_fn`, in which methods that all ranks call raise: other ranks may not run
        it, or run it more often.
        """

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            before, self._in_loss_fn = self._in_loss_fn, True
            try:
                return loss_fn(*args, **kwargs)
            finally:
                self._in_loss_fn = before

        return run

    @contextmanager
    def changing_values(self, load: str) -> Iterator[None]:
        """A context for a load from its first change on. If it fails, only loads may follow."""
        self._half_loaded = load
        yield
        self._half_loaded = ""

    @contextmanager
    def running(self, name: str, *, begins: bool = True, left_out: bool = False) -> Iterator[None]:
        """A context for one call, or for a part of one that is running in this thread.

        Args:
            name: of the call, for errors.
            begins: False: it only ends what an earlier call has begun, also after a failure.
            left_out: ranks that are left out have this context, too.

        Raises:
            RuntimeError: another thread runs one, or it is called in a function of the user.
            CollectiveTimeout: an earlier call has stopped all ranks.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"rank {self._group.name}: {name} while another thread runs a method of this "
                "optimizer; call the methods of an optimizer in one thread at a time"
            )
        self._depth += 1
        is_first = self._depth == 1

        def stop(error: BaseException) -> None:
            if is_first:
                self._stop(name, error)
                if self._all_run:
                    self._group.abort(stop_reason(self._group.name, waiting_in(name), error))

        try:
            with _raising(stop):
                if self._in_loss_fn:
                    raise RuntimeError(
                        f"rank {self._group.name}: {name} inside loss_fn, which not all ranks run "
                        "equally often; call it outside of loss_fn"
                    )
                if is_first and begins:
                    self._check(name)
                    self._begin(name)
                try:
                    yield
                except Exception as error:
                    if is_first and is_agreed(error) and not self._all_run:
                        self.announce(name, failure=f"{type(error).__name__}: {error}")
                    raise
        finally:
            self._depth -= 1
            self._all_run = self._all_run and not is_first
            self._lock.release()

    def _check(self, name: str) -> None:
        """Check that no earlier call forbids this one."""
        self._group.check()
        if self._half_loaded and not name.startswith(("load", "release")):
            raise agreed(
                RuntimeError(
                    f"rank {self._group.name}: {name} after {self._half_loaded} had failed on a "
                    "rank when values had changed, so the ranks may differ; load a state dict or "
                    "a checkpoint on all ranks first"
                )
            )


class LeftOutCalls(CollectiveCalls):
    """The calls of an optimizer on a rank that its plan leaves out.

    The rank calls what the others call, and waits each time until they have done it. It gets the
    result that is announced, or `RankFailed`. Nothing that it does stops the others, except in a
    change of the ranks that are left out, which all ranks run.
    """

    def __init__(
        self,
        group: Group,
        announcements: Announcements,
        checks: Mapping[str, Callable[..., None]],
        ends: Mapping[str, Callable[[], Any]],
        run: Callable[[Any], object],
        idle: Callable[[], object],
    ) -> None:
        """
        Args:
            group: all ranks.
            announcements: of the active ranks.
            checks: by name of a call, a function that checks its arguments on this rank.
            ends: by name of a call, what this rank does and returns once the others have made it.
            run: runs the last part of a call, by the order of `end_by`.
            idle: what the rank does in each call, while the others run it.
        """
        super().__init__(group, do_nothing)
        self._rank, self._received, self._checks = group.name, announcements, checks
        self._ends = ends
        self._run, self._idle = run, idle

    def call(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The announced result of the active ranks' call, without running the function.

        Raises:
            RankFailed: it failed on the active ranks, or they made another call.
            CollectiveTimeout: an active rank has been lost.
        """
        if name in self._checks:
            self._checks[name](*args, **kwargs)
        self._idle()
        called, failure, result, order = self._received.next(name)
        if failure:
            raise agreed(RankFailed(f"the active ranks failed in {called}: {failure}"))
        if called != name:
            raise RankFailed(
                f"rank {self._rank}, which the plan leaves out, calls {name}, but the active ranks "
                f"call {called}; make the same calls on all ranks"
            )
        if result == _JOIN:
            with self.running(name, left_out=True):
                self.let_all_run()
                return function(*args, **kwargs)
        if order is not None:
            with self.running(name, left_out=True):
                self.let_all_run()
                self._run(order)
        if name in self._ends:
            return self._ends[name]()  # type: ignore[no-any-return]
        return result  # type: ignore[no-any-return]

    @contextmanager
    def running(self, name: str, *, begins: bool = True, left_out: bool = False) -> Iterator[None]:
        """As for other ranks, if `left_out`. Else raise: the call has no result to announce."""
        if left_out:
            with super().running(name, left_out=True):
                yield
            return
        raise RuntimeError(
            f"rank {self._rank}: {name} on a rank that the plan leaves out, which has no values of "
            "the training; call it on the active ranks only (optimizer.is_active)"
        )


def _announced(result: Any) -> Callable[[], Any]:
    """What ranks that are left out get of a result: values, but no parts of the state.

    The function that is returned waits for the device, in a thread whose current stream is another.
    """
    if isinstance(result, Tensor) and result.numel() == 1:
        value = result.detach()
        if not value.is_cuda:
            return value.cpu
        event = torch.cuda.current_stream(value.device).record_event()

        def copied() -> Tensor:
            event.synchronize()
            return value.cpu()

        return copied
    if isinstance(result, StepResult):
        return result.of_left_out
    is_value = isinstance(result, (bool, int, float, str, ForAllRanks))
    return lambda: result if is_value else None


@contextmanager
def new_group(
    process_group: dist.ProcessGroup | None, timeout: timedelta | None, doing: str
) -> Iterator[Group]:
    """A context for a call that runs on a group of its own, as `Group.of` makes it. Collective.

    What one rank raises inside, or in making the group, stops all ranks, unless it is agreed.
    """
    groups, first = _NESTING.groups, len(_NESTING.groups)
    group: Group | None = None

    def stop(error: BaseException) -> None:
        if group is None:
            return  # `Group.of` has told the other ranks
        reason = stop_reason(group.name, waiting_in(doing), error, advice=AGAIN)
        later = [made for ref in groups[first:] if (made := ref()) is not None]
        for made in {group, *later}:
            if made.size > 1:
                made.abort(reason)

    with _raising(stop):
        group = Group.of(process_group, timeout, [made for ref in groups if (made := ref())])
        groups.append(weakref.ref(group))
        yield group


def waiting_in(name: str) -> str:
    """Where a rank has failed, if the others wait for it in the call with this name."""
    return f"{name}, in which other ranks wait for it"


def stop_reason(
    rank: int,
    where: str,
    error: BaseException,
    *,
    advice: str = "build the optimizer again on all ranks and load a checkpoint",
) -> str:
    """What the other ranks raise if this rank raises alone."""
    if isinstance(error, CollectiveTimeout):
        return str(error)
    return f"rank {rank} failed in {where}; {advice}. {type(error).__name__}: {error}"


def collective(
    method: Callable[Concatenate[S, P], R], *, begins_step: bool = False
) -> Callable[Concatenate[S, P], R]:
    """A method that all ranks call: it runs as one of the `collective_calls` of its object."""
    name = f"{method.__name__}()"

    def collective_call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if begins_step:
            with self.collective_calls.running(name, left_out=True):
                self._begin_step()
        calls: CollectiveCalls = self.collective_calls
        return calls.call(name, method, self, *args, **kwargs)

    functools.update_wrapper(collective_call, method)
    collective_call.is_collective = True  # type: ignore[attr-defined]
    return collective_call


def begins_step(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """As `collective`, of a method that begins a step: `_begin_step` of its object runs before it,
    and may change which ranks are left out.
    """
    return collective(method, begins_step=True)

"""`benchmarks/kernels.py`: tensor lists, tasks whose implementations agree, rows and targets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from operators import peers, stack
from operators.lists import LISTS
from operators.measure import Measured, Wrong, check, measure
from operators.optimizers import RULE, Flat, Listed
from operators.peers import Peer
from operators.row import read_rows, rows_of
from operators.show import draw, table_of, verdicts_table
from operators.targets import verdicts
from operators.task import Task, Way
from operators.tasks import DTYPES, FUSED, OPERATIONS, OURS, chain, tasks_of, update
from rich.console import Console
from rows import write_rows

import kernels
from poplar import ops

BENCHMARKS = Path(kernels.__file__).parent


def test_tensor_lists_have_the_sizes_of_their_models() -> None:
    assert LISTS["gpt-124m"].numel == 124_439_808
    assert LISTS["llama-1.1b"].numel == 1_100_048_384
    assert len(LISTS["gpt-124m"].shapes) == 148


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_implementations_of_a_task_agree(dtype: str) -> None:
    names = []
    for make in tasks_of(OPERATIONS, LISTS["small"], dtype):
        task = make()
        check(task)
        names.append(task.name)
        assert OURS in task.ways
        assert task.usual in task.ways
    assert names == [*OPERATIONS]


class NamesDevices(TorchFunctionMode):
    """Stands for a machine whose tensors are not where torch makes them by default."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        caller = Path(sys._getframe(1).f_code.co_filename)
        if func in _device_constructors() and caller.parent.name == "operators":
            assert kwargs.get("device") is not None, f"{func} in {caller.name} names no device"
            self.made += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_tensors_are_on_the_device_of_the_task(dtype: str) -> None:
    for make in tasks_of(OPERATIONS, LISTS["small"], dtype):
        with NamesDevices() as watched:
            check(make())
        assert watched.made


def test_no_default_device_while_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    note = Way(lambda: modes.append(torch._C._len_torch_function_stack()), lambda: torch.ones(1))
    monkeypatch.setattr(
        kernels, "tasks_of", lambda *_: [lambda: Task("pack", 1, 8, {OURS: note}, OURS)]
    )
    options = kernels.parse_options(["--quick", "--operations", "pack", "--dtypes", "fp32"])
    before = torch._C._len_torch_function_stack()
    kernels.run(options, Console(quiet=True))
    assert modes == [before] * 4  # three rounds, and the check before them


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_uses_fp32_masters(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.tasks.MAX_NORM", 0.01)  # a fifth of what the gradients have
    task = chain(LISTS["small"], DTYPES[dtype], "cpu")
    means = {}
    for name, way in task.ways.items():
        way.prepare()
        way.run()
        means[name] = way.result().clone()
    assert {mean.dtype for mean in means.values()} == {torch.float32}
    # The first moment is a tenth of the clipped gradient (1e-6 is added to its norm).
    assert means[OURS].double().norm().item() == pytest.approx(0.1 * 0.01, rel=1e-4)
    for name in ("usual torch", "best torch"):
        torch.testing.assert_close(means[name], means[OURS], rtol=2e-3, atol=1e-9, msg=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_parameters_are_rounded_masters(dtype: str) -> None:
    grads = [torch.randn(100, 3).to(DTYPES[dtype]), torch.randn(7).to(DTYPES[dtype])]
    flat = Flat(torch.cat([g.reshape(-1) for g in grads]).float(), DTYPES[dtype])
    listed = Listed(grads, FUSED)
    listed.reset()
    flat.step(torch.ones(()))
    listed.receive()
    listed.step()
    assert flat.rounded is not None
    assert flat.values.any()
    torch.testing.assert_close(flat.rounded, flat.values.to(DTYPES[dtype]), rtol=0, atol=0)
    for rounded, parameter in zip(listed.rounded, listed.parameters, strict=True):
        assert torch.equal(rounded, parameter.detach().to(DTYPES[dtype]))
    torch.testing.assert_close(
        flat.values, torch.cat([p.detach().reshape(-1) for p in listed.parameters])
    )


@pytest.mark.parametrize(("dtype", "update_bytes"), [("fp32", 28), ("bf16", 30), ("fp16", 30)])
def test_least_bytes_include_masters_state_and_rounded_parameters(
    dtype: str, update_bytes: int
) -> None:
    task = update(LISTS["small"], DTYPES[dtype], "cpu")
    assert task.least_bytes == update_bytes * task.numel
    assert chain(LISTS["small"], DTYPES[dtype], "cpu").least_bytes == 40 * task.numel


def test_usual_step_matches_grad_scaler() -> None:
    """torch's own `unscale_`, clip and `step` against the calls of `usual torch`."""
    recorded = []

    class Spy(torch.optim.AdamW):
        def step(self, closure=None):
            names = ("grad_scale", "found_inf")
            recorded.append([getattr(self, name, "nothing") for name in names])
            return super().step(closure)

    listed = Listed([torch.ones(3)], partial(Spy, fused=True, **RULE))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # so that it makes its scale
    scaler.unscale_(listed.optimizer)
    scaler.step(listed.optimizer)
    listed.step_with_grad_scaler(None, torch.full((), 0.0))
    _, theirs, ours = recorded
    assert theirs[0] is ours[0] is None
    assert torch.equal(theirs[1], ours[1])
    assert not hasattr(listed.optimizer, "grad_scale")


def test_step_with_found_inf_changes_nothing() -> None:
    listed = Listed([torch.ones(3).bfloat16()], FUSED)
    listed.reset()
    listed.grads[0].fill_(math.inf)
    listed.step_with_grad_scaler(None, torch.ones(()))
    assert not listed.mean().any()
    assert not listed.parameters[0].any()


def fake_peer(**how: bool) -> Peer:
    """An optimizer as a peer's, by torch."""
    return Peer("stand-in", partial(torch.optim.AdamW, foreach=True, **RULE), **how)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_peers_take_part_in_the_update(dtype: str, flat: bool) -> None:
    task = update(LISTS["small"], DTYPES[dtype], "cpu", [fake_peer(flat=flat)])
    assert "stand-in" in task.ways
    check(task)


def test_unavailable_peers_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Peer:
        import a_package_that_does_not_exist  # noqa: F401

        raise AssertionError

    def broken() -> Peer:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(peers, "OPTIONAL", {"cpu": (absent, fake_peer)})
    assert [peer.name for peer in peers.installed("cpu")] == ["stand-in"]
    monkeypatch.setattr(peers, "OPTIONAL", {"cpu": (broken,)})
    with pytest.warns(UserWarning, match="measuring without broken: no compiler"):
        assert peers.installed("cpu") == []


def test_different_result_raises() -> None:
    right, wrong = torch.ones(3), torch.tensor([1.0, 2.0, 1.0])
    ways = {"a": Way(lambda: None, lambda: right), "b": Way(lambda: None, lambda: wrong)}
    with pytest.raises(Wrong, match="'b' is off by 1"):
        check(Task("sum", 3, 12, ways, "a"))


def rows_with(device: dict[str, float] | None = None, **seconds: float):
    ways = {name: Way(lambda: None, lambda: torch.ones(1)) for name in seconds}
    task = Task("chain", 1000, 36_000, ways, "usual torch")
    measured = Measured(
        seconds={name: [s] * 3 for name, s in seconds.items()},
        device_seconds={name: [s] * 3 for name, s in (device or {}).items()},
        speeds=[1e9] * 3,
    )
    return rows_of(task, "gpt-124m", "fp32", measured, 2)


def test_rows_have_copy_fraction_and_speedup() -> None:
    ours, usual, best = rows_with(**{OURS: 40e-6, "usual torch": 60e-6, "best torch": 50e-6})
    assert ours.bytes_per_second == pytest.approx(0.9e9)
    assert ours.of_copy == pytest.approx(0.9)
    assert (ours.over_usual, usual.over_usual) == (pytest.approx(1.5), pytest.approx(1.0))
    found = {v.what: (v.value, v.met) for v in verdicts([ours, usual, best])}
    assert found["over the best torch"] == (pytest.approx(1.25), True)
    assert found["over the usual torch"][1]
    slow = replace(ours, of_copy=0.5)
    assert not next(v for v in verdicts([slow]) if v.what == "of its bandwidth bound").met


def test_bandwidths_use_device_seconds_and_speedups_host_seconds() -> None:
    host = {OURS: 80e-6, "usual torch": 160e-6}
    ours, usual = rows_with(device={OURS: 40e-6, "usual torch": 45e-6}, **host)
    assert (ours.p50_seconds, ours.device_p50_seconds) == (80e-6, 40e-6)
    assert ours.bytes_per_second == pytest.approx(0.9e9)
    assert (ours.of_copy, usual.of_copy) == (pytest.approx(0.9), pytest.approx(0.8))
    assert ours.over_usual == pytest.approx(2.0)
    assert rows_with(**host)[0].device_p50_seconds is None
    console = Console(record=True, width=200)
    console.print(table_of([ours, usual]))
    assert "device ms" in console.export_text()


def test_device_time_excludes_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a fake GPU that records the calls."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    def sleep(cycles: int) -> None:
        assert cycles > 0
        calls.append("sleep")

    cuda = SimpleNamespace(Event=Event, _sleep=sleep, synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr("operators.measure.torch.cuda", cuda)
    monkeypatch.setattr(
        "operators.measure._Copies", lambda _: SimpleNamespace(bytes_per_second=lambda: 1e9)
    )
    way = Way(lambda: calls.append("run"), lambda: torch.ones(1), lambda: calls.append("-"))
    measured = measure(Task("pack", 1, 8, {OURS: way}, OURS, device="cuda"), rounds=1)
    assert measured.device_seconds == {OURS: [pytest.approx(2e-3)]}
    by_host = ["-", "wait", "run", "wait"]
    by_device = ["-", "wait", "sleep", "event", "run", "event", "wait"]
    assert calls == ["-", "run", *by_host, *by_device]


def test_rows_have_the_provider_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = rows_with(**{OURS: 1.0, "usual torch": 1.0})
    assert here.operators == stack.operators("cpu")
    assert here.provider in ("C++", "plain PyTorch")
    found = {"cuda": ops.Provider("Triton", "POPLAR_OPS=triton")}
    monkeypatch.setattr("poplar.ops.providers", lambda: found)
    assert stack.operators("cuda") == "Triton (POPLAR_OPS=triton)"
    triton = replace(here, operators=stack.operators("cuda"))
    assert next(verdicts([triton])).case == "chain, gpt-124m, fp32, Triton"
    console = Console(record=True, width=200)
    console.print(table_of([triton]))
    assert "poplar, Triton" in console.export_text()


def test_best_torch_is_from_the_same_run() -> None:
    seconds = {OURS: 1.0, "usual torch": 1.0, "best torch": 0.5}
    cpp = [replace(row, operators="C++ (x)") for row in rows_with(**seconds)]
    seconds["best torch"] = 2.0
    triton = [replace(row, operators="Triton (y)") for row in rows_with(**seconds)]
    over = [v.value for v in verdicts([*cpp, *triton]) if v.what == "over the best torch"]
    assert over == [pytest.approx(0.5), pytest.approx(2.0)]


def test_old_rows_without_device_seconds_load(tmp_path: Path) -> None:
    stored = read_rows(BENCHMARKS / "results/kernels.jsonl")
    assert stored
    write_rows(tmp_path / "old.jsonl", stored[:1])
    old = json.loads((tmp_path / "old.jsonl").read_text())
    del old["device_p50_seconds"], old["operators"]
    (tmp_path / "old.jsonl").write_text(json.dumps(old))
    (row,) = read_rows(tmp_path / "old.jsonl")
    assert (row.device_p50_seconds, row.operators, row.provider) == (None, "", "")
    assert list(verdicts([*stored, row]))
    console = Console(record=True, width=200)
    console.print(table_of([row]))
    assert "device ms" not in console.export_text()


def test_matplotlib_is_not_needed_without_a_plot() -> None:
    without = "import sys; sys.modules['matplotlib'] = None; import kernels; kernels.main()"
    subprocess.run(
        [sys.executable, "-c", without, "--show", "results/kernels.jsonl"],
        cwd=BENCHMARKS,
        check=True,
        capture_output=True,
        timeout=120,
    )


def test_rows_are_written_read_and_plotted(tmp_path: Path) -> None:
    task = next(tasks_of(["pack"], LISTS["small"], "bf16"))()
    measured = measure(task, rounds=2)
    assert all(s > 0 and math.isfinite(s) for own in measured.seconds.values() for s in own)
    rows = rows_of(task, "small", "bf16", measured, threads=2)
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 0
    console = Console(record=True, width=200)
    console.print(
        table_of(rows), verdicts_table(list(verdicts(rows_with(**{OURS: 1.0, "usual torch": 1.0}))))
    )
    assert "torch.cat, mul_" in console.export_text()


def test_models_that_do_not_fit_are_skipped() -> None:
    assert kernels.fits("gpt-124m", "chain", "cpu")
    assert not kernels.fits("llama-1.1b", "chain", "cpu")
    assert kernels.fits("llama-1.1b", "pack", "cpu")
    assert kernels.parse_options(["--quick"]).tensors == ("small",)

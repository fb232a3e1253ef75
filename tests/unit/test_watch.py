"""`poplar watch`: what is concluded from the records of ranks, and what is started."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import sys
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.watch import verdict
from poplar.watch.job import run
from poplar.watch.records import RankRecord, StepRecord, Wait, align_clocks, read_records
from poplar.watch.verdict import ADVICE, COMPUTE, INPUT, NETWORK, judge

STEPS, SAMPLES = 40, 12


def records(
    compute, *, data=None, network=0.01, offsets=None, jitter=0.0, engine="DDP", samples=SAMPLES,
    batches=1,
):  # fmt: skip
    """Ranks that begin together and meet in one all-reduce, then update for 5 ms.

    By rank: seconds of compute and of input, and by how much its clock is ahead.
    """
    ranks = len(compute)
    data, offsets = data or [0.0] * ranks, offsets or [0.0] * ranks
    steps, begin = [[] for _ in compute], 100.0
    for number in range(STEPS):
        late = [jitter * ((number + rank) % 2) for rank in range(ranks)]
        issued = [begin + a + b + c for a, b, c in zip(compute, data, late, strict=True)]
        end = max(issued) + network
        for rank, ahead in enumerate(offsets):
            wait = Wait(
                key="all", issued=issued[rank] + ahead, begin=issued[rank] + ahead, end=end + ahead
            )
            step = StepRecord(
                number=number,
                begin=begin + ahead,
                end=end + 0.005 + ahead,
                samples=samples,
                batches=batches,
                data=data[rank],
                optimizer=0.005,
                waits=(wait,),
            )
            steps[rank].append(step)
        begin = end + 0.005
    return [
        RankRecord(
            rank=rank,
            world_size=ranks,
            host="a",
            clock=f"{ahead}",
            engine=engine,
            device="CPU",
            steps=tuple(steps[rank]),
        )
        for rank, ahead in enumerate(offsets)
    ]


def test_slow_rank_is_named_with_the_gain_of_the_best_batches():
    verdict = judge(records([0.1, 0.2, 0.2]))
    assert (verdict.cause, verdict.waiting_rank, verdict.advised) == (COMPUTE, 0, True)
    step = 0.2 + 0.01 + 0.005
    assert verdict.waiting_fraction == pytest.approx(0.1 / step)
    # 36 samples at 120 + 60 + 60 samples/s take 0.15 s, and the rest stays.
    assert verdict.batches == (18, 9, 9)
    assert verdict.gain == pytest.approx(step / (0.15 + 0.015))
    assert verdict.gain_spread == pytest.approx(0.0, abs=1e-6)
    text = "\n".join(verdict.sentences())
    assert "47% of rank 0's time is waiting for ranks 1-2, whose compute" in text
    assert 'Plan.manual("18,9,9", stage=0)' in text
    assert "1.30x +- 0.00" in text


@pytest.mark.parametrize("engine", ADVICE)
@pytest.mark.parametrize(
    ("samples", "batches", "passes"),
    [
        (12, 1, ((18,), (9,), (9,))),
        (12, 3, ((2, 4, 4, 4, 4), (1, 4, 4), (1, 4, 4))),
        (0, 0, ((18,), (9,), (9,))),
    ],
    ids=["one batch", "gradient accumulation", "unknown batches"],
)
def test_the_advice_runs_and_gives_a_plan_of_the_known_batches(engine, samples, batches, passes):
    verdict = judge(records([0.1, 0.2, 0.2], engine=engine, samples=samples, batches=batches))
    _, module, plan, use, _ = map(str.strip, verdict.sentences())
    pytest.importorskip("transformers" if engine == "Trainer" else "torch")
    names = {}
    exec(module, names)
    optimizer = names["poplar"].HeteroZeroOptimizer
    function = use.partition("(")[0].rpartition("= ")[2]
    assert callable(eval(function, {**names, "optimizer": optimizer}))
    stage = "0" if engine == "DDP" else "3" if engine == "FSDP2" else "..."
    assert f"stage={stage}" in plan
    if not samples:
        assert ("global_batch=...," in plan, "max_micro_batch=...)" in plan) == (True, True)
        plan = plan.replace("_batch=...", "_batch=36")
    exec(plan.replace(f"stage={stage}", "stage=0"), names)
    assert names["plan"].micro_batches == passes


def test_only_the_slowest_of_three_speeds_is_named():
    assert judge(records([0.1, 0.2, 0.4])).waiting_on == (2,)


def test_times_of_a_rank_add_up_to_its_step():
    for time in judge(records([0.1, 0.2], data=[0.02, 0.01])).ranks:
        parts = time.compute + time.input + time.optimizer + time.network + sum(time.waiting)
        assert parts == pytest.approx(time.step)


def test_slow_input_is_named_and_no_plan_is_advised():
    verdict = judge(records([0.1, 0.1], data=[0.0, 0.3]))
    assert (verdict.cause, verdict.waiting_on, verdict.advised) == (INPUT, (1,), False)
    assert "A batch there takes 0.3 s" in verdict.sentences()[0]


def test_the_time_of_a_batch_is_a_part_of_what_a_step_accumulates():
    verdict = judge(records([0.1, 0.1], data=[0.0, 0.6], batches=3))
    assert "A batch there takes 0.2 s" in verdict.sentences()[0]


def test_a_recording_that_has_ended_is_a_part_of_the_verdict():
    ending = "on rank 1, recording ends: RuntimeError('broken')"
    first, *found = judge(records([0.1, 0.2]), [ending]).sentences()
    assert first == f"Only a part of the job was recorded: {ending}."
    assert found == judge(records([0.1, 0.2])).sentences()
    _, missing, *_ = judge(records([0.1, 0.2])[:1], [ending]).sentences()
    assert missing.endswith("1 of 2 ranks were recorded, so waits for the others count as network.")


def test_slow_link_is_named_as_the_network():
    verdict = judge(records([0.1, 0.11], network=0.3))
    assert (verdict.cause, verdict.advised) == (NETWORK, False)
    assert "the network is slow" in verdict.sentences()[0]


@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_equal_ranks_get_no_advice(jitter):
    verdict = judge(records([0.1, 0.1], jitter=jitter))
    assert (verdict.cause, verdict.advised) == (None, False)
    assert "No rank is slower" in verdict.sentences()[0]


def test_clocks_of_hosts_are_aligned_by_the_ends_of_collectives():
    ahead = records([0.1, 0.2, 0.2], offsets=[0.0, 1234.5, -7.25])
    aligned, together = judge(align_clocks(ahead)), judge(records([0.1, 0.2, 0.2]))
    assert aligned.batches == together.batches
    assert aligned.waiting_fraction == pytest.approx(together.waiting_fraction)
    assert aligned.gain == pytest.approx(together.gain)


def test_an_evaluation_between_two_steps_does_not_count():
    ranks = records([0.1, 0.2])
    longer = replace(ranks[0].steps[5], begin=ranks[0].steps[5].begin - 60.0)
    ranks[0] = replace(ranks[0], steps=(*ranks[0].steps[:5], longer, *ranks[0].steps[6:]))
    assert judge(ranks).ranks == judge(records([0.1, 0.2])).ranks


def test_ranks_without_a_common_step_have_no_verdict():
    first, second = records([0.1, 0.2])
    assert judge([]) is None
    assert judge([first, replace(second, steps=())]) is None


def record_text(rank, world_size, steps):
    """The file of a rank with equal steps."""
    header = {"rank": rank, "world_size": world_size, "host": "a", "clock": "b", "engine": "DDP",
              "device": "CPU"}  # fmt: skip
    step = {"number": 7, "begin": 1.0, "end": 3.0, "samples": 4, "batches": 2, "data": 0.5,
            "optimizer": 0.0, "waits": [["0/0", 1.5, 2.0, 2.5]]}  # fmt: skip
    lines = (json.dumps(line, separators=(",", ":")) for line in [header, *[step] * steps])
    return "".join(f"{line}\n" for line in lines)


def test_records_are_read_while_a_line_is_being_written(tmp_path):
    (tmp_path / "rank-0.jsonl").write_text(record_text(0, 1, steps=2)[:-5])
    (rank,) = read_records(tmp_path)
    assert rank.steps == (
        StepRecord(
            number=7, begin=1.0, end=3.0, samples=4, batches=2, data=0.5, optimizer=0.0,
            waits=(Wait(key="0/0", issued=1.5, begin=2.0, end=2.5),),
        ),
    )  # fmt: skip


def test_a_verdict_on_some_of_the_ranks_says_so():
    some = records([0.1, 0.2, 0.1])
    for recorded in (some[:2], some[1:]):  # of the first host, and of another one
        (first, *_) = judge(recorded).sentences()
        assert first.startswith("Only 2 of 3 ranks were recorded")
    assert "were recorded" not in judge(records([0.1, 0.2])).sentences()[0]


def test_ranks_of_an_earlier_start_with_more_ranks_are_not_read(tmp_path):
    for rank, world_size in enumerate([2, 2, 3]):
        (tmp_path / f"rank-{rank}.jsonl").write_text(record_text(rank, world_size, steps=1))
    assert [record.rank for record in read_records(tmp_path)] == [0, 1]


def test_the_exit_status_is_that_of_the_job(tmp_path):
    def status(program):
        return run([sys.executable, "-S", "-c", program], tmp_path, 60.0, lambda: None)

    assert status("raise SystemExit(3)") == 3
    assert status("import os; os.kill(os.getpid(), 9)") == 137
    with pytest.raises(ValueError, match="cannot start 'no-such-program'"):
        run(["no-such-program"], tmp_path, 1.0, lambda: None)


def test_a_hidden_sitecustomize_still_runs_and_torch_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN'] = 'ran'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = """
import os, sys
assert os.environ["HIDDEN"] == "ran" and "_poplar_watch_recorder" in sys.modules
assert not {"torch", "poplar"} & sys.modules.keys()
"""
    assert run([sys.executable, "-c", program], tmp_path, 60.0, lambda: None) == 0


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.1, 2.0)), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_batches_hold_all_samples_and_the_last_rank_ends_first(ranks, total):
    fixed, each = zip(*ranks, strict=True)
    batches = verdict._fastest_batches(fixed, each, total)
    splits = (s for s in product(range(total + 1), repeat=len(ranks)) if sum(s) == total)

    def end(samples):
        return max(f + n * e for f, n, e in zip(fixed, samples, each, strict=True) if n)

    assert sum(batches) == total
    if total:
        assert end(batches) <= min(map(end, splits)) * (1.0 + 1e-9)


JOB_AND_WATCHER = '''
import sys
from pathlib import Path
from poplar.watch.job import run

code = """
import signal, sys, time
end = time.monotonic() + 20

def interrupted(*_):
    global end
    print("interrupted", flush=True)
    end = time.monotonic() + 0.5  # a second one would show

signal.signal(int(sys.argv[1]), interrupted)
print("started", flush=True)
while time.monotonic() < end:
    time.sleep(0.02)
sys.exit(7)
"""
sys.exit(run([sys.executable, "-c", code, sys.argv[1]], Path(), 0.1, lambda: None))
'''


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("terminal", "SIGINT"),
        *(("kill", f"SIG{name}") for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")),
    ],
)
def test_a_signal_reaches_the_job_once(sent, name):
    """The terminal sends Ctrl-C to the job, too; `kill` sends it to the watcher alone."""
    number = signal.Signals[name]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", JOB_AND_WATCHER, str(int(number))])
    output = b""
    while b"started" not in output:
        output += os.read(terminal, 100)
    if sent == "kill":
        os.kill(pid, number)
    else:
        os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # the end of a terminal
        while read := os.read(terminal, 100):
            output += read
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 7
    assert output.count(b"interrupted") == 1

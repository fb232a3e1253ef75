"""`poplar watch` on a job that knows nothing of it: two ranks of DDP."""

from __future__ import annotations

import json
import sys

import pytest
import typer

from poplar.cli.watch import watch
from poplar.watch.records import read_records

JOB = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

rank = 0 if (child := os.fork()) else 1
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


class Samples:
    def __len__(self):
        return 60

    def __getitem__(self, place):
        if rank == 1:
            time.sleep(0.03)
        return torch.full((4,), float(place))


model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in DataLoader(Samples(), batch_size=4):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
if rank == 0:
    os.waitpid(child, 0)
    sys.exit(3)
"""


def test_slow_input_of_a_rank_is_found_and_the_exit_status_is_that_of_the_job(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "store")]
    summary = tmp_path / "summary.json"
    with pytest.raises(typer.Exit) as end:
        watch(command, every=100.0, json_file=summary, html_file=tmp_path / "report.html")
    assert end.value.exit_code == 3
    verdict = json.loads(summary.read_text())
    assert (verdict["cause"], verdict["waiting_rank"], verdict["waiting_on"]) == (
        "input pipeline",
        0,
        [1],
    )
    assert {(rank["samples"], rank["batches"]) for rank in verdict["ranks"]} == {(4, 1)}
    assert verdict["ranks"][1]["input"] >= 4 * 0.03
    assert verdict["sentences"][0] in (tmp_path / "report.html").read_text().replace("&#39;", "'")
    assert verdict["sentences"][0] in " ".join(capsys.readouterr().err.split())


BROKEN = """
def broken():
    raise RuntimeError("broken")


def break_recorder(place):
    if rank == 1 and place == 9:
        sys.modules["_poplar_watch_recorder"]._HostClock.mark = staticmethod(broken)
    return True


loader = DataLoader(Samples(), batch_size=4)
for batch in (batch for place, batch in enumerate(loader) if break_recorder(place)):
"""


def test_a_recorder_that_fails_on_a_rank_ends_its_recording_and_not_the_job(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    loop = "for batch in DataLoader(Samples(), batch_size=4):\n"
    (tmp_path / "job.py").write_text(JOB.replace(loop, BROKEN.lstrip()))
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "store")]
    with pytest.raises(typer.Exit) as end:
        watch(command, every=100.0)
    assert end.value.exit_code == 3
    said = " ".join(capsys.readouterr().err.split())
    ending = "on rank 1, recording ends: RuntimeError('broken')"
    assert f"Only a part of the job was recorded: {ending}. " in said


DAMAGED = """
import os, pathlib, sys, time
pathlib.Path(os.environ["POPLAR_WATCH"], "rank-0.jsonl").write_text('{}\\n{"number": 1}\\n')
end = time.monotonic() + 60
while not pathlib.Path("raised 3").exists() and time.monotonic() < end:
    time.sleep(0.02)
pathlib.Path("ended").touch()
sys.exit(3)
"""


APART = """
import json, os, pathlib
folder = pathlib.Path(os.environ["POPLAR_WATCH"])
for rank in (0, 1):
    header = {"rank": rank, "world_size": 2, "host": "a", "clock": "b", "engine": "DDP",
              "device": "CPU"}
    step = {"number": 7 + rank, "begin": 0.0, "end": 1.0, "samples": 0, "batches": 0, "data": 0.0,
            "optimizer": 0.0, "waits": []}
    lines = (json.dumps(line, separators=(",", ":")) for line in (header, step))
    (folder / f"rank-{rank}.jsonl").write_text("".join(f"{line}\\n" for line in lines))
(folder / "ended-a-12.txt").write_text("on rank 0, recording ends: OSError()\\n")
(folder / "ended-a-13.txt").write_text("on rank 1, reco")
"""


def test_a_recording_that_has_ended_long_ago_is_named_without_a_verdict(capsys):
    with pytest.raises(typer.Exit) as end:
        watch([sys.executable, "-S", "-c", APART], every=100.0)
    assert end.value.exit_code == 0
    assert capsys.readouterr().err == (
        "poplar watch: no step was recorded on all ranks: on rank 0, recording ends: OSError().\n"
    )


def test_records_that_cannot_be_read_do_not_end_the_watch_of_a_job(tmp_path, monkeypatch, capsys):
    raised = []

    def read(folder):
        try:
            return read_records(folder)
        except KeyError:
            raised.append(folder)
            (tmp_path / f"raised {len(raised)}").touch()  # the job ends after the third error
            raise

    monkeypatch.setattr("poplar.cli.watch.read_records", read)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit) as end:
        watch([sys.executable, "-S", "-c", DAMAGED], every=0.1)
    assert (end.value.exit_code, (tmp_path / "ended").exists()) == (3, True)
    assert capsys.readouterr().err.count("KeyError") == 2  # while it runs, and at the end


def test_a_report_without_jinja2_is_refused_before_the_job_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    started = tmp_path / "started"
    with pytest.raises(typer.BadParameter, match="pip install jinja2"):
        watch(["touch", str(started)], html_file=tmp_path / "report.html")
    assert not started.exists()


def test_a_summary_that_cannot_be_written_leaves_the_exit_status_of_the_job(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "store")]
    with pytest.raises(typer.Exit) as end:
        watch(command, every=100.0, json_file=tmp_path)
    assert end.value.exit_code == 3
    assert "Is a directory" in capsys.readouterr().err

"""Open MPI as a second oracle: `Reduce_scatter` and `Allgatherv` also support uneven shares."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks as harness
import torch
from ranks import Pool
from test_random_collectives import WORLD, Case, issue

from poplar.comm import Group, connect

pytest.importorskip("mpi4py", reason="pip install mpi4py, and Open MPI")
MPIRUN = shutil.which("mpirun")
SEED, TIMES = 7, 100


def cases_that_differ_from_mpi(choice: str, folder: str) -> list[str]:
    group = Group.of(harness.group(), None)
    comm, draw = connect(group, choice), random.Random(SEED)
    theirs = np.load(Path(folder, f"{group.rank}.npz"))
    wrong = []
    for number in range(TIMES):
        case = Case.draw(number, draw)
        pending, result = issue(case, comm)
        pending.wait()
        if str(number) not in theirs:
            continue
        expected = torch.from_numpy(theirs[str(number)]).double()
        if case.operation == "reduce_scatter":
            expected = expected + float(case.accumulate)
        off = (result().double() - expected).abs()
        if (off > 2 * case.bound(group.rank, hosts=1)).any():
            wrong.append(str(case))
    return wrong


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install Open MPI")
def test_sums_and_gathers_match_mpi(ranks: Pool, tmp_path: Path) -> None:
    assert MPIRUN is not None
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", str(WORLD), sys.executable]
    script = str(Path(__file__).with_name("mpi_sums.py"))
    subprocess.run(
        [*command, script, str(SEED), str(TIMES), str(tmp_path)],
        check=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    for choice in ("shared_memory", "process_group"):
        for wrong in ranks.run(cases_that_differ_from_mpi, choice, str(tmp_path)):
            assert wrong == []

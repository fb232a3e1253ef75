"""Random clusters of GPUs in the catalogue of devices, on which little memory is left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from poplar.hardware.cluster_file import ClusterFile
from poplar.hardware.model_shapes import TrainingJob, architecture
from poplar.hardware.simulated_cluster import simulated_cluster
from poplar.values.profile import ClusterProfile

GPUS = ("T4", "RTX 3090", "RTX 4090", "L4")
MODELS = ("llama-1.1b", "llama-7b", "gpt2-1.5b", "gpt-neo-2.7b", "gpt2-774m", "llama-3-8b")
GLOBAL_BATCHES = (64, 128, 256, 512)
GBIT_PER_S = (1, 5, 10, 25)
DEVICES_OF_A_HOST = (1, 2, 4)


class Case(NamedTuple):
    """A cluster and what is trained on it."""

    described: ClusterFile
    job: TrainingJob
    global_batch: int
    model: str

    @property
    def profile(self) -> ClusterProfile:
        """The estimated profile."""
        return simulated_cluster(self.described, self.job).middle


def draw_case(ranks: int, seed: int, gpus: Sequence[str] = GPUS) -> Case:
    """Hosts of one kind of GPU each, a network, a model and a global batch."""
    draw = random.Random(seed)
    network, left = draw.choice(GBIT_PER_S), ranks
    hosts: list[dict[str, Any]] = []
    while left:
        count = min(left, draw.choice(DEVICES_OF_A_HOST))
        device = {"gpu": draw.choice(gpus), "count": count}
        hosts.append({"network_gbit_per_s": network, "device": [device]})
        left -= count
    model, global_batch = draw.choice(MODELS), draw.choice(GLOBAL_BATCHES)
    job = TrainingJob(
        architecture=architecture(model), sequence=0, checkpointing=draw.random() < 0.5
    )
    return Case(ClusterFile.from_dict({"host": hosts}), job, global_batch, model)

"""What the authors published, with the place of each figure, and their clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poplar.hardware.simulated_cluster import OVERLAP
from published_clusters.cluster import (
    GTX_1080_TI,
    P100_PCIE_12,
    P100_PCIE_16,
    V100_PCIE,
    V100_SXM2,
    Cluster,
    Host,
)
from published_clusters.models import HAP_MODELS, HETEROG_MODELS, Model

_GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One published evaluation."""

    system: str
    cluster: Cluster
    models: Mapping[str, Model]
    batch_per_rank: Mapping[str, int]
    """The global batch is this times the number of ranks."""
    figure: str
    """The published gain of the system."""
    source: str
    """Of the figure."""
    settings: str
    """Where cluster and batch are from."""


def _hap(gpus: int) -> Evaluation:
    """HAP's hosts with this many GPUs of each in use, as figure 12 varies them."""
    hosts = [Host(device=V100_SXM2, ranks=gpus, network_bytes_per_s=10.4 * _GBIT)] * 2
    hosts += [Host(device=P100_PCIE_16, ranks=gpus, network_bytes_per_s=10.4 * _GBIT)] * 6
    return Evaluation(
        system="HAP",
        cluster=Cluster(
            name=f"2 x {gpus} V100 + 6 x {gpus} P100, 10.4 Gbit/s",
            hosts=tuple(hosts),
            overlap=OVERLAP,
        ),
        models=HAP_MODELS,
        batch_per_rank=dict.fromkeys(HAP_MODELS, 32),
        figure="up to 2.41x",
        source="arXiv 2401.05965, abstract; the baseline and the model are not named there",
        settings="github.com/ylxdzsw/hap at 7c73d02: readme.txt, config.py",
    )


def _heterog(network_bytes_per_s: tuple[float, float], name: str) -> Evaluation:
    """HeteroG's hosts; the V100 have a network of their own."""
    fast, slow = network_bytes_per_s
    return Evaluation(
        system="HeteroG",
        cluster=Cluster(
            name=name,
            hosts=(
                Host(device=V100_PCIE, ranks=2, network_bytes_per_s=fast),
                Host(device=GTX_1080_TI, ranks=2, network_bytes_per_s=slow),
                Host(device=GTX_1080_TI, ranks=2, network_bytes_per_s=slow),
                Host(device=P100_PCIE_12, ranks=2, network_bytes_per_s=slow),
            ),
            overlap=OVERLAP,
        ),
        models=HETEROG_MODELS,
        batch_per_rank={"vgg19-224": 24, "bert-large": 3},
        figure="up to 222 %",
        source="CoNEXT 2020, doi 10.1145/3386367.3432728, abstract; it does not say whether this "
        "is 2.22x or 3.22x, nor over which scheme",
        settings="github.com/eval-submissions/HeteroG at 3ebe0c6: README.md, "
        "GAT/prepare_graphdef_input.py; the batch is that of its profiles, per GPU",
    )


EVALUATIONS: Mapping[str, Evaluation] = {
    **{f"hap-{gpus}": _hap(gpus) for gpus in (1, 2, 4, 8)},
    "heterog": _heterog((100 * _GBIT, 50 * _GBIT), "2 V100 + 4 1080Ti + 2 P100, 100 and 50 Gbit/s"),
    "heterog-profiled": _heterog((747e6, 747e6), "2 V100 + 4 1080Ti + 2 P100, 747 MB/s"),
}
"""`profiled`: with the network of HeteroG's GAT/config.txt. Others: by specification."""

LEFT_OUT = (
    "HeteroG's ResNet200, InceptionV3, MobileNetV2, NasNet, Transformer and XLNet-large: the "
    "examples have no such models"
)

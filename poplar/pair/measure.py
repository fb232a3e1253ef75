"""The standard measurement: two sizes of a Llama, in full and by LoRA, on all cards."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from poplar.doctor.facts import collect_facts
from poplar.pair.cards import card_of, peer_to_peer, versions
from poplar.pair.comparison import Case, Comparison
from poplar.pair.llama import CPU_SIZES, TRAININGS, chosen_sizes
from poplar.pair.ranks import Ranks
from poplar.pair.row import PairRow


def measure(
    device: torch.device, minutes: float, report: Callable[[str], None], emulated: str = ""
) -> PairRow:
    """The row of the cards in the default process group. Collective.

    Args:
        device: of this rank.
        minutes: for all cases together, about.
        report: receives one line per case and round.
        emulated: what stands for unequal cards, for the row.

    Raises:
        ValueError: there is one rank, or the smallest card holds none of the models.
    """
    if dist.get_world_size() < 2:
        raise ValueError(
            "poplar pair compares at least two cards, but this job has one rank; on a machine with "
            "several cards start it without torchrun, or with torchrun --nproc-per-node 2 -m "
            "poplar pair"
        )
    ends = time.monotonic() + 60.0 * minutes
    ranks = Ranks()
    own = collect_facts(device)
    facts = ranks.gather(own)
    dtype = torch.float32
    if device.type == "cuda":
        has_bf16 = all(one.device.has_bf16 for one in facts)
        dtype = torch.bfloat16 if has_bf16 else torch.float16
    memory = min(one.memory_bytes for one in facts)
    cases = [
        Case(size=size, training=training, dtype=dtype, device=device)
        for training in TRAININGS
        for size in (CPU_SIZES if device.type == "cpu" else chosen_sizes(training, memory))
    ]
    results = []
    for number, case in enumerate(cases):
        left = ranks.from_first(ends - time.monotonic())
        seconds = max(left, 1.0) / (len(cases) - number)
        report(f"{case.size.name}, {case.training}: {seconds:.0f} s")
        results.append(Comparison(case, ranks, seconds, report).result())
    return PairRow(
        cards=tuple(map(card_of, facts)),
        peer_to_peer=peer_to_peer(facts),
        hosts=len({one.device.host for one in facts}),
        emulated=emulated,
        versions=versions(own),
        cases=tuple(results),
    )

"""What passes may allocate beside a shard, and the error if the ranks cannot hold the model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from poplar.profiler.memory_budget import PassMemory

MIB = 1 << 20


def memory_of(budgets: list[int], *, parameters: int, units: int) -> PassMemory:
    nothing = (0.0,) * len(budgets)
    return PassMemory(
        parameters=parameters, unsharded_units=units, budgets=tuple(budgets), unsharded=nothing
    )


def test_provisional_shares_leave_every_rank_the_same_part_of_its_memory() -> None:
    memory = memory_of([5 * MIB, 3 * MIB, 2 * MIB], parameters=5 * MIB, units=MIB)
    assert memory.capacities == (4 * MIB, 2 * MIB, MIB)
    assert memory.shares == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    assert memory.sharded == pytest.approx([part * MIB * 2 / 7 for part in (4, 2, 1)])
    memory.check_sharded()


def test_error_says_what_each_rank_lacks_and_how_much_more_would_fit() -> None:
    memory = memory_of([5 * MIB, MIB // 2, 2 * MIB], parameters=20 * MIB, units=MIB)
    with pytest.raises(ValueError, match="do not fit even if they are sharded") as caught:
        memory.check_sharded()
    for text in (
        "the parameters, 20.0 MiB,",
        "beside 1.0 MiB of unsharded units",
        "rank 0 may use 5.0 MiB, rank 1 may use 512.0 KiB (512.0 KiB too little for the units)",
        "5.2 MiB more on each rank",
        "memory_limit",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("seed", range(30))
def test_with_what_is_missing_on_every_rank_the_parameters_fit(seed: int) -> None:
    generator = random.Random(seed)
    budgets = [generator.randint(0, 50) for _ in range(generator.randint(1, 5))]
    memory = memory_of(
        budgets, parameters=generator.randint(1, 300), units=generator.randint(0, 40)
    )
    enough = replace(memory, budgets=tuple(own + memory.missing for own in budgets))
    enough.check_sharded()
    if memory.missing >= 1:
        short = replace(memory, budgets=tuple(own + memory.missing - 1 for own in budgets))
        assert min(short.budgets) < short.unsharded_units or (
            sum(short.capacities) < short.parameters
        )

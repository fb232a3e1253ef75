"""Which ranks make a group: those that join now, whatever each of them has called before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from poplar.comm import failure_reports, formation
from poplar.comm.deadline import NoAnswer
from poplar.comm.failure_reports import FailureReports
from poplar.comm.formation import Formation, Formed

SIZE = 3
LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.05)
Rank = Callable[[int], Any]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """The process group as each of its ranks has it, in one process."""
    store = dist.HashStore()
    for module in (formation, failure_reports):
        monkeypatch.setattr(module, "_get_process_group_store", lambda group: group.store)

    def process_group(number: int, name: str = "all", size: int = SIZE) -> Any:
        return SimpleNamespace(rank=lambda: number, size=lambda: size, group_name=name, store=store)

    return process_group


def form(groups: Sequence[Any], subgroups: Sequence[str] = ("",) * SIZE) -> list[Formed]:
    """What the ranks get that join at the same time."""

    def join(group: Any, name: str) -> Formed:
        return Formation(group, name).wait(LONG, None)

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(join, groups, subgroups))


def wait_in_vain(joined: Formation) -> list[int]:
    with pytest.raises(NoAnswer):
        joined.wait(SHORT, None)
    return joined.leave()


def test_all_ranks_get_the_same_numbers(rank: Rank) -> None:
    groups = [rank(number) for number in range(SIZE)]
    for index in range(1, 20):
        formed = form(groups)
        assert formed == [formed[0]] * SIZE
        assert formed[0].index == index


def test_subgroups_are_used_again_if_all_ranks_have_them(rank: Rank) -> None:
    groups = [rank(number) for number in range(SIZE)]
    first = form(groups)[0].subgroups
    assert form(groups, [first] * SIZE)[0].subgroups == first
    one_has_closed_them = form(groups, [first, "", first])[0].subgroups
    assert one_has_closed_them not in ("", first)
    one_has_others = form(groups, [first, one_has_closed_them, first])[0].subgroups
    assert one_has_others not in ("", first, one_has_closed_them)


@pytest.mark.parametrize("present", [0, 1])
def test_a_rank_that_has_waited_in_vain_takes_part_in_the_next_group(
    rank: Rank, present: int
) -> None:
    groups = [rank(number) for number in range(SIZE)]
    others = [number for number in range(SIZE) if number != present]
    for _ in range(2):
        assert wait_in_vain(Formation(groups[present])) == others
    formed = form(groups)
    assert formed == [formed[0]] * SIZE
    assert wait_in_vain(Formation(groups[present])) == others, "joins of the last group count"
    assert form(groups)[0].index == formed[0].index + 1


def test_ranks_that_give_up_one_after_the_other_name_the_absent_rank(rank: Rank) -> None:
    joined = [Formation(rank(number)) for number in (0, 1)]
    assert [wait_in_vain(each) for each in reversed(joined)] == [[2], [2]]


def test_the_first_rank_is_named_if_it_has_joined_and_does_not_answer(rank: Rank) -> None:
    _, second, _ = (Formation(rank(number)) for number in range(SIZE))
    assert wait_in_vain(second) == [0]


def test_a_rank_joins_again_while_the_first_rank_waits(rank: Rank) -> None:
    """Its first join must not count: it waits for the group of the second."""
    groups = [rank(number) for number in range(SIZE)]
    wait_in_vain(Formation(groups[1]))
    formed = form(groups)
    assert formed == [formed[0]] * SIZE


def test_groups_of_process_groups_with_common_ranks_are_independent(rank: Rank) -> None:
    """Rank 0 of each waits for its own rank 1."""
    left, right = ([rank(number, name, 2) for number in range(2)] for name in ("01", "12"))
    waiting = Formation(left[0])
    assert form(right)[0].index == 1
    assert wait_in_vain(waiting) == [1]
    assert form(left)[0].index == 1


def causes(joined: Formation, group: Any) -> dict[int, str]:
    return FailureReports.of(group, joined.name).causes()


@pytest.mark.parametrize("formed_before", [False, True])
def test_ranks_that_come_later_raise_a_failure_once(rank: Rank, formed_before: bool) -> None:
    groups = [rank(number) for number in range(SIZE)]
    if formed_before:
        form(groups)
    for _ in range(2):
        Formation(groups[1]).fail("rank 1 has failed")
        for group in (groups[0], groups[2]):
            later = Formation(group)
            assert causes(later, group) == {1: "rank 1 has failed"}
            later.leave()
    for group in groups:
        again = Formation(group)
        assert causes(again, group) == {}
        again.leave()
    assert form(groups)[0].index == 1 + formed_before


def test_a_rank_that_has_failed_and_joins_again_waits_until_the_others_have_raised(
    rank: Rank,
) -> None:
    """Otherwise it would be in a group with ranks that then raise its earlier failure."""
    groups = [rank(number, size=2) for number in range(2)]
    Formation(groups[0]).fail("rank 0 has failed")
    again, first = Formation(groups[0]), Formation(groups[1])
    assert wait_in_vain(first) == [0]
    assert wait_in_vain(again) == [1]
    assert form(groups)[0].index == 1


def test_all_ranks_fail_and_join_again(rank: Rank) -> None:
    """As with an invalid argument, which all ranks then correct."""
    groups = [rank(number) for number in range(SIZE)]
    for group in groups:
        Formation(group).fail("the timeout is not valid")
    for group in groups:
        again = Formation(group)
        assert causes(again, group) == {}
        again.leave()
    assert form(groups)[0].index == 1

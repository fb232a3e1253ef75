"""The longest chain of actions that wait for each other, against all chains of small passes."""

from __future__ import annotations

import random

import pytest

from poplar.planner.communication_schedule import Chain, Event, longest_chain


def every_chain(events: list[Event]) -> list[tuple[Event, ...]]:
    """All chains of compute and collectives, by following each dependency."""
    chains: list[tuple[Event, ...]] = [()]
    compute: list[tuple[Event, ...]] = [()]
    collectives: list[list[tuple[Event, ...]]] = [[()]]
    for event in events:
        if event.what == "wait":
            compute = compute + collectives[1 + int(event.amount)]
        elif event.what == "compute":
            compute = [(*chain, event) for chain in compute]
        else:
            collectives.append([(*chain, event) for chain in compute + collectives[-1]])
    return chains + compute + collectives[-1]


def sums(chain: tuple[Event, ...], gather: float, reduce: float) -> Chain:
    total = {what: sum(e.amount for e in chain if e.what == what) for what in CHOICES}
    seconds = total["compute"] + gather * total["gather"] + reduce * total["reduce"]
    return Chain(seconds, total["compute"], total["gather"], total["reduce"])


CHOICES = ("compute", "gather", "reduce")


def test_the_longest_of_all_chains_is_found():
    for seed in range(200):
        draw = random.Random(seed)
        events, issued = [], 0
        for _ in range(draw.randint(0, 9)):
            what = draw.choice((*CHOICES, "wait"))
            if what == "wait" and issued:
                events.append(Event("wait", draw.randrange(issued)))
            elif what != "wait":
                events.append(Event(what, draw.random()))
                issued += what != "compute"
        each = draw.choice((0.1, 1.0, 10.0)), draw.random()
        longest = longest_chain(events, *each)
        expected = max(sums(chain, *each) for chain in every_chain(events))
        assert longest == pytest.approx(expected), f"seed {seed}"

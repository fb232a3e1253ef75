"""Placements of tensors on ranks, and programmes as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.programmes.graph.placement import (
    PARTIAL,
    REPLICATED,
    Sharded,
    cut,
    local_shape,
)
from poplar.programmes.graph.programme import Programme
from poplar.values.schema import to_json_types

RATIOS = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@given(units=st.integers(0, 40), ratios=RATIOS, unit=st.integers(1, 6))
def test_parts_are_consecutive_whole_units_near_the_exact_sizes(units, ratios, unit):
    bounds = cut(units * unit, ratios, unit)
    assert len(bounds) == len(ratios) + 1
    assert (bounds[0], bounds[-1]) == (0, units * unit)
    for ratio, start, stop in zip(ratios, bounds, bounds[1:], strict=False):
        assert start <= stop
        assert start % unit == 0
        assert abs((stop - start) - units * unit * ratio / sum(ratios)) < unit
        assert ratio or start == stop


@pytest.mark.parametrize(
    ("size", "ratios", "unit", "bounds"),
    [
        (6, (2, 1), 1, (0, 4, 6)),
        (1, (2, 1), 1, (0, 1, 1)),
        (0, (2, 1), 1, (0, 0, 0)),
        (3, (1, 1), 1, (0, 2, 3)),
        (8, (1, 0, 1), 4, (0, 4, 4, 8)),
    ],
)
def test_cuts(size, ratios, unit, bounds):
    assert cut(size, ratios, unit) == bounds


@pytest.mark.parametrize(
    ("size", "ratios", "unit"), [(4, (0, 0), 1), (4, (1, -1), 1), (4, (), 1), (5, (1, 1), 2)]
)
def test_what_cannot_be_cut_is_refused(size, ratios, unit):
    with pytest.raises(ValueError, match=r"ratios must|cannot be cut"):
        cut(size, ratios, unit)


def test_parts_have_the_shape_of_the_tensor_except_in_one_dimension():
    assert local_shape(Sharded(1, unit=2), (5, 6, 7), (2, 1), 0) == (5, 4, 7)
    assert local_shape(PARTIAL, (5, 6, 7), (2, 1), 0) == (5, 6, 7)


def test_programmes_are_read_as_they_were_written():
    programme = Programme(
        ratios=(2, 1),
        placements={"weight": Sharded(1, unit=4), "linear": PARTIAL, "relu": REPLICATED},
        inputs={"linear": (Sharded(2), Sharded(1, unit=4), REPLICATED)},
        shares=(0.25, 0.75),
    )
    assert Programme.from_dict(json.loads(json.dumps(programme.to_dict()))) == programme


@pytest.mark.parametrize("content", ["whole", None, {"dim": "0", "unit": 1}, {"dim": -1}, 3])
def test_other_json_is_no_placement(content):
    programme = Programme(ratios=(1,), placements={"x": PARTIAL}, inputs={})
    with pytest.raises(ValueError, match=r"not a programme of format 4: .*placements\['x'\]"):
        Programme.from_dict({**programme.to_dict(), "placements": {"x": content}})


def test_files_with_two_placements_of_a_parameter_are_refused():
    content = Programme(ratios=(1,), placements={"weight": REPLICATED}, inputs={}).to_dict()
    older = {**content, "version": 2, "parameters": {"weight": to_json_types(Sharded(0))}}
    with pytest.raises(ValueError, match="format 2, but this version of Poplar reads format 4"):
        Programme.from_dict(older)
    with pytest.raises(ValueError, match="parameters is unknown"):
        Programme.from_dict({**older, "version": 4})

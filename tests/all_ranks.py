"""Searches for plans in which all ranks take part, which is what the oracles enumerate."""

from functools import partial

from poplar.planner import search as planner

search = partial(planner.search, leave_out="never")
alternatives = partial(planner.alternatives, leave_out="never")

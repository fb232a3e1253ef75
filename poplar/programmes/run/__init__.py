"""Sharded computation: one forward and backward pass that the ranks compute together.

A tensor is replicated, sharded on a dimension with any bounds, or partial (see
`planner.graph.placement`). `collectives` moves tensors between placements, with the adjoint
collective as gradient.
"""

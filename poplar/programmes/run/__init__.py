"""Runs programmes: export of a loss, sharded computation, training.

A tensor is replicated, sharded on a dimension with any bounds, or partial (see
`programmes.graph.placement`). `collectives` moves tensors between placements, with the adjoint
collective as gradient. `distribute` is the entry point.
"""

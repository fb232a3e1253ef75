"""Programmes: each tensor of a step is sharded and communicated as a search decides."""

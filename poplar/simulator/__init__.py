"""Simulation of a step, unit by unit: the reference of the cost model."""

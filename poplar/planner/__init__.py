"""Finds the fastest plan for a measured cluster: cost model, search and baselines.

Values in, values out: no torch, no processes, no clock.
"""

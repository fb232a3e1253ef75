"""Frozen values that all layers exchange, without torch: plans, profiles, curves, errors."""

"""Passes: which collectives each of them issues, and in which order."""

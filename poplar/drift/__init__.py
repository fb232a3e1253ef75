"""Drift: ranks whose speed changes while they train, and plans that follow it."""

"""Saves, loads and reshards training state."""

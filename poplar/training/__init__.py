"""A model in training: its ranks, plan and engine, and how it changes to another plan."""

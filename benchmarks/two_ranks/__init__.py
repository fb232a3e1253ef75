"""What the two ranks of `gpu_ranks.py` do: one task per module."""

"""What `benchmarks/memory.py` runs: memory predictions, and the largest model under limits."""

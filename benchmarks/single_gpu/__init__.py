"""Parts of the benchmarks that need one GPU: `gpu_step.py` and `gpu_unequal.py`."""

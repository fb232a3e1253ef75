"""Parts of `benchmarks/integrations.py`."""

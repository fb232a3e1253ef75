"""The parts of `host_overhead.py`: fake ranks, scaled models, engines, counts."""

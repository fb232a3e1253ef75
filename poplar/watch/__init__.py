"""Watches a training job from outside: how long each rank waits, for which rank, and why.

`job` starts the job with `inject/` on its `PYTHONPATH`, so that every Python process of it loads
`recorder`. The recorder writes one line per step and rank, `records` reads them, and `verdict`
computes what the ranks wait for and what unequal batches would gain. No module imports torch; the
recorder imports nothing of Poplar, because the interpreter of the job may not have it.
"""

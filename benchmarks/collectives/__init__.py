"""What `allreduce.py` is made of: cases, who answers them, a stopwatch, rows and tables."""

"""Measures every rank in the training job, with one instrument per module."""

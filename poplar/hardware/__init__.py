"""Profiles of GPUs and clusters that were not measured: specifications, roofline, cluster files."""

"""Samplers that give every rank its part of one global batch, and batches as pytrees."""

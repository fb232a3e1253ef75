"""Finds programmes: strategies of all nodes of a graph, and the collectives between them."""

"""Simulates one step of a plan event by event: the reference for the planner's closed form."""

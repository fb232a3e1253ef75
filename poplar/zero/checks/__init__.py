"""Notices mistakes that would train on a wrong gradient without an error."""

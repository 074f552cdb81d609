"""Runs that get faults at random moments and must end as if there were none."""

"""Verification: check a run's records against its recipe, and replay logged steps."""

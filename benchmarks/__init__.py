"""Measurements, side by side: `python -m benchmarks NAME`. LOG.md has what came out, and why."""

"""Side-by-side measurements: `python -m benchmarks NAME`. What came out, and why, is in LOG.md."""

"""One file per workload. Knows torch, never the engine."""

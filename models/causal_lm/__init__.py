"""The workload causal-lm."""

"""Parallel strategies: how the processes hold the model and turn gradients into one update."""

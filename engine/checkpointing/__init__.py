"""Checkpoints: training state on disk, by parameter name, for any strategy and number of processes."""

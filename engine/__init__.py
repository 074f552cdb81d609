"""The engine, the same for every workload: planning, loading, noise, strategies, training, checkpoints."""

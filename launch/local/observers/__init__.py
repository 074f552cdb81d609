"""What watches a run beside its own log: drawn figures, and trackers such as TensorBoard."""

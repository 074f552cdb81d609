"""What single parts of a run cost: start-up, sample order, dropout, checkpoints, waiting threads."""

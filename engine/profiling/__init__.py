"""Where the time and the memory of a training step go: marks, a trace of a few steps."""

"""The machine: cores, memory and GPUs that are here, or that a name means."""

"""The command `slurm`, and what its jobs run."""

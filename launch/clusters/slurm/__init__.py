"""The command `slurm`, and what its jobs run."""

PLACE = ("slurm", "slurm.job", "Slurm", "slurm.options", "a Slurm job that trains until done", 10)
"""See `launch.clusters.cluster.Place`."""

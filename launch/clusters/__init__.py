"""Where a run may train: here, or on a cluster of Slurm, Ray or Kubernetes."""

"""Jobs on a real Slurm of two nodes; `make test-slurm` runs them."""

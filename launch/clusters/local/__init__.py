"""Training on this machine, as a cluster of one."""

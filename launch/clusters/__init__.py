"""Where a run may train: here, or on a cluster of Slurm, Ray or Kubernetes.

A new cluster is a folder beside these: its class of `cluster.py::Cluster`, the flags of `submit --to NAME`;
a line in CLUSTERS, and a row in launch/commands.csv. `launch/local/placement.py` reads what a user asks of
any cluster.
"""

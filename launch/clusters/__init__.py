"""Where a run may train: here, or on a cluster of Slurm, Ray or Kubernetes.

A new cluster is a folder beside these: `command.py` with its flags and the function behind `submit --to NAME`
(a line in `launch/cli.py`), made of what `common.py` asks of any cluster. What trains there is an `Attempt`
of `launch/local/launch_run.py`. `launch/control/` sees how a run stands, and ends it, by the locks in its
folder and its job in a queue (`engine/runs/slurm_queue.py`).
"""

#!/bin/bash
# Jobs on a Slurm cluster. Without --submit each command prepares the data, makes the run's folder and prints
# its sbatch script, so that this file can be read and tried anywhere. Add --submit to start the job; it prints
# the job's number. Type it where all nodes see the folder (--out) and the prepared data ($ISOBATCH_CACHE).
set -euo pipefail

# Two nodes of four GPUs. --time is the limit of one leg: the job saves before it, requeues itself and goes on
# until the run is done.
isobatch slurm --task ./own_task/mine.py:Mine --nodes 2 --gpus-per-node 4 --time 12:00:00 --name two-nodes

# What a cluster asks for beside: a partition, an account, more of sbatch's options, and a file of bash that the
# job reads first (modules, environments).
isobatch slurm --task ./own_task/mine.py:Mine --gpus-per-node 1 --time 1:00:00 --name small \
  --partition gpu --account lab --sbatch "--exclusive --mail-type=END" --setup environment.sh

# One run per seed, three at a time.
isobatch slurm --task ./own_task/mine.py:Mine --gpus-per-node 1 --time 1:00:00 --name seeds --array 0-9 --parallel 3

# A partition without GPUs, after job 123.
isobatch slurm --task ./own_task/mine.py:Mine --cpu --cpus-per-task 16 --time 4:00:00 --name cpus --after 123

# Runs, their jobs and states.
isobatch runs

# Read by the job of slurm.sh before it trains.
export OMP_PROC_BIND=false

#!/bin/bash
# Two nodes with 8 GPUs each, a training rank a GPU: sbatch configs/cluster/slurm.sh [--config FILE] [key=value ...]
#SBATCH --job-name=agentrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:TERM@300
set -euo pipefail

MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# Five minutes before its time is over, the run saves a checkpoint; the same script with --resume continues.
srun --kill-on-bad-exit=1 agentrl train cluster=environment "$@" &
trap 'kill -TERM $!' TERM
wait $! || wait $!

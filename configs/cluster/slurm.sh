#!/bin/bash
# Two nodes with 8 GPUs each, a training rank a GPU: sbatch configs/cluster/slurm.sh [--config FILE] [key=value ...]
# Submit it where `agentrl` is on the PATH: Slurm passes the environment on.
#SBATCH --job-name=agentrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
# Five minutes before its time is over, the ranks save a checkpoint and end; the same script with --resume continues.
#SBATCH --signal=TERM@300
set -euo pipefail

MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"  # head would end scontrol by SIGPIPE
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it from #SBATCH since Slurm 22.05

srun --kill-on-bad-exit=1 agentrl train cluster=environment "$@"

#!/usr/bin/env bash
# A run through SLURM, on as many nodes as are asked for:
#
#   sbatch --nodes 4 launch/slurm.sh accelerate_configs/nodes_fsdp2.yaml CONFIG.yaml [--section.field=value ...]
#
# Assumes nodes of eight GPUs, the repository with its `.venv` at the same path on all of them (PYTHON= chooses another
# interpreter), and by default a file system that all of them share. Five minutes before the time limit the run writes a
# checkpoint, ends, and the job goes back into the queue; after a failure of a node too. `scancel` ends it for good.
#SBATCH --job-name=olmo_hf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/slurm-%j.txt

set -u
export NUM_NODES=$SLURM_JOB_NUM_NODES
export PROCESSES_PER_NODE=${SLURM_GPUS_ON_NODE:-8}
MAIN_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MAIN_HOST
export MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))  # two jobs that share a node do not meet
export LOG_DIR=${LOG_DIR:-logs/$SLURM_JOB_ID}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
mkdir -p "$LOG_DIR"

# One task per node. When the first node has ended, the others have ten minutes to finish what they copy elsewhere.
srun --kill-on-bad-exit=0 --wait=600 bash -c 'NODE_RANK=$SLURM_NODEID exec launch/node.sh "$@"' node "$@"
code=$?

case $code in
  75 | 138)  # stopped before the time limit, with a checkpoint
    echo "requeued: the run stopped early with a checkpoint (status $code)"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit "$code"

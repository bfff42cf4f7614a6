#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.txt

# One torchrun per host. 120 seconds before the time limit, SLURM sends them a SIGTERM: the Trainer completes the
# batch, and the job is queued again. After the failure of a host, SLURM queues it itself (--requeue).
set -uo pipefail
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
    --max-restarts=3 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$first_host:29500" \
    --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-conf=join_timeout=120 \
    train.py --save-folder="${SAVE_FOLDER:-runs/digits}"
code=$?

if [ "$code" -ne 0 ] && [ "$(date +%s)" -ge $((SLURM_JOB_END_TIME - 180)) ]; then
    echo "The time limit is near: job $SLURM_JOB_ID is queued again."
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

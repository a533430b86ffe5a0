#!/usr/bin/env bash
# A fit on several nodes of a SLURM cluster, one process per GPU. It resumes after a requeue. On one node use the
# scripts of examples/ instead (docs/hardware.md).
# Run: RUN=runs/student_32b sbatch scripts/slurm.sh --config recipe_7b/sft \
#        --config add/student_32b --config hardware/multinode
# RUN is the run folder, on a disk that all nodes share. Submit from the checkout; its .venv has rlt.
#SBATCH --job-name=rlt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
: "${RUN:?must name the run folder}"

# Since SLURM 22.05 srun does not inherit --cpus-per-task: each process would have one core.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

options=("$@" --output_dir "$RUN" --resume true)
options+=(--trainer.num_nodes "$SLURM_JOB_NUM_NODES" --trainer.devices "$SLURM_NTASKS_PER_NODE")
# Five minutes before the time limit they get USR1: they write a checkpoint, and the job joins the queue again.
srun --kill-on-bad-exit=1 "${RLT:-.venv/bin/rlt}" fit "${options[@]}"

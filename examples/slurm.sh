#!/bin/bash
# Trains on one node or several, and goes on after a time limit or a preemption where it was:
#
#     sbatch examples/slurm.sh grpo_ar_lopti.py --alpha 0.3 --eta 0.5
#     sbatch --nodes 2 examples/slurm.sh grpo_ar_lopti.py --alpha 0.3 --eta 0.5
#
# Submit it from the repository's root, which must be on a disk that all nodes see. Change the numbers below to your
# cluster's. The run is in runs/slurm_JOB, and its output in slurm-JOB.out.

#SBATCH --job-name=reasoning
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1      # a torchrun, which starts a process for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0                  # all of a node's
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@900      # to this script, 15 minutes before the time is over: a step and a save must fit in them
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

script=$1
shift
run=runs/slurm_$SLURM_JOB_ID  # a job that is queued again keeps its number
if compgen -G "$run/checkpoints/step_*[0-9]/trainer_state.json" > /dev/null; then  # not step_N.tmp, half a save
    flags=(--resume "$run")  # its settings are those of the run
else
    if [ -e "$run" ]; then  # it was ended before its first checkpoint
        mv "$run" "$run.without_checkpoint_${SLURM_RESTART_COUNT:-0}"
    fi
    flags=(--run_dir "$run" "$@")
fi

# The first node's torchrun holds the meeting point of all.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
if [ "$SLURM_NNODES" -gt 1 ]; then
    # Set these to the network between the nodes (ip address shows the names) if the processes wait forever:
    # export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
    echo "$SLURM_NNODES nodes, which meet at $first:$port"
fi

# Slurm sends this script SIGTERM before the time is over. scancel hands it on to the run, which ends after its step with
# a checkpoint; srun would kill it if it got the signal. When a preemption takes the nodes away, Slurm sends SIGTERM to
# the run itself, and queues the job again (if your cluster does so).
stopped=no
trap 'stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

# --cpus-per-task: srun does not take it from sbatch, and might give all processes of a node one core.
# --kill-on-bad-exit: if a node fails, the others end, too, instead of waiting for it.
# --shutdown-timeout: torchrun would kill its processes 30 s after SIGTERM, in the middle of a step.
srun --cpus-per-task "${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
    .venv/bin/torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --shutdown-timeout 840 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:$port" \
    "$script" "${flags[@]}" &

code=0
wait $! || code=$?
while kill -0 $! 2> /dev/null; do  # a signal has ended `wait`, and the run is still saving
    code=0
    wait $! || code=$?
done
if [ $stopped = yes ]; then
    echo "stopped before its end: queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code

#!/usr/bin/env bash
# Train under Slurm: one task per GPU, a signal before the time limit, and the job back in the queue until the run is over.
#
#   sbatch --nodes 4 scripts/launch/slurm.sh experiment=paper_12b_nvfp4 parallel.tp_degree=8 run.name=first
#
# Options of sbatch override the lines below; add --partition and --account of your site. Arguments are the overrides of
# scripts/pretrain.py. Submit from the checkout: it is where the tasks run, on a file system that all nodes see.
#
# 10 minutes before the limit every task gets SIGTERM: the run ends its step, saves and leaves with 143, and the job is
# requeued and goes on from that checkpoint. The same happens at preemption. Any other end, good or bad, is final.
#
#SBATCH --job-name=nvfp4_train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/slurm_%j.log
set -euo pipefail

readonly stopped_by_signal=143 # 128 + SIGTERM
cd "${SLURM_SUBMIT_DIR:?is set by sbatch: submit this script with it}"
python=$PWD/.venv/bin/python
[[ -x $python ]] || python=python3

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${nodes[0]}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs on one node do not meet
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

"$python" scripts/pretrain.py --cfg job "$@" > /dev/null # a wrong configuration is reported once, and nothing starts

# The batch shell itself may get the signal, at preemption: the tasks have it as well, and the shell waits for them.
trap 'echo "slurm: asked to stop, waiting for the run to save"' TERM

# The single quotes are meant: each task expands its own numbers.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --wait=900 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    exec "$0" scripts/pretrain.py "$@"
' "$python" "$@" &
step=$!
code=0
wait "$step" || code=$?
if kill -0 "$step" 2> /dev/null; then # the wait was cut short by the trap
    code=0
    wait "$step" || code=$?
fi

if ((code == stopped_by_signal)); then
    echo "slurm: the run was stopped and saved; requeueing job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

#!/usr/bin/env bash
# Train with torchrun: on all GPUs of this machine, or on this machine as one of several.
#
#   scripts/launch/torchrun.sh experiment=demo
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/launch/torchrun.sh model=paper_12b ...   # the same on node1, with NODE_RANK=1
#
# Arguments are the overrides of scripts/pretrain.py. The environment:
#   NPROC              processes on this machine; default: one per GPU, or one
#   NUM_NODES          machines; default 1
#   NODE_RANK          of this machine, 0 to NUM_NODES - 1
#   MASTER_ADDR        name of machine 0; with more than one machine
#   MASTER_PORT        free there; default 29500
#   MAX_RESTARTS       restarts of all processes after one died; each goes on from the newest checkpoint; default 0
#   SHUTDOWN_SECONDS   what a run gets to save after a SIGTERM, before it is killed; default 600
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
[[ -x .venv/bin/python ]] && python=.venv/bin/python

"$python" scripts/pretrain.py --cfg job "$@" > /dev/null # a wrong configuration is reported once, and nothing starts

num_nodes=${NUM_NODES:-1}
num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
options=(
    --nproc-per-node "${NPROC:-$((num_gpus > 0 ? num_gpus : 1))}"
    --nnodes "$num_nodes"
    --max-restarts "${MAX_RESTARTS:-0}"
    --shutdown-timeout "${SHUTDOWN_SECONDS:-600}"
)
if ((num_nodes == 1)); then
    options+=(--standalone)
else
    : "${NODE_RANK:?is the rank of this machine among NUM_NODES=$num_nodes: 0 to $((num_nodes - 1))}"
    : "${MASTER_ADDR:?is the name of the machine whose NODE_RANK is 0}"
    options+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
exec "$python" -m torch.distributed.run "${options[@]}" scripts/pretrain.py "$@"

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

refuse() { # key, what it has to be
    echo "$1 = '${!1}': $2" >&2
    exit 2
}
for key in NPROC NUM_NODES MASTER_PORT; do
    [[ -z ${!key:-} || ${!key} =~ ^[1-9][0-9]*$ ]] || refuse "$key" "has to be a whole number above 0"
done
for key in NODE_RANK MAX_RESTARTS SHUTDOWN_SECONDS; do
    [[ -z ${!key:-} || ${!key} =~ ^(0|[1-9][0-9]*)$ ]] || refuse "$key" "has to be a whole number"
done
num_nodes=${NUM_NODES:-1}
if ((num_nodes > 1)); then
    NODE_RANK=${NODE_RANK:-} MASTER_ADDR=${MASTER_ADDR:-}
    [[ -n $NODE_RANK && $NODE_RANK -lt $num_nodes ]] ||
        refuse NODE_RANK "has to be the rank of this machine among NUM_NODES=$num_nodes: 0 to $((num_nodes - 1))"
    [[ -n $MASTER_ADDR ]] || refuse MASTER_ADDR "has to be the name of the machine whose NODE_RANK is 0"
fi

python=${PYTHON:-python3}
[[ -x .venv/bin/python ]] && python=.venv/bin/python

"$python" scripts/pretrain.py --cfg job "$@" > /dev/null # a wrong configuration is reported once, and nothing starts

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
    options+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
exec "$python" -m torch.distributed.run "${options[@]}" scripts/pretrain.py "$@"

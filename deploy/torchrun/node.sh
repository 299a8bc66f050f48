#!/bin/bash
# One node, or spare node, of a multi-node run: it trains while it has one of the places that places.py assigns.
# docs/recipes/torchrun.md lists which failures it survives. Edit: the environment, and the command
# after torchrun's options.
#
#     RENDEZVOUS=10.0.0.9 NODES=4 ./node.sh /shared/runs/my-run

set -euo pipefail

RUN_DIR=$1
: "${RENDEZVOUS:?the host where \`places.py serve\` runs}" "${NODES:?how many nodes train}"
HERE=$(dirname "$(realpath "$0")")

# The first trainer starts the agent in a session of its own, so it outlives torchrun. Where the end of this script ends
# its whole cgroup (a systemd unit, a container), start `memckpt agent` beside it: docs/operations.md.
# Any m of k + m nodes may be lost; k + m is at most NODES.
export MEMCKPT_PEERS=${MEMCKPT_PEERS:-erasure} MEMCKPT_PEERS_DATA=${MEMCKPT_PEERS_DATA:-3}
export MEMCKPT_PEERS_TOLERATE=${MEMCKPT_PEERS_TOLERATE:-1}
# Each restart has a store of its own: docs/operations.md#torchrun
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# is_host=false: places.py has the store, so no node of the run has to stay.
exec python "$HERE/places.py" take --at "$RENDEZVOUS:29401" -- \
    torchrun --nnodes="$NODES" --nproc-per-node="${GPUS:-1}" --max-restarts=20 \
    --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS:29400" --rdzv-conf=is_host=false --rdzv-id="$(basename "$RUN_DIR")" \
    train.py --run-dir "$RUN_DIR"

#!/bin/bash
# One node of a run over several, spare nodes too: it trains when it has one of the places that places.py gives.
# docs/recipes/torchrun.md says what survives what. Edit: the environment, and the command behind torchrun's options.
#
#     RENDEZVOUS=10.0.0.9 NODES=4 ./node.sh /shared/runs/my-run

set -euo pipefail

RUN_DIR=$1
: "${RENDEZVOUS:?the host where \`places.py serve\` runs}" "${NODES:?how many nodes train}"
HERE=$(dirname "$(realpath "$0")")

# The agent is started by the first trainer, in a session of its own, and outlives torchrun. Where the end of this script
# ends all of its cgroup (a systemd unit, a container), start `memckpt agent` beside it: docs/operations.md.
# Of each k + m nodes m may be lost; k + m is at most NODES.
export MEMCKPT_PEERS=${MEMCKPT_PEERS:-erasure} MEMCKPT_PEERS_DATA=${MEMCKPT_PEERS_DATA:-3}
export MEMCKPT_PEERS_TOLERATE=${MEMCKPT_PEERS_TOLERATE:-1}
# Each restart has a store of its own: docs/operations.md#torchrun
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# is_host=false: places.py has the store, so no node of the run has to stay.
exec python "$HERE/places.py" take --at "$RENDEZVOUS:29401" -- \
    torchrun --nnodes="$NODES" --nproc-per-node="${GPUS:-1}" --max-restarts=20 \
    --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS:29400" --rdzv-conf=is_host=false --rdzv-id="$(basename "$RUN_DIR")" \
    train.py --run-dir "$RUN_DIR"

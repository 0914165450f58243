#!/usr/bin/env bash
# Start a training script, once on every node:  launch/many_nodes.sh train.py [its arguments]
#   NUM_NODES        how many nodes, or MIN:MAX
#   HEAD             host:port on one of them where all meet; the same everywhere
#   JOB              a name for this run, the same everywhere; default: autopar
#   RANKS_PER_NODE   how many processes on this node; default: one per GPU, or per core without GPUs
#   MAX_RESTARTS     how often to start again after a failure; default 0
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A node that joins later would look for the ranks' store where the first attempt had it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --nnodes "${NUM_NODES:?how many nodes}" \
    --nproc-per-node "${RANKS_PER_NODE:-auto}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?host:port where all meet}" \
    --rdzv-id "${JOB:-autopar}" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    "$@"

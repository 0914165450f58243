#!/usr/bin/env bash
# Start a training script on this machine:  launch/one_node.sh train.py [its arguments]
#   RANKS_PER_NODE   how many processes; default: one per GPU, or per core without GPUs
#   MAX_RESTARTS     how often to start again after a failure; default 0
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec torchrun --standalone \
    --nproc-per-node "${RANKS_PER_NODE:-auto}" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    "$@"

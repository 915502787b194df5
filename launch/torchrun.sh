#!/bin/bash
# Starts a run with torchrun, on one node or on several, without Slurm. When a worker dies, all are started again
# (--max-restarts) and go on from the last commit; when the whole is started again, it goes on too.
#
#   launch/torchrun.sh train.py --save checkpoints ...
#
#   NNODES=2 RDZV_ENDPOINT=host0:29400 RDZV_ID=night-7 launch/torchrun.sh train.py --save /shared/checkpoints ...
#
# On several nodes say the same on each, with another RDZV_ID every time; --save has to lie on a file system they share.
# What this does not do: save when signalled and leave in time, kill a run that hangs, end a crash loop. For that start
# it by `megaresume run --root checkpoints -- torchrun ...`.
set -euo pipefail

nnodes=${NNODES:-1}
if [ "$nnodes" = 1 ]; then
    meet=(--standalone)
else
    meet=(--rdzv-backend c10d
          --rdzv-endpoint "${RDZV_ENDPOINT:?host:port of one of the nodes, the same on all}"
          --rdzv-id "${RDZV_ID:?a name for this start, the same on all nodes}")
fi
# torchrun lends the ranks its own store; after a restart they would find in it the addresses of the ranks that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "$nnodes" --nproc-per-node "${NPROC_PER_NODE:-gpu}" --max-restarts "${MAX_RESTARTS:-3}" \
    "${meet[@]}" "$@"

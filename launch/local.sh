#!/bin/bash
# Start a run on this machine with as many processes as it asks for.
#
#   bash launch/local.sh CONFIG [arguments of megatron_lite.train]
#
# PYTHON names the interpreter (default: that of .venv where there is one).
set -eu
[ $# -ge 1 ] || { echo "usage: bash launch/local.sh CONFIG [--set section.key=JSON ...]" >&2; exit 2; }
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || echo python)}"

ranks="$("$PYTHON" -m megatron_lite.train "$@" --validate-only |
  sed -n 's/^\/\/ DeepSpeed, derived for \([0-9]*\) ranks.*/\1/p')"
[ -n "$ranks" ] || exit 2  # refused, and told above
if [ "$ranks" = 1 ]; then
  exec "$PYTHON" -m megatron_lite.train "$@"
fi
# Ranks that share processor cores must not each take all of them.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$ranks" -m megatron_lite.train "$@"

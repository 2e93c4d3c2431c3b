#!/bin/bash
# Start a run with as many processes as it asks for, by what is there: srun within a Slurm allocation,
# torchrun on any other machine, neither for one process. Without GPUs it runs on the CPU.
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

# A shell of `srun --pty` is a step, in which no other can begin; that of salloc has a large number.
step="${SLURM_STEP_ID:-4294967290}"
if [ -n "${SLURM_JOB_ID:-}" ] && [ "$step" -ge 4294967290 ]; then
  # The blocked signal may come before Python can take note of it; see train.sbatch.
  # shellcheck disable=SC2016  # for the shell of each task
  blocked='env --block-signal=USR1 true 2>/dev/null && exec env --block-signal=USR1 "$@"
exec "$1" -c "import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.execvp(sys.argv[1], sys.argv[1:])" "$@"'
  [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
  exec srun --ntasks="$ranks" --kill-on-bad-exit=1 --export=ALL \
    sh -c "$blocked" rank "$PYTHON" -m megatron_lite.train "$@"
fi

if [ -n "${CUDA_VISIBLE_DEVICES-unset}" ] && command -v nvidia-smi >/dev/null; then
  gpus="$(nvidia-smi --list-gpus | grep -c ^GPU || true)"
  visible="${CUDA_VISIBLE_DEVICES-}"
  [ -z "$visible" ] || gpus="$(tr ',' '\n' <<<"$visible" | grep -c .)"
  if [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ]; then
    echo "$1 asks for $ranks ranks, but this machine has $gpus GPUs: change launch.gpus_per_node or" \
      "the layout, or set CUDA_VISIBLE_DEVICES= to train on the CPU" >&2
    exit 2
  fi
fi

if [ "$ranks" = 1 ]; then
  exec "$PYTHON" -m megatron_lite.train "$@"
fi
# Ranks that share processor cores must not each take all of them.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$ranks" -m megatron_lite.train "$@"

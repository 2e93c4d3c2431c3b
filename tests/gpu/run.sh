#!/usr/bin/env bash
# Everything that needs a GPU, in under 8 minutes on one large one: the marked tests, then a training
# step of a 1 to 3 B-parameter model, whose figures are the last line, as JSON.
# Uses the active Python (or PYTHON=…), where the project's packages must be importable.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "error: no CUDA device is visible to $PYTHON" >&2
  exit 2
}
"$PYTHON" -c 'import pytest' || {
  echo "error: pytest is not installed for $PYTHON" >&2
  exit 2
}
timeout 240 "$PYTHON" -m pytest -q -m gpu tests/gpu
tests=$?
timeout 240 "$PYTHON" -m tests.gpu.big_step "$@" || exit 1
exit $tests

#!/usr/bin/env bash
# Installs everything needed, then runs the checks and all tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRA=test
source launch/environment.sh

export OMP_NUM_THREADS=1
say "ruff"
ruff format --check .
ruff check .
say "mypy"
mypy megatron_lite tools
say "pytest"
python -m pytest "$@"

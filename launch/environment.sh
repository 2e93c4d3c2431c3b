# Makes the virtual environment .venv and the compiled kernels, or re-uses them. To be sourced by the
# other scripts, from the repository root; EXTRA=test adds what the tests need, VENV=/path/to/folder
# puts it elsewhere.

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-$PWD/.venv}"

say() { printf '== %s\n' "$*"; }

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "Python 3.11 or newer is needed, and '$PYTHON' is not; set PYTHON=/path/to/python3.11"
command -v g++ >/dev/null ||
  fail "a C++ compiler (g++) is needed for DeepSpeed's CPU optimizer; on Debian: apt-get install g++"

# The stamp is the setup.py that was installed; a change of it installs again.
EXTRA="${EXTRA:-}"
stamp="$VENV/installed${EXTRA:+-$EXTRA}"
if cmp -s setup.py "$stamp" || { [ -z "$EXTRA" ] && cmp -s setup.py "$VENV/installed-test"; }; then
  say "environment: re-using $VENV"
else
  say "environment: installing into $VENV (a few minutes the first time)"
  [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
  # torch first and by itself: deepspeed looks for it when it is installed.
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    "$(sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' setup.py)"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable ".${EXTRA:+[$EXTRA]}"
  cp setup.py "$stamp"
fi
export PATH="$VENV/bin:$PATH" TORCH_EXTENSIONS_DIR="$VENV/torch_extensions"

say "kernels: compiling DeepSpeed's CPU Adam unless it is there (a few minutes the first time)"
python - <<'EOP' || fail "DeepSpeed's CPU Adam did not compile; see the messages above"
import os
import torch
if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would find that too, with a warning
from megatron_lite.engine.deepspeed_setup import compile_kernels
compile_kernels()
EOP

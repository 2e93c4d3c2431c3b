#!/usr/bin/env bash
# From nothing to a trained model: environment, corpus, tokenizer, token files, training, and the same
# training going on with another layout, from a resharded checkpoint; and where to look. What an
# earlier run made is used again.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

DATA=data/quickstart
RUN=runs/quickstart
OTHER=runs/quickstart-resharded
CONFIG=configs/run/quickstart.json

# make WHAT FILE COMMAND…: runs the command unless the file is there.
make_once() {
  local what=$1 file=$2
  shift 2
  if [ -e "$file" ]; then
    say "$what: re-using $file"
  else
    say "$what: making $file"
    "$@"
  fi
}

mkdir -p "$DATA"
make_once corpus "$DATA/corpus.jsonl" \
  python tools/make_corpus.py --output "$DATA/corpus.jsonl"
make_once tokenizer "$DATA/tokenizer.model" \
  python tools/train_tokenizer.py --input "$DATA/corpus.jsonl" --output "$DATA/tokenizer.model" \
  --vocab-size 4096
make_once "token files" "$DATA/corpus_text_document.idx" \
  python tools/preprocess_data.py --input "$DATA/corpus.jsonl" --output-prefix "$DATA/corpus" \
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA/tokenizer.model" \
  --append-eod --workers 2

if [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -lt 4 ]; then
  say "training on the CPU: the layout needs four processes, and there are fewer than four GPUs"
  export CUDA_VISIBLE_DEVICES=
  if ! python -c 'import sys, torch; sys.exit(not torch.ops.mkldnn._is_mkldnn_fp16_supported())'; then
    say "this CPU has no fp16 arithmetic: training in bf16 instead, without a loss scale"
    set -- --set precision.dtype=bf16 "$@"
  fi
fi

if [ $# -eq 0 ] && grep -qs '"state": "done"' "$RUN/status.json"; then
  say "training: re-using the model in $RUN; remove that folder to train again"
else
  say "training: $CONFIG, tensor 2 x pipeline 2, four processes"
  rm -rf "$RUN"
  OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 \
    -m megatron_lite.train "$CONFIG" --run-dir "$RUN" "$@"

  say "resharding: tensor 2 x pipeline 2 -> tensor 1 x pipeline 2, with a proof"
  rm -rf "$OTHER"
  python tools/reshard_checkpoint.py --load "$RUN/checkpoints" --save "$OTHER/checkpoints" \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
  step=$(sed s/global_step// "$OTHER/checkpoints/latest")
  say "training goes on from iteration $step on two processes: the loss continues"
  OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 \
    -m megatron_lite.train "$CONFIG" --run-dir "$OTHER" "$@" \
    --set parallel.tensor_model_parallel_size=1 --set "training.train_iters=$((step + 3))" \
    --set checkpoint.load=checkpoints --set logging.log_interval=1
fi

say "metrics: $RUN/metrics.jsonl, checkpoint: $RUN/checkpoints, resolved config: $RUN/config.json"
say "curves: $VENV/bin/tensorboard --logdir $RUN/tensorboard"

"""`training`: batches, length, evaluation and recomputation; `config.batch` computes with them."""

from __future__ import annotations

from typing import Literal

from megatron_lite.config.fields import (
    DERIVE,
    Derived,
    Flag,
    Number,
    PositiveNumber,
    PositiveWhole,
    Section,
    Whole,
)


class TrainingConfig(Section):
    """Batches, length of the run, evaluation and recomputation."""

    micro_batch_size: PositiveWhole
    """Samples of one forward pass on one data-parallel rank."""

    global_batch_size: PositiveWhole
    """Samples of one optimizer step, all ranks together."""

    rampup_batch_size: tuple[PositiveWhole, PositiveWhole, PositiveWhole] | None = None
    """[start, increment, samples]: begin with `start` samples a step and add `increment` at equal
    distances until global_batch_size is reached after `samples` samples. null: global_batch_size
    from the first step."""

    train_iters: PositiveWhole | None = None
    """Length of the run in optimizer steps. Give this or train_samples."""

    train_samples: PositiveWhole | None = None
    """Length of the run in samples; a last batch that would not be full is left out. Give this or
    train_iters."""

    seed: Whole = 1234
    """Seeds initial weights, dropout and data order."""

    clip_grad: Number = 1.0
    """Largest global gradient norm; longer gradients are scaled down to it. 0: no clipping."""

    eval_interval: Whole = 0
    """Optimizer steps between two evaluations. 0: never."""

    eval_iters: PositiveWhole | None = 100
    """Global batches of one evaluation. null: the whole validation part once."""

    eval_micro_batch_size: Derived[PositiveWhole] = DERIVE
    """Samples of one forward pass in evaluation. null: micro_batch_size."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """What backward recomputes to save memory: whole layers, or only the attention core. null:
    nothing."""

    recompute_method: Literal["uniform", "block"] = "uniform"
    """With full: keep only the input of every recompute_num_layers-th layer of a stage (uniform),
    or recompute its first recompute_num_layers layers and no others (block)."""

    recompute_num_layers: PositiveWhole = 1
    """With full: layers in a recomputed unit (uniform) or recomputed layers of a stage (block)."""

    exit_duration_in_mins: PositiveNumber | None = None
    """Stop with a checkpoint after this many minutes. null: no limit."""

    compile: Flag = False
    """Compile the transformer layers and the loss with torch.compile: 10 to 60 s at the start,
    faster steps after it."""

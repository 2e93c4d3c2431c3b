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


class LossSpike(Section):
    """When a loss counts as a spike, and what is done about it, before the update is made."""

    action: Literal["log", "skip", "rewind", "stop"]
    """log: tell it. skip: leave the update out. rewind: go back to the last checkpoint and on past
    the batches. stop: end the run. All but log mean that the update is not made."""

    window: PositiveWhole = 128
    """Losses that a loss is compared with; until there are so many nothing is a spike. Spikes count
    among them, so that after about half a window a level that stays is no spike any more."""

    threshold: PositiveNumber = 10.0
    """A spike is above the median of the window by more than this many standard deviations, each
    1.4826 x the median distance to the median."""


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

    on_nan: Literal["skip", "rewind", "stop"] = "skip"
    """What to do about a step with a non-finite loss, or with non-finite gradients that a lower
    loss scale cannot cure; its cause is looked for in any case. skip: leave the update out, until
    precision.max_consecutive_nonfinite_steps. rewind: go back to the last checkpoint and on past
    the batches. stop: end the run. A batch without unmasked tokens has no loss, and is no such
    step."""

    rewind_batches: PositiveWhole | None = None
    """Global batches that a rewind leaves out: the bad one and those before it, as far as the
    checkpoint. null: all since the checkpoint."""

    max_rewinds: PositiveWhole = 3
    """Rewinds to the same checkpoint after which the run stops."""

    loss_spike: LossSpike | None = None
    """Watch for losses far above the last ones. The loss is then read in every step. null: no
    watch."""

    check_replicas_interval: Whole = 0
    """Steps between two checks that ranks with copies of the same weights hold the same bits; the
    run stops where they do not. 0: never."""

    compile: Flag = False
    """Compile the transformer layers and the loss with torch.compile: 10 to 60 s at the start,
    faster steps after it."""

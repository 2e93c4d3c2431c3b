"""The shape of what pipeline stages exchange, by the config and the batches of a run of a schedule.

Called by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.config.schema import RunConfig
from megatron_lite.data.loader import MicroBatch


def hidden_shape(
    config: RunConfig, tensor_size: int, batches: Sequence[MicroBatch]
) -> tuple[int, int]:
    """[tokens of a rank, hidden size] for micro-batches [b, s], which are all of one shape.

    `tensor_size` is the number of tensor-parallel ranks, over which sequence parallelism cuts the
    tokens. ValueError where the stages could not run the batches.
    """
    model = config.model
    shapes = {tuple(batch.tokens.shape) for batch in batches}
    if len(shapes) > 1:
        raise ValueError(f"micro-batches that run together differ in shape: {sorted(shapes)}")
    rows, length = shapes.pop()
    learned = model.position_embedding_type == "learned_absolute"
    if learned and length > model.max_position_embeddings:
        raise ValueError(
            f"sequences of {length} tokens, but model.max_position_embeddings is "
            f"{model.max_position_embeddings}"
        )
    if not config.parallel.sequence_parallel:
        return rows * length, model.hidden_size
    tokens, rest = divmod(rows * length, tensor_size)
    if rest:
        raise ValueError(
            f"micro-batches of {rows} x {length} tokens can't be cut over {tensor_size} "
            "tensor-parallel ranks, as sequence_parallel asks"
        )
    return tokens, model.hidden_size

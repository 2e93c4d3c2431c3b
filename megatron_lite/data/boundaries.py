"""What the ends of documents inside a sequence mean for loss, positions and attention.

Pure numpy over rows of tokens; called by the loader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_lite.data.errors import DataError


@dataclass(frozen=True)
class Boundaries:
    """By default nothing; with Megatron's options what they mean there.

    The token `eod` belongs to the document that it ends. eod_mask_loss gives no weight to positions
    whose input token it is (their label is the first token of an unrelated document).
    reset_position_ids makes positions begin at 0 after it, reset_attention_mask hides from a
    document those before it. DataError where one of them is asked for without an eod.
    With `packed` samples are conversations that say themselves where they begin and what counts,
    and tokens such as eod mean nothing.
    """

    eod: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        options = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        asked = [f"data.{name}" for name in options if getattr(self, name)]
        if asked and self.eod is None and not self.packed:
            raise DataError(
                f"{', '.join(asked)}: the tokenizer has no end-of-document token; set to false or "
                f"use a tokenizer that has one"
            )

    @property
    def resets(self) -> bool:
        """Whether anybody needs to know where documents lie."""
        return self.reset_position_ids or self.reset_attention_mask


WITHOUT_BOUNDARIES = Boundaries()


def documents_between(tokens: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.int32]:
    """Number the documents of each row of tokens [b, s] from 0: int32 [b, s].

    >>> documents_between(np.array([[5, 9, 9, 5]]), 9).tolist()
    [[0, 0, 1, 2]]
    """
    ends = (tokens == eod).astype(np.int32)
    return np.cumsum(ends, axis=1, dtype=np.int32) - ends


def positions_inside(document_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Count from 0 in every run of equal ids of a row: [b, s] → int64 [b, s].

    >>> positions_inside(np.array([[0, 0, 0, 1, 2, 2]])).tolist()
    [[0, 1, 2, 0, 0, 1]]
    """
    columns = np.arange(document_ids.shape[1])
    begins = np.zeros(document_ids.shape, dtype=np.int64)
    begins[:, 1:] = np.where(document_ids[:, 1:] != document_ids[:, :-1], columns[1:], 0)
    return columns - np.maximum.accumulate(begins, axis=1)


def weights_of_labels(
    loss_mask: npt.NDArray[np.int64], document_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Which positions count, from what is said of each token: [b, s + 1] → [b, s].

    A position counts if its label does and is of the same document.

    >>> weights_of_labels(np.array([[0, 1, 1, 1]]), np.array([[0, 0, 1, 1]])).tolist()
    [[True, False, True]]
    """
    same = document_ids[:, 1:] == document_ids[:, :-1]
    return same & (loss_mask[:, 1:] > 0)

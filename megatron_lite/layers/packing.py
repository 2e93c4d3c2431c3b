"""Several documents in one sequence: positions and attention that know where each begins.

Made once for a micro-batch by the model, from what the data says, and handed to every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """How a micro-batch [b, s] departs from sequences that are one document each."""

    positions: Tensor | None = None
    """int64 [b, s], the position of each token; None: 0 … s - 1."""
    mask: Tensor | None = None
    """[b, 1, s, s], what is added to the attention scores; None: causal over the whole sequence."""


UNPACKED = Packing()


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal attention inside each document: 0 where a query may see a key, else -inf.

    document_ids are integers [b, s], equal inside a document; the mask is [b, 1, s, s]. In the
    dtype of the queries all layers use the one mask as it is: SDPA would turn a boolean mask into
    such a one in every layer, and keep it until the backward.
    """
    seen = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, -torch.inf)

"""Where the tokens of sample k lie: pure integers over document lengths, no files, no torch.

The stream is all documents of epoch 0, then all of epoch 1, …, in an order keyed by (seed, epoch).
Window w is stream[w·s : w·s + s + 1]: neighbours share one token. Called by GPTDataset.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_lite.data.document_order import DocumentOrder, Piece
from megatron_lite.data.errors import TooSmallError
from megatron_lite.data.permutation import KeyedPermutation

_CACHED_EPOCHS = 2  # a window touches at most two epochs


class TokenStream:
    """Sample number → pieces of documents, for any sample number and any number of epochs.

    Nothing is dropped: the tail of an epoch that fills no window runs on into the next epoch, so a
    window belongs to the epoch of its last token. Epoch 0 has (tokens - 1) // seq_length windows;
    later ones have as many, or one more when the carried tails fill it. Windows are shuffled inside
    their epoch, but the one window that carries the previous tail comes first. Then, after any
    number of samples, how often two tokens have served as input differs by at most one.

    document_lengths: integers [documents], tokens each, kept as they are. TooSmallError when one
    epoch has fewer than seq_length + 1 tokens. Memory: 16 bytes for 256 documents, in each of the
    last two epochs.
    """

    def __init__(
        self,
        document_lengths: npt.NDArray[np.integer],
        *,
        seq_length: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self._lengths = np.asarray(document_lengths)
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle
        self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        if self.num_tokens < seq_length + 1:
            raise TooSmallError(
                f"too small: {self.num_tokens} tokens in {len(self._lengths)} documents, but one "
                f"sample of seq_length {seq_length} needs {seq_length + 1}; give more data or a "
                f"smaller seq_length"
            )
        self._orders: dict[int, DocumentOrder] = {}

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the first epoch holds; later epochs hold as many or one more."""
        return (self.num_tokens - 1) // self.seq_length

    def first_sample(self, epoch: int) -> int:
        """Return how many windows end before `epoch`, the number of the epoch's first sample."""
        return (epoch * self.num_tokens - 1) // self.seq_length if epoch else 0

    def epoch_of(self, sample: int) -> int:
        """Return the epoch that sample belongs to."""
        return (sample + 1) * self.seq_length // self.num_tokens

    def window(self, sample: int) -> int:
        """Return the window that sample `sample` shows; IndexError for a negative number."""
        if sample < 0:
            raise IndexError(f"sample numbers start at 0, got {sample}")
        epoch = self.epoch_of(sample)
        first = self.first_sample(epoch)
        fixed = first + (1 if epoch else 0)  # the window that carries the previous epoch's tail
        if not self.shuffle or sample < fixed:
            return sample
        windows = self.first_sample(epoch + 1) - fixed
        return fixed + KeyedPermutation(windows, self.seed, "windows", epoch)(sample - fixed)

    def pieces(self, sample: int) -> list[Piece]:
        """Return the document runs of sample `sample`, together seq_length + 1 tokens."""
        epoch, position = divmod(self.window(sample) * self.seq_length, self.num_tokens)
        missing = self.seq_length + 1
        found: list[Piece] = []
        while missing:
            for document, offset, length in self._order(epoch).pieces(position):
                found.append(Piece(document, offset, min(length, missing)))
                missing -= found[-1].length
                if not missing:
                    break
            epoch, position = epoch + 1, 0
        return found

    def _order(self, epoch: int) -> DocumentOrder:
        """Return the order of an epoch; the last ones are kept."""
        if epoch not in self._orders:
            if len(self._orders) == _CACHED_EPOCHS:
                self._orders.pop(next(iter(self._orders)))
            key = (self.seed, "documents", epoch) if self.shuffle else ()
            self._orders[epoch] = DocumentOrder(self._lengths, *key)
        return self._orders[epoch]

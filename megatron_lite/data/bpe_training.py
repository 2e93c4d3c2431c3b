"""Training a byte-level BPE tokenizer.json; the same input gives the same file.

Called by tools/train_tokenizer.py. Any text survives a round trip through HFTokenizer, and
gigatoken can encode with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_lite.data.errors import DataError
from megatron_lite.data.files import atomic_writer, require_file
from megatron_lite.data.training_text import read_texts, thinned_out

END_OF_DOCUMENT = "<|endoftext|>"
_SMALLEST = 257  # all bytes and the end of document


def train_byte_level_bpe(
    input: Sequence[str],
    output: str | Path,
    *,
    vocab_size: int,
    json_key: str = "text",
    max_characters: int = 3_000_000,
) -> int:
    """Train, write the tokenizer.json and return the number of texts that were used.

    Words are cut as GPT-2 does. Id 0 is <|endoftext|>, which begins and ends documents. More text
    than max_characters is thinned out evenly. DataError for bad input and for a vocabulary size
    that the text can't fill.
    """
    require_file(output)
    if vocab_size < _SMALLEST:
        raise DataError(f"--vocab-size {vocab_size}: byte-level BPE needs at least {_SMALLEST}")
    texts = thinned_out((t for t in read_texts(input, json_key) if t), max_characters)
    if not texts:
        raise DataError(f"{', '.join(map(str, input))}: no text in field {json_key!r}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (reached := tokenizer.get_vocab_size()) < vocab_size:
        raise DataError(
            f"vocabulary of {vocab_size} can't be trained on {len(texts)} texts: they give "
            f"{reached} ids; choose fewer or give more text"
        )
    with atomic_writer(output) as file:
        file.write(tokenizer.to_str(pretty=True).encode("utf-8"))
    return len(texts)

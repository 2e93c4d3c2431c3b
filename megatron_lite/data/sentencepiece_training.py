"""Training a SentencePiece tokenizer on a field of texts; the same input gives the same model.

Called by tools/train_tokenizer.py. Nothing is normalised and bytes are pieces of last resort, so
any text survives a round trip through SentencePieceTokenizer.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from megatron_lite.data.errors import DataError
from megatron_lite.data.files import atomic_writer, require_file
from megatron_lite.data.training_text import read_texts, thinned_out

_SEED_PIECES = 100_000  # the default of a million makes small vocabularies slower, not better


def train_sentencepiece(
    input: Sequence[str],
    output: str | Path,
    *,
    vocab_size: int,
    json_key: str = "text",
    model_type: str = "unigram",
    max_characters: int = 3_000_000,
    threads: int = 2,
) -> int:
    """Train, write the .model file and return the number of lines that were used.

    Ids 0, 1, 2 are unknown, begin and end; there is no pad. More text than max_characters is
    thinned out evenly. The model depends on `threads` (sums are taken in another order). DataError
    for bad input and for a vocabulary size that the text can't fill.
    """
    require_file(output)
    if threads < 1:
        raise DataError(f"--threads {threads}: must be at least 1")
    texts = read_texts(input, json_key)
    lines = thinned_out((part for t in texts for part in t.split("\n") if part), max_characters)
    if not lines:
        raise DataError(f"{', '.join(map(str, input))}: no text in field {json_key!r}")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            num_threads=threads,
            seed_sentencepiece_size=max(_SEED_PIECES, 10 * vocab_size),
            max_sentence_length=1 << 20,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"vocabulary of {vocab_size} can't be trained on {len(lines)} lines: {_reason(error)}"
        ) from error
    with atomic_writer(output) as file:
        file.write(model.getvalue())
    return len(lines)


def _reason(error: Exception) -> str:
    """Return the sentence a person needs from the library's message (after its source position and
    the condition that it found broken), or else that condition."""
    before, _, sentence = str(error).rpartition("] ")
    return sentence.strip() or f"the library demands {before.partition('[')[2]}"
